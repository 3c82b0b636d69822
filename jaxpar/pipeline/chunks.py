"""Where a prompt is cut into chunks: later tokens see more keys, so that of equal chunks later ones cost more.

A token with x before it costs 1 + x / parity, in units of all its products but those of attention over positions:
`parity` is the number of tokens of context at which these cost as much as the rest. Of a prompt of S tokens attention
is then the share a = S / (S + 2 parity), and its first u S tokens cost (1-a) u + a u^2 of it. m chunks of equal length
cost (1-a) + a (2k+1)/m of their mean each, k = 0 ... m-1.

While the pipe fills and drains its stages wait for p - 1 chunks, and for the dearest ones at that:

- Stages that run on their own take the work of a stage and (p-1) times the dearest chunk. Best are chunks of *equal
  cost*: one ends where the cost reaches k/m, at u = ((4 a k/m + (1-a)^2)^(1/2) - (1-a)) / 2a. Dynamic chunking of
  SGLang's pipelines is this, by a fitted quadratic.
- In one program every stage works on as many tokens as the largest chunk in flight, and only attention skips what is
  padding: the largest chunk's other work and the largest attention of any chunk count, (p-1) times each. Chunks of
  equal cost have a large first one, and gain little or lose. Best are *levelled* ones: equal up to the part y of the
  prompt, and then of equal attention. Where that is follows from the least (1-a) s + a (1+y^2), with s = (y + 1/y) / 2
  the largest chunk over the mean: 4 a y^3 = (1-a) (1-y^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def share_of_attention(length: int, parity: float) -> float:
    """The part of a prompt's cost that attention over positions is."""
    return length / (length + 2 * parity)


def equal_cost_ends(length: int, m: int, a: float) -> list[float]:
    """Where each of m chunks of equal cost ends, in tokens."""
    # The root without the difference, which would cancel for small a, and divide by 0 for none.
    return [
        length * 2 * part / ((1 - a) + math.sqrt((1 - a) ** 2 + 4 * a * part))
        for part in ((k + 1) / m for k in range(m))
    ]


def levelled_ends(length: int, m: int, a: float) -> list[float]:
    """Where each of m levelled chunks ends, in tokens: of equal length first, of equal attention then."""
    y = level(a)
    return [
        length * ((1 + y * y) * part / (2 * y) if part * (1 + y * y) < 2 * y * y else math.sqrt(_rest(y, part)))
        for part in ((k + 1) / m for k in range(m))
    ]


def _rest(y: float, part: float) -> float:
    return (1 + y * y) * part - y * y


def level(a: float) -> float:
    """The part of a prompt up to which levelled chunks have equal length: the root of 4 a y^3 = (1-a) (1-y^2)."""
    low, high = 0.0, 1.0
    for _ in range(60):  # the left side rises with y and the right one falls
        y = (low + high) / 2
        low, high = (low, y) if 4 * a * y**3 > (1 - a) * (1 - y * y) else (y, high)
    return high


def rounded(ends: Sequence[float], length: int, chunk: int) -> list[int]:
    """Tokens of chunks that end near `ends`, in multiples of a 32nd of `chunk`, of which there are few.

    The last has room for what is left of `length`, or more.
    """
    sizes, first, step = [], 0, max(1, chunk // 32)
    for end in ends[:-1]:
        # What rounding adds to one is missing from the next.
        size = max(1, round((end - first) / step)) * step
        if first + size >= length:
            break
        sizes.append(size)
        first += size
    return [*sizes, -(-(length - first) // step) * step]
