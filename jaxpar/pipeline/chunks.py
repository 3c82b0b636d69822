"""Where a prompt is cut into chunks that cost the same: later tokens see more keys, so that later chunks are smaller.

A token with x before it costs 1 + x / parity, in units of all its products but those of attention over positions:
`parity` is the number of tokens of context at which these cost as much as the rest. Of a prompt of S tokens attention
is then the share a = S / (S + 2 parity), and its first u S tokens cost (1-a) u + a u^2 of it. m chunks of equal length
cost (1-a) + a (2k+1)/m of their mean each, k = 0 ... m-1; a chunk that ends where k/m of the cost is reached ends at

    u = ((4 a k/m + (1-a)^2)^(1/2) - (1-a)) / 2a

as dynamic chunking of SGLang's pipelines does by a fitted quadratic.
"""

from __future__ import annotations

import math

from jaxpar.errors import PlanError


def share_of_attention(length: int, parity: float) -> float:
    """The part of a prompt's cost that attention over positions is."""
    return length / (length + 2 * parity)


def equal_chunk_costs(m: int, a: float) -> list[float]:
    """What each of m chunks of equal length costs, over their mean."""
    return [(1 - a) + a * (2 * k + 1) / m for k in range(m)]


def chunk_cost(first: int, size: int, length: int, a: float) -> float:
    """What `size` tokens from token `first` on cost of a prompt of `length`, all of which is 1."""
    u, v = first / length, (first + size) / length
    return (v - u) * ((1 - a) + a * (u + v))


def equal_cost_ends(length: int, m: int, a: float) -> list[float]:
    """Where each of m chunks of equal cost ends, in tokens; the last at `length`."""
    # The root without the difference, which would cancel for small a, and divide by 0 for none.
    return [
        length * 2 * part / ((1 - a) + math.sqrt((1 - a) ** 2 + 4 * a * part))
        for part in ((k + 1) / m for k in range(m))
    ]


def equal_cost_chunks(length: int, m: int, a: float) -> list[int]:
    """Tokens of each of m chunks whose costs are as equal as whole tokens allow; none is larger than one before it.

    Args:
        length: of the prompt.
        m: chunks, of a token at least each.
        a: the share of attention over positions in the prompt's cost, 0 to 1.

    Raises:
        PlanError: more chunks than tokens, none at all, or a share that cannot be.
    """
    if not 1 <= m <= length:
        raise PlanError(f"{m} chunks of {length} tokens: give 1 to {length}")
    if not 0 <= a <= 1:
        raise PlanError(f"a share of attention of {a}: it must be from 0 to 1")
    sizes, first = [], 0
    for k, end in enumerate(equal_cost_ends(length, m, a)):
        after = min(max(round(end), first + 1), length - (m - 1 - k))
        sizes.append(after - first)
        first = after
    return sorted(sizes, reverse=True)
