"""A group of requests in their lanes, with their cache: prefill in chunks, then decode step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.engine.lanes import assign
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.sizes import prefill_chunks, table_width
from jaxpar.plan import Phase
from jaxpar.program import Programs, StepBatch, StepOutput, Weights
from jaxpar.vocabulary.sampling import SamplingArrays


class Chunk(NamedTuple):
    """One prefill step: `tokens` of each prompt from `offset` on, which requests end in it, and its output."""

    offset: int
    tokens: int
    ended: list[int]
    output: StepOutput


class Session:
    """Requests that run together. Every request has a lane; lanes without one step along and do nothing."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        capacity: Sequence[int],
        params: SamplingParams,
    ) -> None:
        """Assign lanes and pages and make the cache.

        Args:
            programs: the model's.
            weights: on the mesh.
            prompts: token ids, of any lengths.
            capacity: the most tokens that each request will have stored.
            params: the same for all requests.
        """
        self._programs, self._weights, self._prompts = programs, weights, prompts
        self._lanes = assign(capacity, programs.plan)
        self._cache = programs.empty_cache(self._lanes.pages)
        self._stored = np.zeros(self._lanes.total, np.int32)
        self._params = params

    def prefill(self, logits: bool = False) -> Iterator[Chunk]:
        """Run the prompts through the model, `plan.chunk` tokens a step.

        The output of a chunk has the next token of the requests that end in it, or with `logits` those of every token.
        """
        longest = max(len(prompt) for prompt in self._prompts)
        for offset, size in prefill_chunks(longest, self._programs.plan):
            new = {i: prompt[offset : offset + size] for i, prompt in enumerate(self._prompts)}
            ended = [i for i, prompt in enumerate(self._prompts) if offset < len(prompt) <= offset + size]
            yield Chunk(offset, size, ended, self._step("prefill", new, size, logits))

    def decode(self, tokens: Mapping[int, int], logits: bool = False) -> StepOutput:
        """One step: the latest token of each request that goes on -> its next one, or its logits."""
        return self._step("decode", {i: [token] for i, token in tokens.items()}, 1, logits)

    def lane(self, request: int) -> int:
        """The row of a request in the outputs."""
        return self._lanes.lane[request]

    def _step(self, phase: Phase, new: Mapping[int, Sequence[int]], size: int, logits: bool) -> StepOutput:
        total, start = self._lanes.total, self._stored.copy()
        tokens = np.zeros((total, size), np.int32)
        positions = np.full((total, size), -1, np.int32)
        last = np.zeros(total, np.int32)
        for request, ids in new.items():
            row, count = self.lane(request), len(ids)
            tokens[row, :count] = ids
            positions[row, :count] = start[row] + np.arange(count)
            last[row] = max(count - 1, 0)
            self._stored[row] += count
        batch = StepBatch(tokens, positions, start, self._table(), last, self._options())
        sampled = self._params.temperature > 0
        program = self._programs.step(phase, logits, sampled and not logits)
        self._cache, output = program(self._weights, self._cache, batch)
        return output

    def _table(self) -> np.ndarray:
        """Page tables as wide as the longest request so far needs."""
        width = table_width(int(self._stored.max()), self._programs.plan)
        table = self._lanes.table[:, :width]
        return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)

    def _options(self) -> SamplingArrays:
        def lanes(value: float, dtype: Any) -> np.ndarray:
            return np.full(self._lanes.total, value, dtype)

        params = self._params
        return SamplingArrays(
            lanes(params.temperature, np.float32),
            lanes(params.top_k, np.int32),
            lanes(params.top_p, np.float32),
            lanes(params.seed, np.uint32),
            self._stored.copy(),  # a step that still runs must not see the next one's
        )
