"""The grouped product as TPUs and GPUs compute it, in interpret mode, against one product for each expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.kernels import gpu_grouped, tpu_grouped
from jaxpar.moe.tiles import owned_tiles

# Of 48 rows: the first and the last expert, none, a tile and one more, all for one, no row at all.
COUNTS = {
    "some": [5, 0, 17, 9],
    "ends": [1, 0, 0, 31],
    "one": [0, 48, 0, 0],
    "none": [0, 0, 0, 0],
    "full": [16, 16, 0, 16],
}
KERNELS = {"tpu": tpu_grouped, "gpu": gpu_grouped}
SHAPES = {"tpu": (256, 128), "gpu": (48, 80)}


@cache
def compiled(platform: str, contracted: int) -> Callable[..., jax.Array]:
    kernel = partial(KERNELS[platform].product, contracted=contracted, interpret=True)
    return jax.jit(lambda rows, weights, counts: kernel(rows, weights, counts))


@pytest.mark.parametrize("contracted", [1, 2])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("platform", KERNELS)
def test_each_row_is_multiplied_by_its_own_expert(platform: str, counts: list[int], contracted: int) -> None:
    rng = np.random.default_rng(sum(counts) + contracted)
    weights = rng.standard_normal((4, *SHAPES[platform])).astype(np.float32)
    rows = rng.standard_normal((48, weights.shape[contracted])).astype(np.float32)
    rows[sum(counts) :] = np.nan
    assert KERNELS[platform].fits(rows, weights, contracted)
    found = compiled(platform, contracted)(rows, weights, np.array(counts, np.int32))
    ends = np.cumsum(counts)
    for expert, (start, end) in enumerate(zip(ends - counts, ends, strict=True)):
        expected = rows[start:end] @ (weights[expert].T if contracted == 2 else weights[expert])
        np.testing.assert_allclose(found[start:end], expected, atol=1e-4)


def test_a_gpu_takes_fewer_rows_than_a_tile_has() -> None:
    rows, weights = jnp.arange(32.0).reshape(2, 16), jnp.ones((3, 16, 16))
    found = compiled("gpu", 2)(rows, weights, jnp.array([1, 0, 1]))
    np.testing.assert_allclose(found, np.repeat(rows.sum(axis=1, keepdims=True), 16, axis=1))


@pytest.mark.parametrize("axes", [("ep",), ()])
@pytest.mark.parametrize("platform", KERNELS)
def test_under_shard_map_the_product_varies_over_the_axes_of_its_operands(platform: str, axes: tuple[str, ...]) -> None:
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    seen = []

    def local(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
        out = KERNELS[platform].product(rows, weights, counts, 2)
        seen.append(jax.typeof(out).manual_axis_type.varying)
        return out

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(axes or None), out_specs=P(axes or None))
    rows, weights = jnp.ones((32, SHAPES[platform][1])), jnp.ones((4, *SHAPES[platform]))
    jax.eval_shape(mapped, rows, weights, jnp.ones(4, jnp.int32))
    assert seen == [set(axes)]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_owned_tiles_cover_every_row_of_an_expert_once(counts: list[int]) -> None:
    tiles = owned_tiles(jnp.array(counts), 48, 16)
    assert len(tiles.expert) == 4 + 44 // 16
    owners = np.full(48, -1)
    for expert, first, end in zip(*map(np.asarray, tiles), strict=True):
        assert 0 <= end - first <= 16 and (owners[first:end] == -1).all()
        owners[first:end] = expert
    assert owners.tolist() == np.repeat([0, 1, 2, 3, -1], [*counts, 48 - sum(counts)]).tolist()


def test_shapes_that_a_kernel_does_not_take_are_left_to_xla() -> None:
    def fits(kernel: object, rows: int, *sizes: int) -> bool:
        shape = jax.ShapeDtypeStruct((rows, sizes[-1]), jnp.bfloat16)
        return kernel.fits(shape, jax.ShapeDtypeStruct(sizes, jnp.bfloat16), 2)

    assert [fits(tpu_grouped, rows, 4, 128, 256) for rows in (16, 24)] == [True, False]
    assert not fits(tpu_grouped, 16, 4, 128, 192)
    assert not fits(gpu_grouped, 16, 4, 24, 128)
    # Places in the weights are counted by an int32.
    assert [fits(gpu_grouped, 16, experts, 4096, 8192) for experts in (63, 64)] == [True, False]
