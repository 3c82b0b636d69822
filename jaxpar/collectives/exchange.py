"""How a sublayer joins the residual stream: enter -> local -> leave.

residual [T, D]                                        residual [T, D]
|  enter: gather the tokens that other ranks hold      ^  leave: sum the partial results,
v                                                      |         or scatter the sum over tokens
the sublayer's own work, on its slice of the width --------+
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.collectives.reduce import gather_tokens, scatter_sum
from jaxpar.plan import Sublayer

AllReduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]


def enter(x: jax.Array, sublayer: Sublayer) -> jax.Array:
    """Residual tokens [T, D] -> the tokens that the sublayer works on."""
    return gather_tokens(x, sublayer.gather)


def leave(partial: jax.Array, sublayer: Sublayer, all_reduce: AllReduce) -> jax.Array:
    """A rank's partial result [T, D] -> its contribution to the residual stream, summed exactly once."""
    return scatter_sum(all_reduce(partial, sublayer.sum), sublayer.scatter)
