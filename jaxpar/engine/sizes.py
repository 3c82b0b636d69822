"""The sizes of steps: what requests are rounded up to, so that few programs serve all of them.

The engine runs these sizes and the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

import numpy as np

from jaxpar.layout import deal, local_length, owner
from jaxpar.pipeline.chunks import levelled_ends, rounded, share_of_attention
from jaxpar.plan import Plan


def bucket(n: int) -> int:
    """The power of two at or above n."""
    return 1 << (n - 1).bit_length()


def eighths(n: int) -> int:
    """At or above n, by an eighth at most: of these there are few."""
    step = max(1, bucket(n) // 16)
    return -(-n // step) * step


def rounded_lanes(n: int) -> int:
    """The lanes for n requests: 1, 2, 4, 8, and then multiples of 8."""
    return bucket(n) if n <= 8 else -(-n // 8) * 8


def groups_in(requests: int, plan: Plan) -> int:
    """Groups into which the requests of a replica are dealt: as many as the plan asks for, if there are as many."""
    return min(plan.groups, -(-requests // (plan.mesh.dp * plan.mesh.ep)))


def lanes_of(requests: int, plan: Plan) -> int:
    """Lanes of each replica in a step, for `requests` in all."""
    return rounded_lanes(-(-requests // (plan.mesh.dp * plan.mesh.ep * groups_in(requests, plan))))


def groups_of(requests: int, plan: Plan) -> Iterator[range]:
    """Those of `requests` that run together, group after group: at most `plan.max_num_seqs` on each replica."""
    at_once = plan.max_num_seqs * plan.mesh.dp * plan.mesh.ep
    for first in range(0, requests, at_once):
        yield range(first, min(first + at_once, requests))


def prefill_chunks(longest: int, plan: Plan) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of the steps that prefill prompts of up to `longest` tokens.

    Each takes `plan.chunk` tokens; the last one as few as hold the rest, a power of two or the chunk. With a
    `chunk_parity` they are levelled instead (`pipeline/chunks.py`), in multiples of a 32nd of `plan.chunk`. There
    are no more of them than of equal ones. But for this rounding, which may add to a later one what an earlier one
    lacks, none is larger than one before it. The first are larger than the mean, so that they may exceed `plan.chunk`,
    which is about the most that chunks have in the mean.
    """
    if plan.chunk_parity and longest > plan.chunk:
        ends = levelled_ends(longest, -(-longest // plan.chunk), share_of_attention(longest, plan.chunk_parity))
        sizes = rounded(ends, longest, plan.chunk)
        yield from zip(accumulate(sizes[:-1], initial=0), sizes, strict=True)
        return
    for offset in range(0, longest, plan.chunk):
        yield offset, min(bucket(min(plan.chunk, longest - offset)), plan.chunk)


def local_tokens(tokens: int, plan: Plan) -> int:
    """Tokens of a prefill step of `tokens` that one rank of cp may hold of a request."""
    return local_length(plan.layout, tokens, plan.mesh.cp, plan.cp_interleave)


def stored_by_rank(
    prompt: int, stored: int, plan: Plan, cuts: Iterable[int] = (), longest: int | None = None
) -> np.ndarray:
    """How many of the first `stored` tokens of a request each rank of cp holds [cp]; `prompt` of them are prefilled.

    The layout deals each chunk of the prompt, the parts of one that is cut before a token of `cuts` on their own, and
    every token after it lies with the rank that its position names. `longest` is the length of the longest prompt that
    is prefilled together with it, by which unequal chunks go (None: its own).
    """
    held, end = np.zeros(plan.mesh.cp, np.int64), min(prompt, stored)
    firsts = (first for first, _ in prefill_chunks(prompt if longest is None else longest, plan))
    edges = {0, *(edge for edge in (*firsts, *cuts) if edge < end), end}
    for first, after in pairwise(sorted(edges)):
        dealt = deal(plan.layout, first, after - first, plan.mesh.cp, plan.cp_interleave)
        held += [len(tokens) for tokens in dealt]
    decoded = owner(np.arange(min(prompt, stored), stored), plan.mesh.cp, plan.cp_interleave)
    return held + np.bincount(decoded, minlength=plan.mesh.cp)


def pages_of(tokens: int, plan: Plan) -> int:
    """Pages that hold `tokens` tokens of a request on a rank."""
    return -(-tokens // plan.page_size)


def table_width(stored: int, plan: Plan) -> int:
    """Pages that a step's page table lists for each request, of which a rank has at most `stored` tokens."""
    return bucket(pages_of(stored, plan))
