"""The sizes of steps: what requests are rounded up to, so that few programs serve all of them.

The engine runs these sizes and the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpar.layout import deal, local_length, owner
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


def local_tokens(tokens: int, plan: Plan) -> int:
    """Tokens of a prefill step of `tokens` that one rank of cp may hold of a request."""
    return local_length(plan.layout, tokens, plan.mesh.cp, plan.cp_interleave)


def stored_by_rank(prompt: int, stored: int, plan: Plan) -> np.ndarray:
    """How many of the first `stored` tokens of a request each rank of cp holds [cp]; `prompt` of them are prefilled.

    The layout deals each chunk of the prompt, and every token after it lies with the rank that its position names.
    """
    held = np.zeros(plan.mesh.cp, np.int64)
    for first, size in prefill_chunks(min(prompt, stored), plan):
        count = min(size, min(prompt, stored) - first)
        dealt = deal(plan.layout, first, count, plan.mesh.cp, plan.cp_interleave)
        held += [len(tokens) for tokens in dealt]
    decoded = owner(np.arange(min(prompt, stored), stored), plan.mesh.cp, plan.cp_interleave)
    return held + np.bincount(decoded, minlength=plan.mesh.cp)


def pages_of(tokens: int, plan: Plan) -> int:
    """Pages that hold `tokens` tokens of a request on a rank."""
    return -(-tokens // plan.page_size)


def table_width(stored: int, plan: Plan) -> int:
    """Pages that a step's page table lists for each request, of which a rank has at most `stored` tokens."""
    return bucket(pages_of(stored, plan))


def pool_size(pages: int) -> int:
    """Pages of each rank's cache where `pages` are needed: up to an eighth more, so that few sizes occur."""
    step = max(1, bucket(pages) // 16)
    return -(-pages // step) * step
