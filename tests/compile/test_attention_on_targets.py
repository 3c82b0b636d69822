"""The kernels of attention as the compiler of TPUs takes them, and that no other backend gets them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.aot.every import cut_card
from jaxpar.aot.targets import Target
from jaxpar.attention.store import Pages
from jaxpar.kernels import tpu_flash, tpu_jax_paged, tpu_paged, tpu_write
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step

LLAMA = cut_card("llama-3.1-8b", [False])


@cache
def one_device() -> NamedSharding:
    return NamedSharding(Mesh(np.array(Target.parse("v5p:2x2x1").devices[:1]), ("x",)), P())


def array(*shape: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=one_device())


@pytest.mark.parametrize(
    ("heads", "queries", "group", "key_size", "value_size", "keys", "window"),
    [(1, 1, 128, 576, 512, 1024, None), (2, 300, 1, 192, 128, 640, None), (2, 7, 5, 64, 64, 48, 16)],
    ids=["latents absorbed", "latents expanded", "small heads in a window"],
)
def test_the_flash_kernel_takes_any_sizes(
    heads: int, queries: int, group: int, key_size: int, value_size: int, keys: int, window: int | None
) -> None:
    q, k, v = (array(heads, 2, *rest) for rest in ((queries, group, key_size), (keys, key_size), (keys, value_size)))
    positions = (array(2, length, dtype="int32") for length in (queries, keys))
    jax.jit(partial(tpu_flash.attend, onto=None, window=window, scale=0.1)).lower(q, k, v, *positions).compile()


@pytest.mark.parametrize(("heads", "group", "lanes"), [(1, 8, 4), (8, 1, 3)])
def test_the_paged_kernels_take_any_heads(heads: int, group: int, lanes: int) -> None:
    plane, one = array(heads, 64, 16, 128), array(lanes, heads, 128)
    pages = Pages(plane, plane, array(lanes, 20, dtype="int32"))
    positions = array(lanes, 1, dtype="int32"), array(lanes, 320, dtype="int32")
    read = jax.jit(partial(tpu_paged.attend, window=None, scale=0.1))
    assert tpu_paged.fits(pages)
    read.lower(array(heads, lanes, 1, group, 128), pages, *positions).compile()
    places = array(lanes, dtype="int32")
    written = jax.jit(tpu_write.write, donate_argnums=0).lower([plane, plane], [one, one], places, places).compile()
    # In place: neither plane is copied.
    assert written.memory_analysis().temp_size_in_bytes < 16 * 128 * 2 * 64


@pytest.mark.parametrize(
    ("heads", "group", "lanes", "width"), [(1, 8, 512, 256), (2, 7, 3, 33)], ids=["most page ids", "odd numbers"]
)
def test_the_paged_kernel_of_jax_takes_what_fits(heads: int, group: int, lanes: int, width: int) -> None:
    plane = array(heads, 64, 16, 128)
    pages = Pages(plane, plane, array(lanes, width, dtype="int32"))
    assert tpu_jax_paged.fits(pages, None)
    read = jax.jit(partial(tpu_jax_paged.attend, scale=0.1))
    read.lower(array(heads, lanes, 1, group, 128), pages, array(lanes, 1, dtype="int32")).compile()


@pytest.mark.parametrize(("phase", "kernels"), [("prefill", 1), ("decode", 2)])
@pytest.mark.parametrize(("target", "is_tpu"), [("v5p:2x2x2", True), ("h200:1x1x8", False)])
def test_a_step_has_the_kernels_of_its_own_backend_alone(phase: Phase, kernels: int, target: str, is_tpu: bool) -> None:
    plan = Plan(MeshSpec.parse("dp=2,tp=4"), dtype="bfloat16")
    programs = Programs(LLAMA, plan, Target.parse(target).mesh(plan.mesh))
    step = Step(LLAMA, plan, phase, 2, 128 if phase == "prefill" else 1, 1024)
    text = programs.step(phase).lower(*programs.abstract_arguments(step, 128)).as_text()
    assert text.count("@tpu_custom_call") == (kernels if is_tpu else 0)
