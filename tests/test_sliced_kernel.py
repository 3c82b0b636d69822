"""The product with a slice of a weight as GPUs compute it, in interpret mode, against a slice and a product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.calibrate.overheads import narrow
from jaxpar.devices import make_mesh
from jaxpar.kernels import dense, gpu_sliced
from jaxpar.mesh import MeshSpec
from jaxpar.nn.linear import share_of
from jaxpar.nn.mlp import MLP
from jaxpar.plan import Plan

CP = MeshSpec(cp=3)
WEIGHT = np.random.default_rng(0).standard_normal((96, 80)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_is_multiplied_wherever_it_begins(axis: int, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 80 if axis == 0 else 48)).astype(np.float32)
    product = jax.jit(lambda start: gpu_sliced.product(x, WEIGHT, start, 48, axis, 16, interpret=True))
    for start in (0, 16, 32):
        own = np.take(WEIGHT, range(start, start + 48), axis)
        np.testing.assert_allclose(product(start), x @ own.T, atol=1e-4)


def test_many_rows_and_shapes_that_are_not_whole_blocks_are_not_taken() -> None:
    x = np.ones((256, 80), np.float32)
    assert gpu_sliced.fits(x, WEIGHT, 48, 0) and gpu_sliced.fits(x, WEIGHT, 32, 1)
    assert not gpu_sliced.fits(x, WEIGHT, 40, 0) and not gpu_sliced.fits(x, WEIGHT[:90], 32, 1)
    assert not gpu_sliced.fits(np.ones((257, 80), np.float32), WEIGHT, 48, 0)


@pytest.mark.parametrize("axes", [("cp",), ()])
def test_the_product_varies_over_the_axes_of_its_operands(axes: tuple[str, ...]) -> None:
    seen = []

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        out = gpu_sliced.product(x, w, jnp.asarray(0), 48, 0, 16)
        seen.append(jax.typeof(out).manual_axis_type.varying)
        return out

    mapped = jax.shard_map(
        local,
        mesh=make_mesh(CP, jax.devices()[:3]),
        in_specs=(P(), P(None, axes or None)),
        out_specs=P(None, axes or None),
    )
    jax.eval_shape(mapped, np.ones((4, 96), np.float32), np.ones((96, 288 if axes else 96), np.float32))
    assert seen == [set(axes)]


@pytest.mark.parametrize("heads", [4, 5, 6])
def test_ranks_read_their_shares_of_one_weight_where_heads_do_not_divide(heads: int) -> None:
    x = np.ones((2, 80), np.float32)

    def local(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        share = share_of(heads, ("cp",)).scaled(16)
        out = gpu_sliced.product(x, w, share.start, share.count, 0, share.unit, interpret=True)
        return out, share.start + jnp.arange(share.count), share.start % share.unit + jnp.zeros(1, jnp.int32)

    specs = P(None, "cp"), P("cp"), P("cp")
    # What runs inside a kernel in interpret mode has no types of its own.
    mapped = jax.shard_map(local, mesh=make_mesh(CP, jax.devices()[:3]), in_specs=P(), out_specs=specs, check_vma=False)
    out, at, beside = jax.jit(mapped)(x, WEIGHT)
    assert set(np.asarray(at)) == set(range(16 * heads)) and not np.any(beside)
    np.testing.assert_allclose(out[0], WEIGHT.sum(axis=1)[np.asarray(at)], atol=1e-4)


def in_kernels(*operands: jax.Array, default: Callable[..., jax.Array], gpu: Callable[..., jax.Array]) -> jax.Array:
    """What a GPU runs, on a CPU."""
    return gpu(*operands, interpret=True)


@pytest.mark.parametrize("width", [96, 47])
def test_an_ffn_of_which_ranks_of_cp_compute_slices_is_the_same_by_the_kernel(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(narrow(1), mlp_bias=True)
    mlp = MLP(config, Plan(CP, decode_attention="helix"), ("mlp.",), width, ())
    rng = np.random.default_rng(width)
    for one in (mlp.gate_up.weight, mlp.gate_up.bias, mlp.down.weight):
        assert one is not None
        one.set_value(jnp.asarray(rng.standard_normal(one.abstract.shape), jnp.float32))
    x = jnp.asarray(rng.standard_normal((5, config.hidden_size)), jnp.float32)
    whole = mlp(x, ())
    monkeypatch.setattr(dense, "by_backend", in_kernels)

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.psum(mlp(x, ("cp",)), "cp")

    # As above: the kernel is in interpret mode.
    parts = jax.jit(
        jax.shard_map(local, mesh=make_mesh(CP, jax.devices()[:3]), in_specs=P(), out_specs=P(), check_vma=False)
    )(x)
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-4)
