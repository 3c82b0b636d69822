"""The steps of a prefill: which tokens of which request each takes, and in which lanes they sit.

A step takes a chunk of every prompt (`engine/sizes.py`). Under `two_batch_overlap` the lanes of a replica are two
halves, and the step's tokens are cut in two. A request that the cut goes through has a lane in either half; the second
finds the keys of the first in the cache, as those of a chunk before it:

    three prompts of 3, 7 and 2 tokens        half A   a0 a1 a2     b0 b1 b2
                                              half B   b3 b4 b5 b6  c0 c1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxpar.engine.lanes import groups_in_turn, lanes_in_turn
from jaxpar.engine.sizes import eighths, lanes_of, local_tokens, prefill_chunks, rounded_lanes
from jaxpar.plan import Plan


class Part(NamedTuple):
    """`size` tokens of a request, from its token `first` on, in lane `row` of all replicas' lanes."""

    request: int
    first: int
    size: int
    row: int


class PrefillStep(NamedTuple):
    """Tokens `offset` to `offset + size` of a group's prompts, `lanes` of a replica, `tokens` of a lane on a rank."""

    offset: int
    size: int
    lanes: int
    tokens: int
    parts: list[Part]


def prefill_steps(lengths: Sequence[int], plan: Plan) -> Iterator[PrefillStep]:
    """The steps that prefill prompts of these lengths, of which replicas get one after the other in turn.

    Each is of one group; of each chunk the groups that have tokens in it come in order, so that the next chunk of a
    group has all others between.
    """
    rows, groups = lanes_in_turn(len(lengths), plan), groups_in_turn(len(lengths), plan)
    for offset, size in prefill_chunks(max(lengths), plan):
        counts = [min(max(length - offset, 0), size) for length in lengths]
        if plan.two_batch_overlap:
            yield _two_batches(offset, size, counts, plan)
            continue
        for group in sorted({groups[request] for request, count in enumerate(counts) if count}):
            of_group = [request for request, count in enumerate(counts) if count and groups[request] == group]
            parts = [Part(request, offset, counts[request], rows[request]) for request in of_group]
            yield PrefillStep(offset, size, lanes_of(len(lengths), plan), local_tokens(size, plan), parts)


def _two_batches(offset: int, size: int, counts: Sequence[int], plan: Plan) -> PrefillStep:
    """Both halves with as many lanes and tokens as the fuller one of any replica needs, up to an eighth more tokens."""
    replicas = plan.mesh.dp * plan.mesh.ep
    halves = [half for replica in range(replicas) for half in _halves(counts[replica::replicas])]
    lanes = rounded_lanes(max(len(half) for half in halves))
    most = max(count for half in halves for _, _, count in half)
    parts = [
        Part(slot * replicas + index // 2, offset + first, count, index * lanes + lane)
        for index, half in enumerate(halves)
        for lane, (slot, first, count) in enumerate(half)
    ]
    return PrefillStep(offset, size, 2 * lanes, local_tokens(min(eighths(most), size), plan), parts)


def _halves(counts: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """(request, first token, tokens) of either half of a replica's requests; those without a token are in none."""
    cut, token = split_in_two(counts)
    first = token - sum(counts[:cut])
    before = [(request, 0, count) for request, count in enumerate(counts[:cut])]
    after = [(request, 0, count) for request, count in enumerate(counts) if request > cut]
    if cut < len(counts):
        before, after = [*before, (cut, 0, first)], [(cut, first, counts[cut] - first), *after]
    return [[part for part in half if part[2]] for half in (before, after)]


def split_in_two(lengths: Sequence[int]) -> tuple[int, int]:
    """Where a prefill of so many tokens of each request is cut: (request, token), the token counted over all of them.

    It is cut before a request, at the most even place, if the first half then has between 48 % and 52 % of the tokens;
    else before the middle one of all tokens, wherever that is in its request (SGLang's two-batch overlap).
    """
    ends = list(accumulate(lengths, initial=0))
    total = ends[-1]
    best = min(range(1, len(lengths)), key=lambda request: (abs(2 * ends[request] - total), -request), default=0)
    if best and 48 * total <= 100 * ends[best] <= 52 * total:
        return best, ends[best]
    return bisect_right(ends, total // 2) - 1, total // 2


def cuts_of(lengths: Sequence[int], plan: Plan) -> list[tuple[int, ...]]:
    """For each prompt the tokens before which a chunk of it is cut in two."""
    cuts: list[list[int]] = [[] for _ in lengths]
    for step in prefill_steps(lengths, plan) if plan.two_batch_overlap else ():
        for part in step.parts:
            if part.first > step.offset:
                cuts[part.request].append(part.first)
    return [tuple(places) for places in cuts]
