"""What a compiled program computes, and what it computes while a collective is under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.ledger.hlo import collectives_of, parse_collectives
from jaxpar.ledger.hlo_flops import compiled_flops
from jaxpar.ledger.hlo_text import parse_module

TEXTS = Path(__file__).parent / "hlo"
MESH = {"tp": 4}

# A ring of three steps: while keys [16, 8] go on, a fusion multiplies them by a slice [8, 32] of all weights.
RING = """
%fused (w: f32[4,8,32], k: f32[16,8], at: s32[]) -> f32[16,32] {
  %w = f32[4,8,32]{2,1,0} parameter(0)
  %k = f32[16,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,8,32]{2,1,0} dynamic-slice(%w, %at, %zero, %zero), dynamic_slice_sizes={1,8,32}
  %flat = f32[8,32]{1,0} bitcast(%one)
  ROOT %dot = f32[16,32]{1,0} dot(%k, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/attention:ring/dot_general"}
}

%body (carry: (s32[], f32[16,8], f32[4,8,32])) -> (s32[], f32[16,8], f32[4,8,32]) {
  %carry = (s32[], f32[16,8]{1,0}, f32[4,8,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %keys = f32[16,8]{1,0} get-tuple-element(%carry), index=1
  %all = f32[4,8,32]{2,1,0} get-tuple-element(%carry), index=2
  %unit = s32[] constant(1)
  %start = (f32[16,8]{1,0}, f32[16,8]{1,0}) collective-permute-start(%keys), \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={op_name="jit(f)/attention:ring/while/body/ppermute"}
  %product = f32[16,32]{1,0} fusion(%all, %keys, %i), kind=kOutput, calls=%fused, \
metadata={op_name="jit(f)/attention:ring/while/body/dot_general"}
  %done = f32[16,8]{1,0} collective-permute-done(%start)
  %other = f32[16,32]{1,0} fusion(%all, %done, %i), kind=kOutput, calls=%fused
  %next = s32[] add(%i, %unit)
  ROOT %result = (s32[], f32[16,8]{1,0}, f32[4,8,32]{2,1,0}) tuple(%next, %done, %all)
}

%condition (carry.1: (s32[], f32[16,8], f32[4,8,32])) -> pred[] {
  %carry.1 = (s32[], f32[16,8]{1,0}, f32[4,8,32]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %end = s32[] constant(3)
  ROOT %goes = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (k.0: f32[16,8], w.0: f32[4,8,32]) -> f32[16,8] {
  %k.0 = f32[16,8]{1,0} parameter(0)
  %w.0 = f32[4,8,32]{2,1,0} parameter(1)
  %begin = s32[] constant(0)
  %init = (s32[], f32[16,8]{1,0}, f32[4,8,32]{2,1,0}) tuple(%begin, %k.0, %w.0)
  %loop = (s32[], f32[16,8]{1,0}, f32[4,8,32]{2,1,0}) while(%init), condition=%condition, body=%body
  ROOT %keys.out = f32[16,8]{1,0} get-tuple-element(%loop), index=1
}
"""
PRODUCT = 2 * 16 * 32 * 8


def test_products_in_a_loop_count_as_often_as_it_runs() -> None:
    assert compiled_flops(parse_module(RING)) == {"attention": 3 * 2 * PRODUCT}


def test_what_stands_between_start_and_end_is_the_work_beside_a_collective() -> None:
    (hop,) = parse_collectives(RING, MESH)
    assert (hop.sublayer, hop.strategy, hop.calls, hop.asynchronous) == ("attention", "ring", 3, True)
    assert hop.overlap is not None
    assert (hop.overlap.products, hop.overlap.others, hop.overlap.flops) == (1, 0, PRODUCT)
    assert hop.overlap.names == ("attention:ring",)


def test_of_weights_that_a_fusion_slices_only_the_slice_is_read() -> None:
    (hop,) = parse_collectives(RING, MESH)
    assert hop.overlap is not None
    assert hop.overlap.bytes == 4 * (8 * 32 + 16 * 8 + 1 + 16 * 32), "slice, keys, index, result"


def test_a_collective_that_ends_where_it_starts_has_no_work_beside_it() -> None:
    lines = RING.splitlines()
    done = next(line for line in lines if "-done(" in line)
    lines.remove(done)
    start = next(i for i, line in enumerate(lines) if "-start(" in line)
    (hop,) = parse_collectives("\n".join([*lines[: start + 1], done, *lines[start + 1 :]]), MESH)
    assert hop.asynchronous and hop.overlap is not None and hop.overlap.instructions == 0


def test_a_synchronous_collective_has_neither_start_nor_end() -> None:
    text = RING.replace("collective-permute-start", "collective-permute").replace("collective-permute-done", "copy")
    (hop,) = parse_collectives(text, MESH)
    assert (hop.asynchronous, hop.overlap) == (False, None)


@pytest.mark.parametrize("name", ["cpu_jax_0.10.txt", "cpu_jax_0.12.txt", "gpu_h200.txt", "tpu_v5e.txt"])
def test_every_backend_s_products_come_to_those_of_the_program(name: str) -> None:
    # Three layers of [16, 128] x [128, 64] and back.
    (flops,) = compiled_flops(parse_module((TEXTS / name).read_text())).values()
    assert flops == 3 * 2 * (2 * 16 * 128 * 64)


def one_instruction(shape: str, opcode: str, attributes: str, *operands: str) -> dict[str, int]:
    parameters = [f"  %p{i} = {of} parameter({i})" for i, of in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    lines = ["ENTRY %main () -> f32[] {", *parameters, f"  ROOT %r = {shape} {opcode}({names}), {attributes}", "}"]
    return compiled_flops(parse_module("\n".join(lines)))


@pytest.mark.parametrize(
    ("shape", "attributes", "left", "right", "flops"),
    [
        ("f32[8,32]", "dim_labels=bf_io->bf", "f32[8,16]", "f32[16,32]", 2 * 8 * 16 * 32),
        ("f32[8,32]", "dim_labels=bf_oi->bf", "f32[8,16]", "f32[32,16]", 2 * 8 * 16 * 32),
        # A batch of 16 products [8, 64] x [64, 128]: with gaps on the left each place of the result meets one value.
        (
            "f32[16,8,128]",
            "window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf",
            "f32[16,8,64]",
            "f32[16,64,128]",
            2 * 16 * 8 * 64 * 128,
        ),
        # A window of 3 with padding of 1 on both sides of 5 places: 3 values in the middle, 2 at each end.
        ("f32[5,1,1]", "window={size=3 pad=1_1}, dim_labels=0bf_0io->0bf", "f32[5,1,1]", "f32[3,1,1]", 2 * 13),
    ],
)
def test_the_flops_of_a_convolution(shape: str, attributes: str, left: str, right: str, flops: int) -> None:
    assert one_instruction(shape, "convolution", attributes, left, right) == {"unscoped": flops}


def test_the_flops_of_a_cublas_call_are_those_of_its_product() -> None:
    config = 'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{\
"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    flops = one_instruction("(f32[8,32], s8[4096])", "custom-call", config, "f32[8,16]", "f32[16,32]")
    assert flops == {"unscoped": 2 * 8 * 16 * 32}


def test_a_kernel_has_the_flops_that_its_author_says() -> None:
    config = 'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUw=",\
"cost_estimate":{"flops":"4096","transcendentals":"8","bytes_accessed":"16"}}}'
    assert one_instruction("f32[8,32]", "custom-call", config, "f32[8,16]") == {"unscoped": 4096}


def test_both_readings_share_one_text() -> None:
    module = parse_module(RING)
    assert collectives_of(module, MESH) == parse_collectives(RING, MESH)
