"""How attention heads are dealt over tensor-parallel ranks: the one place that answers "how many heads has this rank".

Any tp works on any head counts. KV heads are copied or padded first; query heads follow their KV head, so that the
query-to-KV ratio is the same on every rank:

    32 query, 4 KV heads, tp 8          9 query, 3 KV heads, tp 2
    rank 0: kv 0 | q 0..3               rank 0: kv 0, 1 | q 0..2, 3..5
    rank 1: kv 0 | q 4..7               rank 1: kv 2, - | q 6..8, - - -
    rank 2: kv 1 | q 8..11   ...        ("-": a padded head, zero weights)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

PADDED = -1


@dataclass(frozen=True)
class HeadLayout:
    """Which checkpoint head every rank's head is.

    `kv_heads` has tp * kv_local entries and `q_heads` tp * kv_local * group, rank by rank; entry i is the head of the
    checkpoint that sits there, or PADDED. The `group` query heads that follow one another share one KV head.
    """

    tp: int
    kv_local: int
    group: int
    kv_heads: tuple[int, ...]
    q_heads: tuple[int, ...]

    @property
    def q_local(self) -> int:
        """Query heads of one rank."""
        return self.kv_local * self.group


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
