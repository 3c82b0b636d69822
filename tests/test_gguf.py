"""A GGUF file of the llama family reads as the Hugging Face checkpoint that it was made from."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_file import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCABULARY, WIDTH, permute, stored, weights, write
from hypothesis import given
from hypothesis import strategies as st
from refusals import error_of

from jaxpar.checkpoint import ModelConfig, RopeConfig, open_checkpoint, read_gguf_config
from jaxpar.errors import CheckpointError


def test_the_description_is_that_of_the_original_model(tmp_path: Path):
    assert read_gguf_config(write(tmp_path / "m.gguf", stored(weights()))) == ModelConfig(
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,  # stored as the float32 9.99999975e-06
        tie_word_embeddings=True,
        rope=RopeConfig(theta=100000.0),
        windows=(None,),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_an_output_matrix_and_biases_show_in_the_description(tmp_path: Path):
    tensors = stored(weights())
    tensors["output.weight"] = tensors["token_embd.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(HEADS * HEAD_DIM, np.float32)
    config = read_gguf_config(write(tmp_path / "m.gguf", tensors))
    assert not config.tie_word_embeddings
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_weights_have_the_names_order_and_values_of_the_original(tmp_path: Path, kind: str):
    ggml_type = gguf.GGMLQuantizationType[kind]
    original = weights()
    reader = open_checkpoint(write(tmp_path / "m.gguf", stored(original), ggml_type)).require_reader()
    assert set(reader.names()) == set(original)
    for name, weight in original.items():
        expected = weight if weight.ndim == 1 else gguf.dequantize(gguf.quantize(weight, ggml_type), ggml_type)
        assert reader.info(name).shape == weight.shape
        read = reader.read(name, ())
        assert read.dtype == reader.info(name).dtype
        np.testing.assert_array_equal(read.astype(np.float32), expected)


def test_half_precision_weights_are_not_widened(tmp_path: Path):
    path = write(tmp_path / "m.gguf", stored(weights()), gguf.GGMLQuantizationType.BF16)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.require_reader().info("model.embed_tokens.weight").dtype.name == "bfloat16"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_biases_of_q_and_k_are_put_in_order_with_their_rows(tmp_path: Path, kind: str):
    bias = np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32)
    tensors = stored(weights()) | {"blk.0.attn_k.bias": permute(bias, KV_HEADS)}
    reader = open_checkpoint(write(tmp_path / "m.gguf", tensors, gguf.GGMLQuantizationType[kind])).require_reader()
    name = "model.layers.0.self_attn.k_proj.bias"
    np.testing.assert_array_equal(reader.read(name, ()), bias)
    np.testing.assert_array_equal(reader.read(name, (slice(5, 19),)), bias[5:19])


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write(path, stored(weights()), gguf.GGMLQuantizationType.Q8_0)


@given(st.data())
def test_any_slice_of_a_quantized_matrix_is_that_of_the_matrix(quantized: Path, data: Any):
    checkpoint = open_checkpoint(quantized)
    reader = checkpoint.require_reader()
    name = data.draw(st.sampled_from(sorted(name for name in reader.names() if "norm" not in name)))
    index = ()
    for size in reader.info(name).shape:
        start = data.draw(st.integers(0, size))
        index += (slice(start, data.draw(st.integers(start, size))),)
    np.testing.assert_array_equal(reader.read(name, index), reader.read(name, ())[index])
    checkpoint.close()


def llama3_factors(factor: float, theta: float) -> np.ndarray:
    """The tensor that llama.cpp's converter writes for Llama 3.1 and later."""
    factors = []
    for frequency in theta ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_is_recovered_from_its_frequency_factors(tmp_path: Path):
    factors = llama3_factors(8.0, 500000.0)
    assert np.any((factors > 1) & (factors < 8))
    tensors = stored(weights()) | {"rope_freqs.weight": factors}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors, **{"llama.rope.freq_base": 500000.0}))
    assert checkpoint.config.rope == RopeConfig(
        "llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert "rope_freqs.weight" not in checkpoint.require_reader().names()


def test_linear_rope_is_read(tmp_path: Path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = read_gguf_config(write(tmp_path / "m.gguf", stored(weights()), **scaling))
    assert config.rope == RopeConfig("linear", theta=100000.0, factor=4.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architecture": "gpt2"}, "general.architecture is 'gpt2', expected llama"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, expected 0: a dense model"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count": 3}, "expected a multiple of llama.attention.head_count 3"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads and 3 key-value heads"),
        ({"llama.attention.head_count_kv": [2]}, "llama.attention.head_count_kv is [2], expected an integer"),
        ({"llama.vocab_size": 299}, "llama.vocab_size is 299, expected 300, the rows of token_embd.weight"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, expected the head size 16"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn', expected one of none, linear"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300"),
    ],
)
def test_metadata_of_no_llama_are_refused_by_name(tmp_path: Path, change: dict[str, Any], expected: str):
    path = write(tmp_path / "m.gguf", stored(weights()), **change)
    assert expected in error_of(lambda: open_checkpoint(path))


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"rope_freqs.weight": np.full(HEAD_DIM // 2, 3, np.float32)}, "is not the llama3 scaling"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight is F32 of shape (3,)"),
    ],
)
def test_frequency_factors_of_another_kind_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray], expected: str):
    path = write(tmp_path / "m.gguf", stored(weights()) | tensors)
    assert expected in error_of(lambda: read_gguf_config(path))


def test_rows_that_are_not_the_heads_are_refused(tmp_path: Path):
    tensors = stored(weights())
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][:-HEAD_DIM]
    reader = open_checkpoint(write(tmp_path / "m.gguf", tensors)).require_reader()
    message = error_of(lambda: reader.read("model.layers.0.self_attn.q_proj.weight", ()))
    assert "blk.0.attn_q.weight has 48 rows, expected 4 heads of 16; convert the model again" in message


def test_a_missing_tensor_is_named(quantized: Path):
    reader = open_checkpoint(quantized).require_reader()
    assert "tensor lm_head.weight is missing among 11 tensors; fetch the file again" in error_of(
        lambda: reader.info("lm_head.weight")
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a GGUF file"),
        (b"GGUF", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "begins with b'PK\\x03\\x04', expected b'GGUF'; fetch it again"),
        (
            b"GGUF" + (1).to_bytes(4, "little") + bytes(60),
            "GGUF version 1, expected 2 or 3, little-endian; convert the model again",
        ),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "GGUF version 50331648, expected 2 or 3, little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "items cannot follow in a file of 24 bytes"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes, expected: str):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert expected in error_of(lambda: open_checkpoint(path))


def test_a_truncated_file_names_the_tensor_that_it_cuts(quantized: Path, tmp_path: Path):
    content = quantized.read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: -WIDTH * HIDDEN])
    assert "it is truncated, fetch it again" in error_of(lambda: open_checkpoint(path))


@given(st.integers(0, 2200), st.binary(min_size=1, max_size=8))
def test_damage_anywhere_in_the_header_is_read_or_refused(
    quantized: Path, tmp_path_factory: pytest.TempPathFactory, position: int, damage: bytes
):
    content = bytearray(quantized.read_bytes())
    content[position : position + len(damage)] = damage
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        reader = checkpoint.require_reader()
        for name in reader.names():
            assert reader.read(name, ()).shape == reader.info(name).shape
    except CheckpointError:
        pass


def test_without_the_gguf_library_the_error_says_how_to_install_it(quantized: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'jaxpar[gguf]'" in error_of(lambda: open_checkpoint(quantized))
