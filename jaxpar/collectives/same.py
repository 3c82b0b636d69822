"""`assert_same`: how a sum that was put together by hand comes back to a type that says that all ranks have the same.

JAX knows it of the results of `psum` and of an `all_gather(to="invarying")`. Of what came around a ring of ppermutes it
knows nothing, though every rank holds the same bits. One identity primitive says so, and sends nothing:

    varying over tp  --  assert_same(x, ("tp",))  -->  the same on every rank of tp

It is a promise of its caller. Under `comparing_ranks()` every program that is traced checks it: where ranks differ in a
bit the result is NaN on all of them, which no later computation hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxpar.collectives.reduce import all_max, all_min
from jaxpar.collectives.types import bits_of, require_varying, varying_axes

# A context of JAX's own, so that programs traced under it and without it are kept apart.
_comparing = jax.make_user_context(False)

_assert_same_p = Primitive("assert_same")


@_assert_same_p.def_abstract_eval
def _same_type(x: Any, *, axes: tuple[str, ...]) -> Any:
    varying = varying_axes(x) - frozenset(axes)
    return x.update(manual_axis_type=x.manual_axis_type.update(varying=varying))


@_assert_same_p.def_impl
def _identity(x: Any, *, axes: tuple[str, ...]) -> Any:
    return x


def _batched(operands: Sequence[Any], dimensions: Sequence[int], *, axes: tuple[str, ...]) -> Any:
    return _assert_same_p.bind(*operands, axes=axes), dimensions[0]


mlir.register_lowering(_assert_same_p, lambda context, x, *, axes: [x])
batching.primitive_batchers[_assert_same_p] = _batched


@contextmanager
def comparing_ranks() -> Iterator[None]:
    """Programs traced meanwhile compare what `assert_same` says is the same, which costs two all-reduces each time."""
    with _comparing(True):
        yield


def assert_same(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, floats of the same bits on every rank of `axes`, of a type that says so; nothing is sent.

    Raises PlanError where the type says so already.
    """
    if not axes:
        return x
    require_varying("assert_same", x, axes)
    same: jax.Array = _assert_same_p.bind(x, axes=axes)
    if not _comparing.value:
        return same
    bits = bits_of(x).astype(jnp.uint32)
    return jnp.where(all_min(bits, axes) == all_max(bits, axes), same, jnp.full_like(same, jnp.nan))
