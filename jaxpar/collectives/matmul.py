"""`collective_matmul`: a product that gathers its rows as it goes, and one that scatters its sums as it goes.

Under sequence parallelism a product waits for all its rows, and they for no one; here each step of a ring multiplies
the rows that are there while the next ones are on their way (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition", ASPLOS 2023). Links carry both ways at once, so the front half of a rank's rows goes
round one way and the back half the other:

    gather_matmul, rank 1 of 4         front half of rank    back half of rank
      step 0   multiply  1f 1b              0 -> 1                1 <- 2
      step 1   multiply  0f 2b              3 -> 1                1 <- 3         each while the next hop is under way
      step 2   multiply  3f 3b              2 -> 1                1 <- 0
      step 3   multiply  2f 0b

    matmul_scatter, rank 1 of 4        sums for the front half of rank, passed on; for the back half
      step 0   multiply  0f 2b              0: to rank 2          2: to rank 0
      step 1   multiply  3f 3b, add         3: to rank 2          3: to rank 0   the product while sums are under way
      step 2   multiply  2f 0b, add         2: to rank 2          0: to rank 0
      step 3   multiply  1f 1b, add         1: stays              1: stays

The bytes are those of an all-gather and of a reduce-scatter. A step multiplies the rows of both halves at once. What it
costs is P readings of the weight in place of one, which a prefill does not notice and decode, which is bound by
reading weights, would: there the plan gathers and scatters without it. The rings are scans, since that is where XLA
overlaps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.move import shift
from jaxpar.collectives.reduction import summed_sublayers
from jaxpar.collectives.types import match_varying, require_varying
from jaxpar.ledger.traffic import Traffic
from jaxpar.strategies import Step, Strategy

NAME = "collective_matmul"


def gather_matmul(
    x: jax.Array, axes: tuple[str, ...], product: Callable[[jax.Array], jax.Array], sublayer: str
) -> jax.Array:
    """The product of the rows of all ranks, each of which has a slice of them.

    Args:
        x: this rank's rows [R, I].
        axes: whose P ranks have the slices; over none it is the product of `x`.
        product: of any number of rows [N, I] -> [N, O], each row by itself.
        sublayer: whose work it is, for the ledger and profiles.

    Returns:
        What `product` gives of [P * R, I], the ranks' rows one after another.
    """
    if not axes:
        return product(x)
    require_varying("gather_matmul", x, axes)
    with jax.named_scope(f"{sublayer}:{NAME}"):
        rows, ranks, rank = x.shape[0], lax.axis_size(axes), lax.axis_index(axes)
        halves = _halves(rows)

        def multiplied(parts: list[jax.Array], out: jax.Array, hops: jax.Array | int) -> jax.Array:
            """`out` with the products of the halves that are there after so many hops."""
            made = product(jnp.concatenate(parts))
            for direction, start, size in halves:
                source = (rank - direction * hops) % ranks
                part = made[start : start + size]
                out = lax.dynamic_update_slice_in_dim(out, part, source * rows + start, 0)
            return out

        def step(carry: tuple[list[jax.Array], jax.Array], hops: jax.Array) -> tuple[tuple[list[jax.Array], Any], None]:
            parts, out = carry
            return (_passed_on(parts, halves, axes), multiplied(parts, out, hops)), None

        parts = [x[start : start + size] for _, start, size in halves]
        kind = jax.eval_shape(product, x)
        out = match_varying(jnp.zeros((ranks * rows, *kind.shape[1:]), kind.dtype), kind)
        (parts, out), _ = lax.scan(step, (parts, out), jnp.arange(ranks - 1))
        return multiplied(parts, out, ranks - 1)


def matmul_scatter(
    x: jax.Array, axes: tuple[str, ...], product: Callable[[jax.Array], jax.Array], sublayer: str
) -> jax.Array:
    """This rank's slice of the sum of all ranks' products; over no axes the product itself.

    Args:
        x: this rank's operand [T, I]; where P ranks do not divide T, rows of zeros fill the last slices up.
        axes: whose P ranks have a part of the sum each, and keep a slice each.
        product: of any number of rows [N, I] -> [N, O] in float32, each row by itself.
        sublayer: whose work it is, for the ledger and profiles.

    Returns:
        [ceil(T / P), O] in the dtype of `x`, in which sums are sent; each is added to in float32.
    """
    if not axes:
        return product(x).astype(x.dtype)
    with jax.named_scope(f"{sublayer}:{NAME}"):
        ranks, rank = lax.axis_size(axes), lax.axis_index(axes)
        rows = -(-x.shape[0] // ranks)
        x = jnp.pad(x, ((0, rows * ranks - x.shape[0]), (0, 0)))
        halves = _halves(rows)

        def multiplied(hops: jax.Array | int) -> list[jax.Array]:
            """This rank's parts of the sums that it holds after so many hops: theirs who get them in the last."""
            left = ranks - 1 - hops
            targets = [(rank + direction * left) % ranks for direction, _, _ in halves]
            parts = [
                lax.dynamic_slice_in_dim(x, target * rows + start, size)
                for target, (_, start, size) in zip(targets, halves, strict=True)
            ]
            made = product(jnp.concatenate(parts))
            return [made[start : start + size] for _, start, size in halves]

        def step(sums: list[jax.Array], hops: jax.Array) -> tuple[list[jax.Array], None]:
            moved = _passed_on(sums, halves, axes)
            own = multiplied(hops)
            return [(a.astype(b.dtype) + b).astype(x.dtype) for a, b in zip(moved, own, strict=True)], None

        first = [part.astype(x.dtype) for part in multiplied(0)]
        sums, _ = lax.scan(step, first, jnp.arange(1, ranks))
        return jnp.concatenate(sums)


Half = tuple[int, int, int]
"""Direction around the ring, first row and rows of half a slice."""


def _halves(rows: int) -> list[Half]:
    """The front half of a slice, and the back half if it has any row."""
    front = -(-rows // 2)
    return [(1, 0, front), *([(-1, front, rows - front)] if rows > front else [])]


def _passed_on(parts: list[jax.Array], halves: list[Half], axes: tuple[str, ...]) -> list[jax.Array]:
    """One hop of each half, its own way."""
    return [shift(part, axes, back=direction < 0) for part, (direction, _, _) in zip(parts, halves, strict=True)]


def traffic(step: Step) -> list[Traffic]:
    """P - 1 hops each way of half a rank's rows: as they enter a sublayer, and as sums of them leave it."""
    found = []
    for scope, sublayer, layers, _ in summed_sublayers(step):
        for axes in filter(None, (sublayer.ring_in, sublayer.ring_out)):
            ranks = step.ranks(axes)
            for _, _, size in _halves(-(-step.rows // ranks)):
                calls = layers * (ranks - 1)
                found.append(step.sends((scope, NAME), "ppermute", axes, calls, size * step.row_bytes))
    return found


def check(step: Step) -> str | None:
    """Any number of tokens, also fewer than ranks."""
    return None


STRATEGY = Strategy(
    name=NAME,
    sublayer="projections",
    axes=("tp",),
    collectives=("ppermute",),
    needs="sequence_parallel",
    run=gather_matmul,
    traffic=traffic,
    check=check,
)
