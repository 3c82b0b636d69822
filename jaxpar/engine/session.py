"""A group of requests in their lanes, with their cache: prefill in chunks, then decode step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.engine.lanes import assign
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.sizes import local_tokens, prefill_chunks, stored_by_rank, table_width
from jaxpar.layout import deal, owner
from jaxpar.plan import Phase
from jaxpar.program import Programs, StepBatch, StepOutput, Weights
from jaxpar.vocabulary.sampling import SamplingArrays


class Chunk(NamedTuple):
    """One prefill step: where in the prompts it begins, which requests end in it, and its output.

    `columns[i]` says where the tokens of request i stand among those of its lane, in order; logits have them there.
    """

    offset: int
    columns: list[np.ndarray]
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
        plan = programs.plan
        on_rank = [
            int(stored_by_rank(len(prompt), tokens, plan).max())
            for prompt, tokens in zip(prompts, capacity, strict=True)
        ]
        self._lanes = assign(on_rank, plan)
        self._cache = programs.empty_cache(self._lanes.pages)
        self._length = np.zeros(self._lanes.total, np.int32)
        self._stored = np.zeros((self._lanes.total, plan.mesh.cp), np.int32)
        self._params = params

    def prefill(self, logits: bool = False) -> Iterator[Chunk]:
        """Run the prompts through the model, `plan.chunk` tokens a step.

        The output of a chunk has the next token of the requests that end in it, or with `logits` those of every token.
        """
        longest, plan = max(len(prompt) for prompt in self._prompts), self._programs.plan
        for offset, size in prefill_chunks(longest, plan):
            width, columns = local_tokens(size, plan), []
            batch = self._blank(plan.mesh.cp * width)
            for i, prompt in enumerate(self._prompts):
                row, ids = self.lane(i), np.asarray(prompt[offset : offset + size], np.int32)
                dealt = deal(plan.layout, offset, len(ids), plan.mesh.cp, plan.cp_interleave)
                # Each rank's tokens stand side by side, and padding after them.
                at = np.zeros(len(ids), np.int64)
                for rank, tokens in enumerate(dealt):
                    at[tokens] = rank * width + np.arange(len(tokens))
                batch.tokens[row, at] = ids
                batch.positions[row, at] = offset + np.arange(len(ids))
                batch.last[row] = at[-1] if len(ids) else 0
                self._stored[row] += [len(tokens) for tokens in dealt]
                self._length[row] += len(ids)
                columns.append(at)
            ended = [i for i, prompt in enumerate(self._prompts) if offset < len(prompt) <= offset + size]
            yield Chunk(offset, columns, ended, self._step("prefill", batch, logits))

    def decode(self, tokens: Mapping[int, int], logits: bool = False) -> StepOutput:
        """One step: the latest token of each request that goes on -> its next one, or its logits."""
        plan, batch = self._programs.plan, self._blank(1)
        for request, token in tokens.items():
            row = self.lane(request)
            batch.tokens[row], batch.positions[row] = token, self._length[row]
            self._stored[row, owner(self._length[row], plan.mesh.cp, plan.cp_interleave)] += 1
            self._length[row] += 1
        return self._step("decode", batch, logits)

    def lane(self, request: int) -> int:
        """The row of a request in the outputs."""
        return self._lanes.lane[request]

    def _blank(self, width: int) -> StepBatch:
        """A batch in which no lane does anything; `_step` adds page tables and options."""
        total = self._lanes.total
        tokens, positions = np.zeros((total, width), np.int32), np.full((total, width), -1, np.int32)
        return StepBatch(tokens, positions, self._stored.copy(), None, np.zeros(total, np.int32), None)

    def _step(self, phase: Phase, batch: StepBatch, logits: bool) -> StepOutput:
        batch = batch._replace(table=self._table(), options=self._options())
        sampled = self._params.temperature > 0
        program = self._programs.step(phase, logits, sampled and not logits)
        self._cache, output = program(self._weights, self._cache, batch)
        self._programs.note(output)
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
            self._length.copy(),  # a step that still runs must not see the next one's
        )
