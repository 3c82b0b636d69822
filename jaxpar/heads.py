"""How attention heads are dealt over tensor-parallel ranks: the one place that answers "how many heads has this rank".

Any tp works on any head counts. KV heads are copied or padded first; query heads follow their KV head, so that the
query-to-KV ratio is the same on every rank:

    32 query, 4 KV heads, tp 8          9 query, 3 KV heads, tp 2
    rank 0: kv 0 | q 0..3               rank 0: kv 0, 1 | q 0..2, 3..5
    rank 1: kv 0 | q 4..7               rank 1: kv 2, - | q 6..8, - - -
    rank 2: kv 1 | q 8..11   ...        ("-": a padded head, zero weights)

Where tp is a multiple of the KV heads, a KV head may be cut along its dimensions instead (`kv_split="head_dim"`). The
ranks that share one hold the same slice of it and of all its queries; no head is copied, and none is padded:

    32 query, 4 KV heads of 128 dimensions, tp 8
    rank 0: kv 0 | q 0..7, dimensions 0..31 and 64..95       dimensions i and i + 64 turn together (rotary pairs), so
    rank 1: kv 0 | q 0..7, dimensions 32..63 and 96..127     that keys and queries are cut by pairs; values in order
    rank 2: kv 1 | q 8..15  ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.plan import Plan

PADDED = -1


@dataclass(frozen=True)
class HeadLayout:
    """Which checkpoint head every rank's head is.

    `kv_heads` has tp * kv_local entries and `q_heads` tp * kv_local * group, rank by rank; entry i is the head of the
    checkpoint that sits there, or PADDED. The `group` query heads that follow one another share one KV head. Of each
    of its heads a rank has one of `parts` slices; ranks that follow one another have those of the same heads, in order.
    """

    tp: int
    kv_local: int
    group: int
    kv_heads: tuple[int, ...]
    q_heads: tuple[int, ...]
    parts: int = 1

    @property
    def q_local(self) -> int:
        """Query heads of one rank."""
        return self.kv_local * self.group

    @property
    def groups(self) -> list[list[int]] | None:
        """The ranks of tp that have slices of the same heads, group by group; None where every rank has whole heads."""
        if self.parts == 1:
            return None
        return [list(range(first, first + self.parts)) for first in range(0, self.tp, self.parts)]

    def slice_of(self, size: int) -> int:
        """Of the `size` dimensions of a head, how many a rank has."""
        return size // self.parts


def heads_of(config: ModelConfig, plan: Plan) -> HeadLayout:
    """How the heads of a model are dealt over tp by a plan.

    Raises:
        PlanError: the plan splits KV heads inside, and this model or mesh does not allow it.
    """
    num_q, num_kv, tp = config.num_attention_heads, config.num_key_value_heads, plan.mesh.tp
    if plan.kv_split == "head_dim":
        if config.mla is not None:
            raise PlanError(
                f"kv_split='head_dim' splits KV heads, and a {config.model_type} caches latents that serve all heads: "
                "leave it out"
            )
        if tp > num_kv:
            if plan.mesh.cp > 1:
                raise PlanError(
                    f"kv_split='head_dim' splits {num_kv} KV heads over tp={tp} and cannot run with cp={plan.mesh.cp}, "
                    f"which splits keys by positions: use tp={num_kv} and more cp, or kv_split='replicate'"
                )
            return split_inside(num_q, num_kv, config.head_dim, tp)
    return split_heads(num_q, num_kv, tp)


@lru_cache
def split_heads(num_q: int, num_kv: int, tp: int) -> HeadLayout:
    """Deal `num_q` query and `num_kv` KV heads (num_kv divides num_q) over `tp` ranks.

    Every KV head is stored `copies` times, each copy serving a part of its query group, and the last ranks are padded.
    The number of copies is the one that leaves a rank the fewest KV heads (its cache), then the fewest query heads
    (its work), then the fewest copies.
    """
    ratio = num_q // num_kv

    def cost(copies: int) -> tuple[int, int, int]:
        kv_local = -(-num_kv * copies // tp)
        return kv_local, kv_local * -(-ratio // copies), copies

    kv_local, q_local, copies = min(cost(copies) for copies in range(1, min(ratio, tp) + 1))
    group = q_local // kv_local
    kv_heads, q_heads = [], []
    for i in range(tp * kv_local):
        head, copy = divmod(i, copies)
        real = head < num_kv
        kv_heads.append(head if real else PADDED)
        for j in range(copy * group, (copy + 1) * group):
            q_heads.append(head * ratio + j if real and j < ratio else PADDED)
    return HeadLayout(tp, kv_local, group, tuple(kv_heads), tuple(q_heads))


@lru_cache
def split_inside(num_q: int, num_kv: int, head_dim: int, tp: int) -> HeadLayout:
    """Deal `num_kv` KV heads and the query heads of each over `tp` ranks, more than there are, by their dimensions.

    Raises:
        PlanError: `tp` is no multiple of `num_kv`, or the rotary pairs of a head cannot be shared evenly.
    """
    parts, rest = divmod(tp, num_kv)
    if rest:
        raise PlanError(
            f"kv_split='head_dim' gives as many ranks to each of {num_kv} KV heads, which tp={tp} does not: "
            f"use tp={parts * num_kv} or tp={(parts + 1) * num_kv}, or kv_split='replicate'"
        )
    if head_dim // 2 % parts:
        raise PlanError(
            f"kv_split='head_dim' shares the {head_dim // 2} rotary pairs of a head evenly, which tp={tp} with "
            f"{parts} ranks for each of {num_kv} KV heads does not: use another tp, or kv_split='replicate'"
        )
    ratio = num_q // num_kv
    kv_heads = tuple(rank // parts for rank in range(tp))
    q_heads = tuple(head * ratio + j for head in kv_heads for j in range(ratio))
    return HeadLayout(tp, 1, ratio, kv_heads, q_heads, parts)
