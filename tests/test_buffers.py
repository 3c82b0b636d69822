"""The planner's estimate of what a step holds besides weights and cache."""

from __future__ import annotations

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.kinds import KINDS
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.buffers import activation_bytes, buffers_of, narrow_bytes
from jaxpar.strategies import Step


def step(keys: int) -> Step:
    config, plan = read_config(model_dir("llama-3-70b")), Plan(MeshSpec(tp=8), dtype="bfloat16")
    return Step(config, plan, "decode", 64, 1, keys)


def test_a_decode_step_gathers_the_pages_of_one_layer() -> None:
    pages = 2 * 64 * 4096 * 128 * 2  # keys and values, requests, positions, the head's size, bytes
    assert activation_bytes(step(8192)) - activation_bytes(step(4096)) == pages


def test_where_a_kernel_reads_pages_in_place_nothing_grows_with_the_context() -> None:
    assert activation_bytes(step(8192), in_place=True) == activation_bytes(step(4096), in_place=True)


def test_halves_of_heads_fill_whole_rows_of_a_tpus_memory_and_their_pool_is_turned() -> None:
    config, plan = read_config(model_dir("qwen2.5-7b")), Plan(MeshSpec(tp=8), dtype="bfloat16", kv_split="head_dim")
    halves = Step(config, plan, "decode", 32, 1, 2048)
    on_tpu, on_gpu = (sum(buffers_of(halves, KINDS[name])) for name in ("v5p", "h200"))
    gathered = 2 * 32 * 2048 * 64 * 2  # keys and values, requests, positions, half a head, bytes
    assert on_tpu - on_gpu == gathered + 2 * gathered
    assert buffers_of(step(4096), KINDS["v5p"]) == buffers_of(step(4096), KINDS["h200"])


def test_of_latents_only_the_rotated_key_is_narrow_and_prefill_turns_no_pool() -> None:
    config, plan = read_config(model_dir("deepseek-v3")), Plan(MeshSpec(tp=8), dtype="bfloat16")
    rotated = 32 * 2048 * 64 * 2
    assert narrow_bytes(Step(config, plan, "decode", 32, 1, 2048)) == rotated + 2 * rotated
    assert narrow_bytes(Step(config, plan, "prefill", 32, 16, 2048)) == rotated
