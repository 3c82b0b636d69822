"""All communication between ranks: pure functions of a local array and axis names, checked when they are traced.

Over no axes every function is the identity, so that the program of one device holds no collective.
"""

from jaxpar.collectives.exchange import enter, leave, pick_rows
from jaxpar.collectives.move import (
    Pieces,
    all_gather,
    all_to_all,
    pass_on,
    ragged_all_to_all,
    ragged_all_to_all_into,
    shift,
)
from jaxpar.collectives.reduce import all_max, all_min, all_sum, rank_index, scatter_sum, sum_in_groups
from jaxpar.collectives.rings import ring_all_gather, ring_all_to_all, ring_reduce_scatter
from jaxpar.collectives.same import assert_same, comparing_ranks
from jaxpar.collectives.types import to_varying, varying_axes

__all__ = [
    "Pieces",
    "all_gather",
    "all_max",
    "all_min",
    "all_sum",
    "all_to_all",
    "assert_same",
    "comparing_ranks",
    "enter",
    "leave",
    "pass_on",
    "pick_rows",
    "ragged_all_to_all",
    "ragged_all_to_all_into",
    "rank_index",
    "ring_all_gather",
    "ring_all_to_all",
    "ring_reduce_scatter",
    "scatter_sum",
    "shift",
    "sum_in_groups",
    "to_varying",
    "varying_axes",
]
