"""Requests with their cache: prefill in chunks, then decode token by token, in groups that follow one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.batch import StepBatch, StepOutput
from jaxpar.engine.lanes import assign
from jaxpar.engine.pipe import Item, Left, Pipe
from jaxpar.engine.prefill import Part, PrefillStep, cuts_of, prefill_steps
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.sizes import stored_by_rank, table_width
from jaxpar.engine.ticks import kept_width
from jaxpar.layout import deal, owner
from jaxpar.plan import Phase
from jaxpar.program import Programs, Weights
from jaxpar.vocabulary.sampling import SamplingArrays


class Decoded(NamedTuple):
    """Next tokens: in which row of a step's output each request has its own."""

    rows: dict[int, int]
    output: StepOutput

    @property
    def tokens(self) -> dict[int, int]:
        """The token of each request."""
        tokens = np.asarray(self.output.token)
        return {request: int(tokens[row]) for request, row in self.rows.items()}


class Chunk(NamedTuple):
    """A prefill step of a group: where in the prompts it begins, which requests end in it, and its output.

    `rows[i]` and `columns[i]` say in which lanes of the output the tokens of request i stand, in order, and where among
    those of a lane; logits have them there. Requests that the step has nothing of have none.
    """

    offset: int
    rows: list[np.ndarray]
    columns: list[np.ndarray]
    ended: list[int]
    output: StepOutput

    @property
    def decoded(self) -> Decoded:
        """The first tokens of the requests that end in it."""
        return Decoded({request: int(self.rows[request][-1]) for request in self.ended}, self.output)


class Session:
    """Requests that run together. Each has a lane of a group; lanes without one step along and do nothing."""

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
        self._plan, self._prompts, self._params = programs.plan, prompts, params
        lengths = [len(prompt) for prompt in prompts]
        on_rank = [
            int(stored_by_rank(length, tokens, self._plan, cuts, max(lengths)).max())
            for length, tokens, cuts in zip(lengths, capacity, cuts_of(lengths, self._plan), strict=True)
        ]
        self._lanes = assign(on_rank, self._plan)
        self.pipe = Pipe(programs, weights, self._lanes.pages)
        # Of each request, in all and on each rank of cp.
        self._length = np.zeros(len(prompts), np.int32)
        self._stored = np.zeros((len(prompts), self._plan.mesh.cp), np.int32)
        self._turn = 0

    def prefill(self, logits: bool = False) -> Iterator[Chunk]:
        """Run the prompts through the model, a chunk of each a step.

        The output of a chunk has the next token of the requests that end in it, or with `logits` those of every token.
        """
        steps = list(prefill_steps([len(prompt) for prompt in self._prompts], self._plan))
        widest = kept_width([step.tokens for step in steps], self._plan)
        for step in steps:
            for left in self._tick("prefill", self._prefill_item(step, max(step.tokens, widest)), logits):
                yield self._chunk(left)
        for left in self._drained("prefill", logits):
            yield self._chunk(left)

    def decode(self, tokens: Mapping[int, int], logits: bool = False) -> Iterator[Decoded]:
        """One step of every group: the latest token of each request that goes on -> its next one, or its logits."""
        for group in sorted({self._lanes.group[request] for request in tokens}):
            yield from self._decoded(self._tick("decode", self._decode_item(group, tokens), logits))
        yield from self._decoded(self._drained("decode", logits))

    def turn(self, latest: MutableMapping[int, int]) -> Iterator[Decoded]:
        """The next group in turn enters with its requests' latest tokens, which are taken out of `latest`.

        Where none can, because the tokens of all of them are still under way, nothing enters. What leaves in this turn
        comes out: a group's tokens, pp turns after they entered.
        """
        waiting = {self._lanes.group[request] for request in latest}
        groups = max(self._lanes.group) + 1
        group = min(waiting, key=lambda group: (group - self._turn) % groups, default=None)
        item = None
        if group is not None:
            item, self._turn = self._decode_item(group, latest), group + 1
            for request in item.note:
                del latest[request]
        yield from self._decoded(self._tick("decode", item, logits=False))

    def turns(self, latest: MutableMapping[int, int]) -> Iterator[Decoded]:
        """Turns until no request goes on: `latest` gets the tokens of those that do as these come out."""
        while latest or not self.pipe.is_empty:
            yield from self.turn(latest)

    def _tick(self, phase: Phase, item: Item | None, logits: bool) -> Iterator[Left]:
        # Page tables are as wide as the longest request so far needs.
        keys = table_width(int(self._stored.max()), self._plan) * self._plan.page_size
        sampled = self._params.temperature > 0 and not logits
        left = self.pipe.tick(phase, item, keys, logits, sampled)
        if left is not None:
            yield left

    def _drained(self, phase: Phase, logits: bool) -> Iterator[Left]:
        """What is under way, to its end."""
        while not self.pipe.is_empty:
            yield from self._tick(phase, None, logits)

    def _prefill_item(self, step: PrefillStep, width: int) -> Item:
        plan = self._plan
        batch = self._blank(plan.mesh.dp * plan.mesh.ep * step.lanes, plan.mesh.cp * width)
        return Item(batch, width, (step, [(part, self._place(part, width, batch)) for part in step.parts]))

    def _place(self, part: Part, width: int, batch: StepBatch) -> np.ndarray:
        """Put a part of a prompt into its lane, `width` tokens on each rank -> where in the lane its tokens stand."""
        plan, (request, first, size, row) = self._plan, part
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

    def _chunk(self, left: Left) -> Chunk:
        step, placed = left.item.note
        rows, columns = ([np.zeros(0, np.int64) for _ in self._prompts] for _ in range(2))
        for part, at in placed:
            rows[part.request] = np.append(rows[part.request], np.full(part.size, left.first + part.row))
            at = at // left.item.width * left.width + at % left.item.width
            columns[part.request] = np.append(columns[part.request], at)
        ends = step.offset + step.size
        ended = sorted({part.request for part, _ in placed if len(self._prompts[part.request]) <= ends})
        return Chunk(step.offset, rows, columns, ended, left.output)

    def _decode_item(self, group: int, tokens: Mapping[int, int]) -> Item:
        """The latest tokens of those requests of a group that go on."""
        plan, batch = self._plan, self._blank(self._lanes.total, 1)
        requests = [request for request in sorted(tokens) if self._lanes.group[request] == group]
        for request in requests:
            row, position = self._lanes.lane[request], self._length[request]
            batch.tokens[row], batch.positions[row] = tokens[request], position
            mine = owner(position, plan.mesh.cp, plan.cp_interleave)
            self._take(request, row, batch, [int(rank == mine) for rank in range(plan.mesh.cp)])
        return Item(batch, 1, requests)

    def _decoded(self, left: Iterator[Left]) -> Iterator[Decoded]:
        for one in left:
            yield Decoded({request: one.first + self._lanes.lane[request] for request in one.item.note}, one.output)

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
        batch.table[row] = self._lanes.table[request]
        self._stored[request] += on_rank
        self._length[request] += sum(on_rank)
        batch.options.position[row] = self._length[request]

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
