"""A group of requests in their lanes, with their cache: prefill in chunks, then decode step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.engine.lanes import assign
from jaxpar.engine.prefill import Part, cuts_of, prefill_steps
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.room import room_of
from jaxpar.engine.sizes import stored_by_rank, table_width
from jaxpar.layout import deal, owner
from jaxpar.plan import Phase
from jaxpar.program import Programs, StepBatch, StepOutput, Weights
from jaxpar.strategies import Step
from jaxpar.vocabulary.sampling import SamplingArrays


class Chunk(NamedTuple):
    """One prefill step: where in the prompts it begins, which requests end in it, and its output.

    `rows[i]` and `columns[i]` say in which lanes the tokens of request i stand, in order, and where among those of a
    lane; logits have them there.
    """

    offset: int
    rows: list[np.ndarray]
    columns: list[np.ndarray]
    ended: list[int]
    output: StepOutput

    def row(self, request: int) -> int:
        """The row of the output that has the token after a request's."""
        return int(self.rows[request][-1])


class Session:
    """Requests that run together. Each has a lane of a step; lanes without one step along and do nothing."""

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
        lengths = [len(prompt) for prompt in prompts]
        on_rank = [
            int(stored_by_rank(length, tokens, plan, cuts, max(lengths)).max())
            for length, tokens, cuts in zip(lengths, capacity, cuts_of(lengths, plan), strict=True)
        ]
        self._lanes = assign(on_rank, plan)
        self._cache = programs.empty_cache(self._lanes.pages)
        # Of each request, in all and on each rank of cp.
        self._length = np.zeros(len(prompts), np.int32)
        self._stored = np.zeros((len(prompts), plan.mesh.cp), np.int32)
        self._params = params

    def prefill(self, logits: bool = False) -> Iterator[Chunk]:
        """Run the prompts through the model, a chunk of each a step.

        The output of a chunk has the next token of the requests that end in it, or with `logits` those of every token.
        """
        plan, replicas = self._programs.plan, self._programs.plan.mesh.dp * self._programs.plan.mesh.ep
        for offset, size, lanes, width, parts in prefill_steps([len(prompt) for prompt in self._prompts], plan):
            batch = self._blank(replicas * lanes, plan.mesh.cp * width)
            rows, columns = ([np.zeros(0, np.int64) for _ in self._prompts] for _ in range(2))
            for part in parts:
                at = self._place(part, width, batch)
                rows[part.request] = np.append(rows[part.request], np.full(part.size, part.row))
                columns[part.request] = np.append(columns[part.request], at)
            ended = [i for i, prompt in enumerate(self._prompts) if offset < len(prompt) <= offset + size]
            yield Chunk(offset, rows, columns, ended, self._step("prefill", batch, logits))

    def _place(self, part: Part, width: int, batch: StepBatch) -> np.ndarray:
        """Put a part of a prompt into its lane, `width` tokens on each rank -> where in the lane its tokens stand."""
        plan, (request, first, size, row) = self._programs.plan, part
        dealt = deal(plan.layout, first, size, plan.mesh.cp, plan.cp_interleave)
        # Each rank's tokens stand side by side, and padding after them.
        at = np.zeros(size, np.int64)
        for rank, tokens in enumerate(dealt):
            at[tokens] = rank * width + np.arange(len(tokens))
        batch.tokens[row, at] = self._prompts[request][first : first + size]
        batch.positions[row, at] = first + np.arange(size)
        batch.last[row] = at[-1]
        self._take(request, row, batch, [len(tokens) for tokens in dealt])
        return at

    def decode(self, tokens: Mapping[int, int], logits: bool = False) -> StepOutput:
        """One step: the latest token of each request that goes on -> its next one, or its logits."""
        plan, batch = self._programs.plan, self._blank(self._lanes.total, 1)
        for request, token in tokens.items():
            row, position = self.lane(request), self._length[request]
            batch.tokens[row], batch.positions[row] = token, position
            mine = owner(position, plan.mesh.cp, plan.cp_interleave)
            self._take(request, row, batch, [int(rank == mine) for rank in range(plan.mesh.cp)])
        return self._step("decode", batch, logits)

    def lane(self, request: int) -> int:
        """The row of a request in the outputs of decode."""
        return self._lanes.lane[request]

    def _blank(self, lanes: int, width: int) -> StepBatch:
        """A batch in which no lane does anything."""
        table = np.full((lanes, self._lanes.table.shape[1]), -1, np.int32)
        zeros = np.zeros(lanes, np.int32)
        tokens, positions = np.zeros((lanes, width), np.int32), np.full((lanes, width), -1, np.int32)
        start = np.zeros((lanes, self._stored.shape[1]), np.int32)
        return StepBatch(tokens, positions, start, table, zeros, self._options(lanes))

    def _take(self, request: int, row: int, batch: StepBatch, on_rank: Sequence[int]) -> None:
        """Let a lane have a request, of which each rank of cp stores so many more tokens."""
        batch.start[row] = self._stored[request]
        batch.table[row] = self._lanes.table[self.lane(request)]
        self._stored[request] += on_rank
        self._length[request] += sum(on_rank)
        batch.options.position[row] = self._length[request]

    def _step(self, phase: Phase, batch: StepBatch, logits: bool) -> StepOutput:
        # Page tables are as wide as the longest request so far needs.
        width = table_width(int(self._stored.max()), self._programs.plan)
        table = batch.table[:, :width]
        batch = batch._replace(table=np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1))
        sampled = self._params.temperature > 0 and not logits
        program = self._programs.step(phase, logits, sampled, self._room(phase, batch, logits, sampled))
        self._cache, output = program(self._weights, self._cache, batch)
        self._programs.note(output)
        return output

    def _room(self, phase: Phase, batch: StepBatch, logits: bool, sampled: bool) -> int:
        """The room that dispatch to experts gives the batch's tokens."""
        programs, plan = self._programs, self._programs.plan
        ranks = plan.mesh.cp if phase == "prefill" else 1
        lanes, width = len(batch.positions) // (plan.mesh.dp * plan.mesh.ep), batch.positions.shape[1] // ranks
        keys = batch.table.shape[1] * plan.page_size
        real = (batch.positions >= 0).reshape(-1, ranks, width).sum(axis=2)
        return room_of(real, Step(programs.config, plan, phase, lanes, width, keys, logits, sampled))

    def _options(self, lanes: int) -> SamplingArrays:
        def each(value: float, dtype: Any) -> np.ndarray:
            return np.full(lanes, value, dtype)

        params = self._params
        return SamplingArrays(
            each(params.temperature, np.float32),
            each(params.top_k, np.int32),
            each(params.top_p, np.float32),
            each(params.seed, np.uint32),
            each(0, np.int32),
        )
