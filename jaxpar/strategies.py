"""What a strategy is: one way to run one sublayer across axes, with the bytes that it sends and what it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpar.attention.planes import planes_of
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.heads import HeadLayout, heads_of
from jaxpar.ledger.traffic import SENT_BYTES, Traffic
from jaxpar.moe.slots import slots_per_rank
from jaxpar.pipeline.stages import Layers, kinds_of
from jaxpar.plan import Phase, Plan, SublayerName
from jaxpar.tables import human_bytes


@dataclass(frozen=True)
class Step:
    """One step of one phase, as its closed forms see it: what each rank works on.

    `lanes` requests of a replica, `tokens` new tokens of each on a rank, `keys` positions of each that the rank has
    cached, at most (its page table's width). `logits` says whether logits of every token come out (`Runner.logits`),
    `sampled` whether tokens are drawn by temperature, top-k and top-p instead of the greedy choice. `room` is what
    `standard` dispatch gathers the tokens of all ranks in, 0: the rows of each with their padding (engine/room.py).
    `differentiated`: it is the forward pass of a training step.
    """

    config: ModelConfig
    plan: Plan
    phase: Phase
    lanes: int
    tokens: int
    keys: int
    logits: bool = False
    sampled: bool = False
    room: int = 0
    differentiated: bool = False

    @cached_property
    def batches(self) -> list[Step]:
        """The step as the steps that its program runs: two of half the lanes each where the plan overlaps two batches.

        A single lane has no halves. Lanes are an even number otherwise, as the engine has them.
        """
        if not self.plan.two_batch_overlap:
            return [self]
        alone = replace(self, plan=replace(self.plan, two_batch_overlap=False))
        return [alone] if self.lanes == 1 else [replace(alone, lanes=self.lanes // 2)] * 2

    @property
    def rows(self) -> int:
        """Tokens that a rank works on, padding included."""
        return self.lanes * self.tokens

    @property
    def passed_rows(self) -> int:
        """Rows of the residual stream that a rank holds, and passes on to the next stage of a pipeline."""
        return -(-self.rows // self.ranks(self.plan.row_slices(self.phase)))

    @property
    def itemsize(self) -> int:
        """Bytes of one activation."""
        return self.plan.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of the residual stream."""
        return self.config.hidden_size * self.itemsize

    @cached_property
    def heads(self) -> HeadLayout:
        """How heads are dealt over tp."""
        return heads_of(self.config, self.plan)

    @property
    def heads_over_cp(self) -> int:
        """Query heads of a rank where those of a tp rank are dealt over cp, as decode does; the last may have fewer."""
        return -(-self.heads.q_local // self.plan.mesh.cp)

    @cached_property
    def bag_bytes(self) -> list[int]:
        """Bytes of each plane of a layer's cache that a rank's page tables list: of keys and values, or of latents."""
        planes = planes_of(self.config, self.plan)
        values = [plane.heads // self.ranks(plane.split) * plane.size for plane in planes]
        return [self.lanes * self.keys * size * self.itemsize for size in values]

    @cached_property
    def memo(self) -> dict[str, Any]:
        """What has been found out about it, so that a planner's many closed forms find it out once."""
        return {}

    @cached_property
    def _kinds(self) -> Sequence[tuple[Layers | None, Layers | None]]:
        """Of each slot its layers with a dense FFN, and those with experts."""
        return kinds_of(self.config, self.plan)

    @property
    def attention(self) -> SublayerName:
        """The plan's name for the model's attention."""
        return "attention" if self.config.mla is None else "mla"

    @property
    def layers(self) -> int:
        """Layers that a rank runs: slots, of which some may hold none on its stage of a pipeline."""
        return len(self._kinds)

    @cached_property
    def moe_layers(self) -> int:
        """Layers that a rank runs with experts in place of the FFN."""
        return sum(experts is not None for _, experts in self._kinds)

    @cached_property
    def dense_layers(self) -> int:
        """Layers that a rank runs with a dense FFN; a slot that has both on different stages counts in both."""
        return sum(dense is not None for dense, _ in self._kinds)

    @property
    def choices(self) -> int:
        """Experts that a token goes to."""
        return 0 if self.config.moe is None else self.config.moe.router.top_k

    @cached_property
    def slots_per_rank(self) -> int:
        """Slots for experts on each rank."""
        experts = 0 if self.config.moe is None else self.config.moe.num_experts
        return slots_per_rank(experts, self.ranks(self.plan.experts), self.plan.expert_slots)

    @cached_property
    def moe_rows(self) -> int:
        """Tokens that a rank dispatches, padding included."""
        sublayer = self.plan.sublayer("moe", self.phase)
        rows = self.rows if sublayer.gather else self.passed_rows
        return -(-rows // self.ranks(sublayer.deal))

    @property
    def routed(self) -> tuple[str, ...]:
        """The axes whose ranks agree on how often a dispatch runs.

        Those over which the types of tokens vary: in training also tp, each rank of which has a copy of its own.
        """
        copies = self.plan.width if self.differentiated else ()
        return self.plan.active((*self.plan.routed(self.phase), *copies))

    def width_share(self, sublayer: SublayerName, width: int) -> int:
        """The columns of a hidden layer of `width` that a rank computes, padding included."""
        over = self.plan.width_of(sublayer, self.phase)
        stored = tuple(axis for axis in over if axis in self.plan.width)
        local = -(-width // self.ranks(stored))
        return -(-local // (self.ranks(over) // self.ranks(stored)))

    def ranks(self, axes: tuple[str, ...]) -> int:
        """The size of the group that `axes` span."""
        return math.prod(self.plan.mesh.sizes[axis] for axis in axes)

    def sends(
        self,
        scope: tuple[str, str],
        collective: str,
        axes: tuple[str, ...],
        calls: int,
        message_bytes: int,
        ranks: int | None = None,
    ) -> Traffic:
        """What `calls` of a collective send for the (sublayer, strategy) of `scope`.

        `ranks` is the size of its groups where they are equal parts of the axes.
        """
        sent = SENT_BYTES[collective](message_bytes, self.ranks(axes) if ranks is None else ranks)
        return Traffic(*scope, collective, axes, calls, message_bytes, calls * sent, ranks=ranks or 0)


class Share(NamedTuple):
    """What one rank of cp attends to in a step.

    `blocks` are what goes together: the ranks whose tokens, and the ranks whose keys. For them the rank computes
    `heads` query heads, `real` of which are neither copies nor padding, `group` of them to a KV head. `all_tiles`: also
    those in which no query sees a key.
    """

    blocks: list[tuple[list[int], list[int]]]
    heads: int
    real: int
    group: int
    all_tiles: bool = False


def own_share(step: Step, rank: int) -> Share:
    """A rank with its own tokens and keys and all heads of its width: attention without cp."""
    return Share([([rank], [rank])], step.heads.q_local, step.heads.q_local, step.heads.group)


class ExpertRows(NamedTuple):
    """How many rows a rank's experts get, in a step or in an iteration of the loop that `per` names."""

    rows: int
    per: str = ""


@dataclass(frozen=True)
class Strategy:
    """A registered strategy.

    `run` is the function in the local view, `traffic` the closed form of what each rank sends in a step, `check` what
    is wrong with a step's shapes (None: nothing), and `needs` the same in words, for `jaxpar strategies`.

    Attention has more: `prepare`, run once for all layers, whose result every layer's `run` gets; `query_axes`, over
    which a rank projects only a share of its query heads; and `share`, what each rank of cp attends to, of which the
    ledger makes its FLOPs and its work. Dispatch to experts has `expert_rows`, what a rank's experts get, and where it
    runs in loops `rounds`: the iterations of each in a layer, from the share of its load [P] that each rank has.

    `backward` is the closed form of what its derivative sends; None: it cannot be differentiated, or never is.

    `lossy` is the part of the largest logit by which results may differ where what it sends is rounded by more than the
    dtype asks for; 0: it is not.
    """

    name: str
    sublayer: str
    axes: tuple[str, ...]
    collectives: tuple[str, ...]
    needs: str
    run: Callable[..., Any]
    traffic: Callable[[Step], list[Traffic]]
    check: Callable[[Step], str | None]
    prepare: Callable[..., Any] | None = None
    query_axes: tuple[str, ...] = ()
    share: Callable[[Step, int], Share] = own_share
    expert_rows: Callable[[Step], ExpertRows] | None = None
    rounds: Callable[[Step, np.ndarray], dict[str, int]] | None = None
    backward: Callable[[Step], list[Traffic]] | None = None
    lossy: float = 0.0

    def sent(self, step: Step) -> list[Traffic]:
        """What a step sends: `traffic`, and where it is differentiated its derivative, too."""
        derivative = self.backward(step) if step.differentiated and self.backward else []
        return [*self.traffic(step), *derivative]

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.traffic.__module__


class Choice(NamedTuple):
    """The name of the strategy that `auto` takes for a step, and why."""

    name: str
    reason: str


def least_sent(step: Step, strategies: Sequence[Strategy]) -> Choice:
    """The one that sends fewest bytes, by its closed form; the first of equals."""
    sent = {strategy.name: sum(row.sent_bytes for row in strategy.sent(step)) for strategy in strategies}
    best = min(sent, key=lambda name: sent[name])
    others = "".join(f", {name} {human_bytes(count)}" for name, count in sent.items() if name != best)
    return Choice(
        best, f"sends {human_bytes(sent[best])} a step{others}" if others else "the only one with the options"
    )
