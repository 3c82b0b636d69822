"""The product with a slice of a weight as GPUs compute it, in interpret mode, against a slice and a product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.kernels import gpu_sliced
from jaxpar.nn.linear import share_of

WEIGHT = np.random.default_rng(0).standard_normal((96, 80)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_is_multiplied_wherever_it_begins(axis: int, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 80 if axis == 0 else 48)).astype(np.float32)
    product = jax.jit(lambda start: gpu_sliced.product(x, WEIGHT, start, 48, axis, 16, interpret=True))
    for start in (0, 16, 32):
        own = np.take(WEIGHT, range(start, start + 48), axis)
        np.testing.assert_allclose(product(start), x @ own.T, atol=1e-4)


def test_shapes_that_are_not_whole_blocks_are_not_taken() -> None:
    assert gpu_sliced.fits(WEIGHT, 48, 0) and gpu_sliced.fits(WEIGHT, 32, 1)
    assert not gpu_sliced.fits(WEIGHT, 40, 0) and not gpu_sliced.fits(WEIGHT[:90], 32, 1)


@pytest.mark.parametrize("heads", [4, 5, 6])
def test_ranks_read_their_shares_of_one_weight_where_heads_do_not_divide(heads: int) -> None:
    mesh = jax.make_mesh((3,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    x = np.ones((2, 80), np.float32)

    def local(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        share = share_of(heads, ("cp",)).of_size(16)
        out = gpu_sliced.product(x, w, share.start, share.count, 0, share.unit, interpret=True)
        return out, share.start + jnp.arange(share.count), share.start % share.unit + jnp.zeros(1, jnp.int32)

    specs = P(None, "cp"), P("cp"), P("cp")
    # What runs inside a kernel in interpret mode has no types of its own.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    out, at, beside = jax.jit(mapped)(x, WEIGHT)
    assert set(np.asarray(at)) == set(range(16 * heads)) and not np.any(beside)
    np.testing.assert_allclose(out[0], WEIGHT.sum(axis=1)[np.asarray(at)], atol=1e-4)
