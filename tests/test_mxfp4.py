"""gpt_oss as it is published: experts in MXFP4 are read as the very numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import refusals
from hypothesis import given
from hypothesis import strategies as st
from oracle_data import ROOT
from safetensors.numpy import save_file

import jaxpar
from jaxpar.checkpoint import read_config
from jaxpar.checkpoint.mxfp4_reader import Mxfp4Reader
from jaxpar.devices import abstract_mesh
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
Tensors = dict[str, np.ndarray]


def number(code: int) -> float:
    """What four bits stand for: a sign, two bits of exponent, one of mantissa."""
    return -E2M1[code - 8] if code > 7 else E2M1[code]


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, O, G, 16] and [E, O, G] -> [E, 32 G, O], number by number."""
    experts, outputs, groups, _ = blocks.shape
    values = np.zeros((experts, groups * 32, outputs), np.float32)
    for e, o, g, byte in np.ndindex(*blocks.shape):
        both = int(blocks[e, o, g, byte])
        scale = 2.0 ** (int(scales[e, o, g]) - 127)
        values[e, 32 * g + 2 * byte, o] = number(both & 15) * scale
        values[e, 32 * g + 2 * byte + 1, o] = number(both >> 4) * scale
    return values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in MXFP4 and in numbers."""
    document = json.loads((ROOT / "gpt_oss" / "config.json").read_text())
    document |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    quantized = document | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (packed / "config.json").write_text(json.dumps(quantized))
    (plain / "config.json").write_text(json.dumps(document))
    rng = np.random.default_rng(0)
    weights = Programs(read_config(plain), Plan(), abstract_mesh(MeshSpec())).weights.values()
    shapes = {name: shape for weight in weights for name, shape in weight.tensors.items()}
    tensors = {name: rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    experts: Tensors = {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        count, inputs, outputs = tensors[name].shape
        blocks = rng.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(122, 127, blocks.shape[:3], np.uint8)
        experts |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = unpacked(blocks, scales)
    assert len(experts) == 4
    save_file(tensors, plain / "model.safetensors")
    others = {name: value for name, value in tensors.items() if f"{name}_blocks" not in experts}
    save_file(others | experts, packed / "model.safetensors")
    return packed, plain


def test_a_packed_model_has_the_logits_of_the_same_model_in_numbers_on_any_mesh(models: tuple[Path, Path]) -> None:
    packed, plain = (jaxpar.load(path, mesh="ep=2,tp=2") for path in models)
    np.testing.assert_array_equal(packed.logits([[5, 9, 2, 7]]), plain.logits([[5, 9, 2, 7]]))


@given(st.data())
def test_any_slice_is_that_of_the_whole(models: tuple[Path, Path], data: st.DataObject) -> None:
    reader = Mxfp4Reader(models[0])
    (name,) = (name for name in reader.names() if name.endswith("gate_up_proj"))
    whole = reader.read(name, ())
    assert (whole.shape, whole.dtype) == (reader.info(name).shape, ml_dtypes.bfloat16)
    index = tuple(
        slice(start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size)))
        for size in whole.shape
    )
    np.testing.assert_array_equal(reader.read(name, index), whole[index])
    reader.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"e_scales": None}, "tensor e_scales is missing among 1 tensors"),
        ({"e_scales": np.zeros((2, 3, 2), np.uint8)}, "tensor e_scales is uint8 [2, 3, 2], expected uint8 [2, 3, 1]"),
        ({"e_blocks": np.zeros((2, 3, 1, 8), np.uint8)}, "tensor e_blocks is uint8 [2, 3, 1, 8], expected uint8"),
        ({"e_blocks": np.zeros((2, 3, 1, 16), np.float32)}, "tensor e_blocks is float32 [2, 3, 1, 16], expected uint8"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    tensors = {"e_blocks": np.zeros((2, 3, 1, 16), np.uint8), "e_scales": np.zeros((2, 3, 1), np.uint8)} | change
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    assert complaint in refusals.error_of(lambda: Mxfp4Reader(tmp_path))


def test_bytes_that_are_no_experts_are_refused(tmp_path: Path) -> None:
    save_file({"norm": np.zeros(4, np.uint8)}, tmp_path / "model.safetensors")
    assert "tensor norm is U8" in refusals.error_of(lambda: Mxfp4Reader(tmp_path).info("norm"))
