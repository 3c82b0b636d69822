"""config.json becomes one description, whichever dialect it is in; numbers that no model has are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import refusals
from oracle_data import ROOT

from jaxpar.checkpoint import ModelConfig, RopeConfig, read_config
from jaxpar.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def config_of(model_type: str, /, **changes: Any) -> dict[str, Any]:
    """A valid config.json of an architecture, with some keys changed; a key changed to `...` is left out."""
    values = LLAMA | {"model_type": model_type, "architectures": [f"{model_type.title()}ForCausalLM"]} | changes
    return {key: value for key, value in values.items() if value is not ...}


def read(directory: Path, values: Any, generation: Any = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_config(directory)


def error_of(directory: Path, values: Any, generation: Any = None) -> str:
    message = refusals.error_of(lambda: read(directory, values, generation))
    assert str(directory) in message
    return message


def test_both_dialects_describe_the_same_model(tmp_path: Path):
    hub = config_of("llama", torch_dtype="bfloat16", rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = config_of("llama", dtype="bfloat16", rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    config = read(tmp_path, hub)
    assert config == read(tmp_path, new)
    assert config.dtype == "bfloat16"
    assert config.rope == RopeConfig(
        "llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )


def test_a_directory_and_its_config_json_describe_the_same_model(tmp_path: Path):
    config = read(tmp_path, config_of("qwen2"))
    assert config == read_config(tmp_path / "config.json")


def test_head_size_is_given_or_derived(tmp_path: Path):
    assert read(tmp_path, config_of("llama")).head_dim == 8
    assert read(tmp_path, config_of("llama", head_dim=None)).head_dim == 8
    assert read(tmp_path, config_of("llama", head_dim=32)).head_dim == 32
    assert read(tmp_path, config_of("qwen3")).head_dim == 128  # what transformers' Qwen3 takes it to be


def test_absent_kv_heads_are_as_many_as_transformers_takes_them_to_be(tmp_path: Path):
    absent = {"num_key_value_heads": ..., "num_attention_heads": 24}
    assert read(tmp_path, config_of("llama", **absent)).num_key_value_heads == 24
    assert read(tmp_path, config_of("mistral", **absent)).num_key_value_heads == 8
    assert read(tmp_path, config_of("mistral", num_key_value_heads=None)).num_key_value_heads == 6


@pytest.mark.parametrize(
    ("model_type", "changes", "qkv", "o", "mlp", "qk_norm"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True, "mlp_bias": True}, True, True, True, False),
        ("mistral", {}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen3", {}, False, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms_follow_the_architecture(
    tmp_path: Path, model_type: str, changes: dict[str, Any], qkv: bool, o: bool, mlp: bool, qk_norm: bool
):
    config = read(tmp_path, config_of(model_type, **changes))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (qkv, o, mlp, qk_norm)


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("llama", {"sliding_window": 9}, (None,) * 4),
        ("mistral", {"sliding_window": 9}, (9,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": False}, (None,) * 4),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 28}, (None,) * 4),
        (
            "qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            },
            (9, None, 9, None),
        ),
    ],
)
def test_windows_are_per_layer(
    tmp_path: Path, model_type: str, changes: dict[str, Any], windows: tuple[int | None, ...]
):
    assert read(tmp_path, config_of(model_type, **changes)).windows == windows


@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        (None, RopeConfig()),
        ({"rope_type": "default", "rope_theta": 1e6}, RopeConfig(theta=1e6)),
        ({"type": "linear", "factor": 2}, RopeConfig("linear", factor=2.0)),
        (YARN_ROPE, RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64)),
        (
            YARN_ROPE | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5},
            RopeConfig(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
                attention_factor=1.5,
            ),
        ),
        (
            YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.5},
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.5),
        ),
        # The options' zeros mean absent, and the context length stands in for the original one.
        (
            {"rope_type": "yarn", "factor": 4, "beta_fast": 0, "mscale": 0},
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256),
        ),
    ],
)
def test_rope_parameters_are_read(tmp_path: Path, parameters: dict[str, Any] | None, rope: RopeConfig):
    assert read(tmp_path, config_of("llama", rope_parameters=parameters)).rope == rope
    assert read(tmp_path, config_of("llama", rope_scaling=parameters)).rope == rope


def test_end_tokens_are_those_of_both_files_in_order(tmp_path: Path):
    assert read(tmp_path, config_of("llama")).eos_token_ids == ()
    assert read(tmp_path, config_of("llama", eos_token_id=7)).eos_token_ids == (7,)
    assert read(tmp_path, config_of("llama", eos_token_id=[7, 3])).eos_token_ids == (7, 3)
    assert read(tmp_path, config_of("llama", eos_token_id=7), {"eos_token_id": [9, 7]}).eos_token_ids == (7, 9)
    assert read(tmp_path, config_of("llama", eos_token_id=None), {"eos_token_id": 5}).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("gpt2", {"architectures": ...}, "model_type is 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
        ("llama", {"model_type": ...}, "model_type is missing, expected one of llama"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is {'quant_method': 'awq'}"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        ("llama", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', expected one of float32, bfloat16, float16"),
        ("llama", {"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ("llama", {"vocab_size": ...}, "vocab_size is missing, expected an integer from 1"),
        ("llama", {"vocab_size": 0}, "vocab_size is 0, expected an integer from 1"),
        ("llama", {"hidden_size": -48}, "hidden_size is -48"),
        ("llama", {"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama", {"intermediate_size": 96.0}, "intermediate_size is 96.0"),
        ("llama", {"intermediate_size": "96"}, "intermediate_size is '96'"),
        ("llama", {"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
        ("llama", {"num_attention_heads": 5}, "hidden_size is 48, expected a multiple of num_attention_heads 5"),
        ("llama", {"num_key_value_heads": 4}, "6 attention heads and 4 key-value heads"),
        ("llama", {"head_dim": 7}, "head size is 7, expected an even number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number > 0"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ("llama", {"eos_token_id": 128}, "eos_token_id is 128, expected token ids from 0 to 127"),
        ("llama", {"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
        ("llama", {"bos_token_id": 128}, "bos_token_id is 128"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0, expected a finite number > 1"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type is 'dynamic', expected one of default, linear, llama3, yarn",
        ),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ("llama", {"rope_parameters": YARN_ROPE | {"factor": 0.5}}, "factor is 0.5, expected a finite number >= 1"),
        ("llama", {"rope_parameters": YARN_ROPE | {"beta_fast": 1}}, "beta_fast is 1, expected a number > beta_slow 1"),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4}}, "high_freq_factor is 4.0"),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": None}}, "low_freq_factor is None"),
        ("qwen3", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "the one window of mistral (4096) in every layer"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "expected one entry for each of 4 layers, not 3"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "not chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window and a sliding_window"),
        ("qwen2", {"layer_types": "full_attention"}, "expected a list of str"),
    ],
)
def test_what_no_model_has_is_refused_by_name(tmp_path: Path, model_type: str, changes: dict[str, Any], expected: str):
    assert expected in error_of(tmp_path, config_of(model_type, **changes))


def test_a_bad_end_token_is_blamed_on_the_file_that_has_it(tmp_path: Path):
    message = error_of(tmp_path, config_of("llama"), {"eos_token_id": "</s>"})
    assert "generation_config.json: eos_token_id is '</s>', expected token ids from 0 to 127" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not valid JSON .*; fetch it again"),
        ("[1]", "holds a JSON list, expected an object"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"vocab_size": 1' + "0" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str, expected: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=expected):
        read_config(tmp_path)


def test_a_message_shows_a_huge_value_in_short(tmp_path: Path):
    assert len(error_of(tmp_path, config_of("llama", hidden_act="x" * 1_000_000))) < 200 + len(str(tmp_path))


def test_a_config_as_transformers_writes_it_is_read_whole():
    assert read_config(ROOT / "qwen3_yarn") == ModelConfig(
        model_type="qwen3",
        vocab_size=109,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope=RopeConfig(
            "yarn",
            theta=1000.0,
            factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=2.0,
            beta_slow=0.25,
            mscale=1.5,
            mscale_all_dim=0.5,
            truncate=False,
        ),
        windows=(None, None),
        qkv_bias=True,
        o_bias=True,
        qk_norm=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
