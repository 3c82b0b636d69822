"""Loops whose number of iterations the data decides, also where they are differentiated.

Reverse mode keeps something of each iteration, so it must know how many there can be:

    needed = 2, most = 4      run as it is      0 1            a loop with a dynamic trip count
                              differentiated    0 1 - -        a scan over the most; "-" is a skipped branch

An iteration is computed once more where its derivative is taken (`jax.checkpoint`), so that between the two passes
nothing of it is kept, and memory stays that of one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Add = Callable[[jax.Array, jax.Array], jax.Array]
"""An iteration's index and the sum so far -> the sum after it, to which it only adds."""


def add_up(add: Add, start: jax.Array, needed: jax.Array, most: int, symbol: str, differentiable: bool) -> jax.Array:
    """`start` after iterations 0 to `needed` of `add`.

    Args:
        add: what an iteration does. If it communicates, `needed` must be the same on the whole mesh.
        start: of the type that `add` gives.
        needed: iterations, at most `most`.
        most: that there can be, whatever the data.
        symbol: what the ledger calls an iteration.
        differentiable: whether derivatives have to pass.
    """
    with jax.named_scope(f"loop={symbol}"):
        if not differentiable:
            return lax.fori_loop(0, needed, add, start)

        def iteration(done: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return lax.cond(index < needed, lambda done: add(index, done), lambda done: done, done), None

        # In a scan nothing can be merged with the first computation, so it needs no barriers against that.
        checkpointed = jax.checkpoint(iteration, prevent_cse=False)
        return lax.scan(checkpointed, start, jnp.arange(most))[0]
