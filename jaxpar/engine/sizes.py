"""The sizes of steps: what requests are rounded up to, so that few programs serve all of them.

The engine runs these sizes and the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.plan import Plan


def bucket(n: int) -> int:
    """The power of two at or above n."""
    return 1 << (n - 1).bit_length()


def lanes_of(requests: int, plan: Plan) -> int:
    """Lanes of each replica for `requests` in all: 1, 2, 4, 8, and then multiples of 8."""
    each = -(-requests // (plan.mesh.dp * plan.mesh.ep))
    return bucket(each) if each <= 8 else -(-each // 8) * 8


def groups_of(requests: int, plan: Plan) -> Iterator[range]:
    """Those of `requests` that run together, group after group: at most `plan.max_num_seqs` on each replica."""
    at_once = plan.max_num_seqs * plan.mesh.dp * plan.mesh.ep
    for first in range(0, requests, at_once):
        yield range(first, min(first + at_once, requests))


def prefill_chunks(longest: int, plan: Plan) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of the steps that prefill prompts of up to `longest` tokens.

    Each takes `plan.chunk` tokens; the last one as few as hold the rest, a power of two or the chunk.
    """
    for offset in range(0, longest, plan.chunk):
        yield offset, min(bucket(min(plan.chunk, longest - offset)), plan.chunk)


def pages_of(tokens: int, plan: Plan) -> int:
    """Pages that hold `tokens` tokens of a request."""
    return -(-tokens // plan.page_size)


def table_width(stored: int, plan: Plan) -> int:
    """Pages that a step's page table lists for each request, the longest of which has `stored` tokens."""
    return bucket(pages_of(stored, plan))


def pool_size(pages: int) -> int:
    """Pages of each rank's cache where `pages` are needed: up to an eighth more, so that few sizes occur."""
    step = max(1, bucket(pages) // 16)
    return -(-pages // step) * step
