"""What calibration runs: one SPMD program each, in which all ranks do the same at once, many times in a loop.

On faked devices all ranks share the machine's cores, and on real ones groups share links: what a rank gets of them is
what it gets while all others work, too.

The loops hold one operation. What it gives changes one value of what the next iteration takes, so that no compiler can
leave an iteration out or merge two, and a barrier keeps it from computing only that value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import all_gather, all_sum, all_to_all, scatter_sum, shift, to_varying
from jaxpar.mesh import AXES

Axes = tuple[str, ...]


class Loop(NamedTuple):
    """A compiled program that runs an operation `calls` times on every rank, and its arguments."""

    program: Any
    arguments: tuple[jax.Array, ...]
    calls: int


COLLECTIVES: dict[str, Callable[[jax.Array, Axes], jax.Array]] = {
    "all_reduce": all_sum,
    "all_gather": all_gather,
    "reduce_scatter": scatter_sum,
    "all_to_all": lambda x, axes: all_to_all(x, axes, 0, 0),
    "ppermute": shift,
}
"""Those that strategies use, on an array [N], with N a multiple of the ranks."""


def collective(name: str, mesh: Mesh, axes: Axes, message_bytes: int, calls: int) -> Loop:
    """Of a local float32 operand of `message_bytes`, over every group of `axes`."""
    return _loop(mesh, lambda x: COLLECTIVES[name](x, axes), calls, (message_bytes // 4,))


def product(mesh: Mesh, rows: int, width: int, dtype: Any, calls: int) -> Loop:
    """[rows, width] times [width, width] on every rank, sums in float32."""

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, preferred_element_type=jnp.float32)

    return _loop(mesh, multiply, calls, (rows, width), (width, width), dtype=dtype)


def triad(mesh: Mesh, size: int, calls: int) -> Loop:
    """STREAM's triad, b + 3 c, of float32 arrays of `size` bytes, each read once, and their sum written."""
    return _loop(mesh, lambda b, c: b + 3 * c, calls, (size // 4,), (size // 4,))


def nothing(mesh: Mesh) -> Loop:
    """A step program that works on nothing worth mentioning: what launching one takes."""
    return _loop(mesh, lambda x: x + 1, 1, (1,))


def _loop(
    mesh: Mesh,
    operation: Callable[..., jax.Array],
    calls: int,
    *shapes: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> Loop:
    """`operation` of ones of the local `shapes`, of which the first is changed by each result."""

    def local(first: jax.Array, *others: jax.Array) -> jax.Array:
        def again(_: int, x: jax.Array) -> jax.Array:
            made = lax.optimization_barrier(operation(x, *others)).ravel()[:1]
            # Times 0: a value that is the same after any number of iterations, which no compiler may know.
            changed = (made * 0 + 1).astype(x.dtype).reshape((1,) * x.ndim)
            return lax.dynamic_update_slice(x, to_varying(changed, AXES), (0,) * x.ndim)

        return lax.fori_loop(0, calls, again, first)

    spec = P(AXES)
    whole = [(shape[0] * mesh.size, *shape[1:]) for shape in shapes]
    make = jax.jit(
        lambda: tuple(jnp.ones(shape, dtype) for shape in whole),
        out_shardings=(NamedSharding(mesh, spec),) * len(whole),
    )
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(whole), out_specs=spec))
    arguments = make()
    return Loop(program.lower(*arguments).compile(), arguments, calls)
