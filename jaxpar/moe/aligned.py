"""The FFN of experts in tiles of one fixed shape: what a row gives does not depend on how many rows its expert has.

Each expert's rows begin a tile, and rows of zeros fill up its last (vLLM's `moe_align_block_size`); of tiles of 4

    rows     0 0 0 0 0 2 3 3 - -
    tiles    | 0 0 0 0 | 0 . . . | 2 . . . | 3 3 . . | absent |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.types import match_varying
from jaxpar.fixed import ROWS
from jaxpar.moe.grouped import Activation


def aligned_rows(rows: int, experts: int) -> int:
    """Rows of the tiles that hold `rows` rows, however they are dealt to so many experts."""
    return ROWS * (min(rows, experts) + max(rows - experts, 0) // ROWS)


def aligned_expert_ffn(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    counts: jax.Array,
    activation: Activation,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """`moe.grouped.expert_ffn` tile by tile, on every backend; it cannot be differentiated.

    Args and result are the same. A tile that no expert needs is left out.
    """
    count, experts = len(rows), len(counts)
    if not count:
        return jnp.zeros(rows.shape, jnp.float32)
    padded = aligned_rows(count, experts)
    tiles = -(-counts // ROWS)
    tile_ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(counts)
    row = jnp.arange(count, dtype=jnp.int32)
    expert = jnp.searchsorted(row_ends, row, side="right")
    own = jnp.minimum(expert, experts - 1)
    first = (tile_ends - tiles)[own] * ROWS
    place = jnp.where(expert < experts, first + row - (row_ends - counts)[own], padded)
    spread = jnp.zeros((padded, rows.shape[1]), rows.dtype).at[place].set(rows, mode="drop")
    weights = gate_up, gate_up_bias, down, down_bias

    def of_expert(array: jax.Array | None, expert: jax.Array) -> jax.Array | None:
        return None if array is None else lax.dynamic_index_in_dim(array, expert, keepdims=False)

    def tile(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        part, expert = x
        nothing = match_varying(jnp.zeros(part.shape, jnp.float32), part, *jax.tree.leaves(weights))

        def compute(part: jax.Array) -> jax.Array:
            # The barrier keeps the weights in the loop, as in `moe.tiles.Tile.of_expert`.
            held, at = lax.optimization_barrier((weights, expert))
            gate_up, gate_up_bias, down, down_bias = (of_expert(array, at) for array in held)
            both = _add(_times(part, gate_up), gate_up_bias)
            gate, up = jnp.split(both, 2, axis=1)
            done = _add(_times(activation(gate, up).astype(part.dtype), down), down_bias)
            return match_varying(done, nothing)

        return lax.cond(expert < experts, compute, lambda _: nothing, part)

    of_tile = jnp.searchsorted(tile_ends, jnp.arange(padded // ROWS), side="right")
    done = lax.map(tile, (spread.reshape(-1, ROWS, rows.shape[1]), of_tile))
    return done.reshape(padded, -1).at[place].get(mode="fill", fill_value=0)


def _times(rows: jax.Array, weight: jax.Array | None) -> jax.Array:
    assert weight is not None
    return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _add(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)[None]
