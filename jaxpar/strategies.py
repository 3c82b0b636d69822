"""What a strategy is: one way to run one sublayer across axes, with the bytes that it sends and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpar.attention.planes import planes_of
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.heads import HeadLayout, split_heads
from jaxpar.ledger.traffic import SENT_BYTES, Traffic
from jaxpar.plan import Phase, Plan


@dataclass(frozen=True)
class Step:
    """One step of one phase, as its closed forms see it: what each rank works on.

    `lanes` requests of a replica, `tokens` new tokens of each on a rank, `keys` positions of each that the rank has
    cached, at most (its page table's width). `logits` says whether logits of every token come out (`Runner.logits`),
    `sampled` whether tokens are drawn by temperature, top-k and top-p instead of the greedy choice.
    """

    config: ModelConfig
    plan: Plan
    phase: Phase
    lanes: int
    tokens: int
    keys: int
    logits: bool = False
    sampled: bool = False

    @property
    def rows(self) -> int:
        """Tokens that a rank works on, padding included."""
        return self.lanes * self.tokens

    @property
    def itemsize(self) -> int:
        """Bytes of one activation."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.plan.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of the residual stream."""
        return self.config.hidden_size * self.itemsize

    @cached_property
    def heads(self) -> HeadLayout:
        """How heads are dealt over tp."""
        return split_heads(self.config.num_attention_heads, self.config.num_key_value_heads, self.plan.mesh.tp)

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

    def ranks(self, axes: tuple[str, ...]) -> int:
        """The size of the group that `axes` span."""
        return int(np.prod([self.plan.mesh.sizes[axis] for axis in axes], dtype=np.int64))

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
        return Traffic(*scope, collective, axes, calls, message_bytes, calls * sent)


class Share(NamedTuple):
    """What one rank of cp attends to in a step.

    `blocks` are what goes together: the ranks whose tokens, and the ranks whose keys. For them the rank computes
    `heads` query heads, `real` of which are neither copies nor padding, `group` of them to a KV head.
    """

    blocks: list[tuple[list[int], list[int]]]
    heads: int
    real: int
    group: int


def own_share(step: Step, rank: int) -> Share:
    """A rank with its own tokens and keys and all heads of its width: attention without cp."""
    return Share([([rank], [rank])], step.heads.q_local, step.heads.q_local, step.heads.group)


@dataclass(frozen=True)
class Strategy:
    """A registered strategy.

    `run` is the function in the local view, `traffic` the closed form of what each rank sends in a step, `check` what
    is wrong with a step's shapes (None: nothing), and `needs` the same in words, for `jaxpar strategies`.

    Attention has more: `prepare`, run once for all layers, whose result every layer's `run` gets; `query_axes`, over
    which a rank projects only a share of its query heads; and `share`, what each rank of cp attends to, of which the
    ledger makes its FLOPs and its work.
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

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.traffic.__module__
