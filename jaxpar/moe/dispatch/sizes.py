"""How large the buffers of a dispatch are, and how often they fill: the closed forms of what is sent and computed.

R tokens a rank choose k slots each, of P ranks with S slots. Under even routing a rank sends another R * k / P choices;
and of its tokens those that have a choice there, R * (1 - C(PS - S, k) / C(PS, k)), as choices of a token differ.
"""

from __future__ import annotations

import math

SLACK = 1.5
"""A buffer over what even routing fills: enough for the fullest of a few hundred rows."""


def buffer_rows(even: float, most: int, slack: float = SLACK) -> int:
    """Messages that a round takes of each pair, which has `even` under even routing, and never more than `most`."""
    return min(most, math.ceil(slack * even))


def block_rows(rows: int, choices: int, blocks: int = 1) -> int:
    """Choices of copies that experts take at a time: even routing gives them those of as many tokens as a rank has.

    Of copies that come in several blocks, an equal part of those.
    """
    return math.ceil(SLACK * rows * choices / blocks)


def carried_choices(choices: int, slots: int) -> int:
    """Choices that a copy carries: a token has no more on a rank than that has slots."""
    return min(choices, slots)


def even_copies(choices: int, ranks: int, slots: int) -> float:
    """The part of all tokens that have a choice on a given rank, if each slot of all is chosen as often."""
    return 1 - math.comb((ranks - 1) * slots, choices) / math.comb(ranks * slots, choices)


def likely_copies(choices: int, share: float) -> float:
    """The part of all tokens that have a choice on a rank with this share of the load, each choice drawn by itself."""
    return 1 - (1 - share) ** choices


def iterations(rows: float, buffer: int) -> int:
    """How often a buffer takes `rows` in, once at least."""
    return max(1, -(-math.ceil(round(rows, 6)) // buffer))
