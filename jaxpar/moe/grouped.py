"""The grouped matrix product: each row times its own expert's weights, for rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.collectives.types import match_varying
from jaxpar.kernels.backend import by_backend
from jaxpar.kernels.grouped import outer, product, times
from jaxpar.moe.tiles import rows_in_tiles

T = TypeVar("T")

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""Float32 [n, I] of gate and up -> hidden [n, I], elementwise."""


def sort_by_expert(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The order in which rows lie sorted by expert, and how many rows each expert has.

    Args:
        experts: [N] int32, the expert of each row; one that is not in 0..count-1 is none.
        count: experts.

    Returns:
        order [N]: row `order[i]` comes i-th; rows of one expert stay in order, those without an expert come last.
        counts [count].
    """
    key = jnp.where((experts >= 0) & (experts < count), experts, count)
    order = jnp.argsort(key, stable=True)
    ends = jnp.searchsorted(key[order], jnp.arange(count), side="right")
    return order, jnp.diff(ends, prepend=0)


def grouped_flops(rows: int, inputs: int, outputs: int) -> int:
    """FLOPs of `grouped_matmul`, every row counted as if it had an expert.

    That is what the ledger counts, as the rows that have one are known only when a program runs. Accelerators compute
    those; a core computes its tiles, with padding of less than a tile for each expert (`moe.tiles.computed_rows`).
    """
    return 2 * rows * inputs * outputs


def grouped_matmul(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
    """Each row times the weights of its own expert (MegaBlocks, arXiv:2211.15841).

        rows       weights
        | a |
        | b |  x   expert 0 [O, I]     counts = [3, 0, 2]
        | c |
        | d |
        | e |  x   expert 2 [O, I]
        | - |  =   0

    It costs the products of rows that have an expert, and reads the weights of experts that have a row. It can be
    differentiated, in reverse and once.

    Args:
        rows: [N, I], sorted by expert. From sum(counts) on they may hold anything, NaN too.
        weights: [E, O, I], each expert's as checkpoints store it. Those of an expert without rows may hold anything
            finite (accelerators that have no kernel for it multiply them by 0), on a CPU NaN too.
        counts: [E] int32, rows of each expert; their sum is at most N.

    Returns:
        [N, O] in float32; 0 for rows from sum(counts) on.
    """
    if not len(rows):
        return jnp.zeros((0, weights.shape[1]), jnp.float32)
    return _grouped_matmul(*_alike((rows, weights, counts)))


def expert_ffn(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    counts: jax.Array,
    activation: Activation,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """down(activation(gate(x), up(x))) of each row by its own expert; on a core one tile's hidden values at a time.

    Args:
        rows: [N, D], sorted by expert, as `grouped_matmul` takes them.
        gate_up: [E, 2 * I, D], of each expert [its gate rows, its up rows].
        down: [E, D, I].
        counts: [E] int32, rows of each expert.
        activation: of gate and up in float32; its result is rounded to the dtype of the rows.
        gate_up_bias: [E, 2 * I].
        down_bias: [E, D]; of ranks that share an expert's width one has it.

    Returns:
        [N, D] in float32; 0 for rows from sum(counts) on.
    """
    if not len(rows):
        return jnp.zeros(rows.shape, jnp.float32)
    experts = _Experts(gate_up, gate_up_bias, down)
    return _add(_expert_ffn(activation, *_alike((rows, experts, counts))), _by_row(down_bias, counts, len(rows)))


def _alike(arrays: T) -> T:
    """Arrays of one type of variation, so that what sums a derivative over ranks stands outside custom derivatives."""
    leaves = jax.tree.leaves(arrays)
    matched: T = jax.tree.map(lambda x: match_varying(x, *leaves), arrays)
    return matched


@jax.custom_vjp
def _grouped_matmul(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
    return product(rows, weights, counts, contracted=2)


_Product = tuple[jax.Array, jax.Array, jax.Array]


def _grouped_forward(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> tuple[jax.Array, _Product]:
    return _grouped_matmul(rows, weights, counts), (rows, weights, counts)


def _grouped_backward(saved: _Product, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, counts = saved
    d_out = d_out.astype(weights.dtype)
    d_rows, d_weights = product(d_out, weights, counts, contracted=1), outer(d_out, rows, counts)
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None


_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


class _Experts(NamedTuple):
    """Weights of all experts, or without their leading dimension those of one."""

    gate_up: jax.Array
    gate_up_bias: jax.Array | None
    down: jax.Array


def _gated(activation: Activation, both: jax.Array, dtype: jnp.dtype) -> jax.Array:
    width = both.shape[1] // 2
    return activation(both[:, :width], both[:, width:]).astype(dtype)


def _add(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)


def _by_row(values: jax.Array | None, counts: jax.Array, rows: int) -> jax.Array | None:
    """[E, W] -> those of each row's expert, [N, W]; 0 for rows without one."""
    if values is None:
        return None
    experts = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows), side="right")
    return values.at[experts].get(mode="fill", fill_value=0)


def _hidden(
    activation: Activation, counts: jax.Array, rows: jax.Array, gate_up: jax.Array, bias: jax.Array | None
) -> jax.Array:
    both = _add(_grouped_matmul(rows, gate_up, counts), _by_row(bias, counts, len(rows)))
    return _gated(activation, both, rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_ffn(activation: Activation, rows: jax.Array, experts: _Experts, counts: jax.Array) -> jax.Array:
    def whole(rows: jax.Array, experts: _Experts, counts: jax.Array) -> jax.Array:
        hidden = _hidden(activation, counts, rows, experts.gate_up, experts.gate_up_bias)
        return _grouped_matmul(hidden, experts.down, counts)

    def of_tile(rows: jax.Array, expert: _Experts) -> jax.Array:
        bias = None if expert.gate_up_bias is None else expert.gate_up_bias[None]
        return times(_gated(activation, _add(times(rows, expert.gate_up), bias), rows.dtype), expert.down)

    def tiled(rows: jax.Array, experts: _Experts, counts: jax.Array) -> jax.Array:
        return rows_in_tiles(of_tile, rows, experts, counts, rows.shape[1])

    return by_backend(rows, experts, counts, tpu=whole, gpu=whole, default=tiled)


_Ffn = tuple[jax.Array, _Experts, jax.Array]


def _ffn_forward(
    activation: Activation, rows: jax.Array, experts: _Experts, counts: jax.Array
) -> tuple[jax.Array, _Ffn]:
    return _expert_ffn(activation, rows, experts, counts), (rows, experts, counts)


def _ffn_backward(activation: Activation, saved: _Ffn, d_out: jax.Array) -> tuple[jax.Array, _Experts, None]:
    """The hidden values are computed once more rather than kept, as under `jax.checkpoint`."""
    rows, experts, counts = saved
    inputs = rows, experts.gate_up, experts.gate_up_bias
    hidden, pull = jax.vjp(partial(_hidden, activation, counts), *inputs)
    d_hidden, d_down, _ = _grouped_backward((hidden, experts.down, counts), d_out)
    d_rows, d_gate_up, d_bias = pull(d_hidden)
    return d_rows, _Experts(d_gate_up, d_bias, d_down), None


_expert_ffn.defvjp(_ffn_forward, _ffn_backward)
