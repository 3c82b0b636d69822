"""config.json of mixtures of experts and of latent attention becomes one description, with transformers' defaults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import refusals
from oracle_data import ROOT

from jaxpar.checkpoint import MLAConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig, read_config
from jaxpar.checkpoint.config import ClampedSwiGLU, MoETensors
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
MOE_ORACLES = sorted(path.parent.name for path in ROOT.glob("*/config.json") if read_config(path).moe)


def config_of(model_type: str, /, **changes: Any) -> dict[str, Any]:
    """A valid config.json with the sizes that have no default alone; a key changed to `...` is left out."""
    needed = {"num_experts_per_tok": 3} if model_type == "deepseek_v2" else {}
    values = {"model_type": model_type} | SIZES | needed | changes
    return {key: value for key, value in values.items() if value is not ...}


def read(directory: Path, model_type: str, /, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config_of(model_type, **changes)))
    return read_config(directory)


def moe_of(directory: Path, model_type: str, /, **changes: Any) -> MoEConfig:
    moe = read(directory, model_type, **changes).moe
    assert moe is not None
    return moe


def mla_of(directory: Path, model_type: str, /, **changes: Any) -> MLAConfig:
    mla = read(directory, model_type, **changes).mla
    assert mla is not None
    return mla


@pytest.mark.parametrize(
    ("model_type", "experts", "width", "shared", "router"),
    [
        ("mixtral", 8, 96, 0, RouterConfig(2, norm_topk_prob=True)),
        ("qwen3_moe", 128, 768, 0, RouterConfig(8)),
        ("deepseek_v2", 64, 1407, 2 * 1407, RouterConfig(3)),
        (
            "deepseek_v3",
            256,
            2048,
            2048,
            RouterConfig(
                8,
                scoring="sigmoid",
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                n_group=8,
                topk_group=4,
                group_score="top2_sum",
                bias="choice",
            ),
        ),
        ("gpt_oss", 128, 96, 0, RouterConfig(4, norm_topk_prob=True, bias="logits")),
    ],
)
def test_absent_keys_mean_what_transformers_takes_them_to_mean(
    tmp_path: Path, model_type: str, experts: int, width: int, shared: int, router: RouterConfig
) -> None:
    moe = moe_of(tmp_path, model_type)
    assert (moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size) == (experts, width, shared)
    assert moe.router == router
    assert moe.layers == ((False,) * 3 + (True,) if model_type == "deepseek_v3" else (True,) * 4)


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim", "positions", "theta"),
    [
        ("mixtral", 8, 6, 131072, 1e6),
        ("qwen3_moe", 4, 6, 32768, 1e4),
        ("deepseek_v2", 8, 192, 2048, 1e4),
        ("deepseek_v3", 8, 192, 4096, 1e4),
        ("gpt_oss", 8, 64, 131072, 150000.0),
    ],
)
def test_absent_keys_of_attention_mean_what_transformers_takes_them_to_mean(
    tmp_path: Path, model_type: str, kv_heads: int, head_dim: int, positions: int, theta: float
) -> None:
    config = read(tmp_path, model_type)
    assert (config.num_key_value_heads, config.head_dim) == (kv_heads, head_dim)
    assert (config.max_position_embeddings, config.rope.theta) == (positions, theta)


@pytest.mark.parametrize("name", MOE_ORACLES)
def test_the_tensors_that_a_config_names_are_in_the_checkpoint_and_have_the_shapes_that_it_says(name: str) -> None:
    config, reader = read_config(ROOT / name), SafetensorsReader(ROOT / name)
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, width, shared, names = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size, moe.tensors
    expected = {names.router: (experts, hidden)}
    if moe.router.bias:
        assert names.router_bias
        expected[names.router_bias] = (experts,)
    if names.fused:
        assert names.gate == names.up
        expected |= {names.gate: (experts, hidden, 2 * width), names.down: (experts, width, hidden)}
        expected |= {f"{names.gate}_bias": (experts, 2 * width), f"{names.down}_bias": (experts, hidden)}
    for expert in () if names.fused else (0, experts - 1):
        expected |= {tensor.format(expert=expert): (width, hidden) for tensor in (names.gate, names.up)}
        expected[names.down.format(expert=expert)] = (hidden, width)
    if shared:
        expected |= {f"{names.shared}{part}_proj.weight": (shared, hidden) for part in ("gate", "up")}
        expected[f"{names.shared}down_proj.weight"] = (hidden, shared)
    dense = {"mlp.up_proj.weight": (config.intermediate_size, hidden)}
    for layer, is_moe in enumerate(moe.layers):
        for tensor, shape in (expected if is_moe else dense).items():
            assert reader.info(f"model.layers.{layer}.{tensor}").shape == shape, tensor
    reader.close()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_experts_are_counted_under_any_of_the_names_that_files_have(tmp_path: Path, model_type: str) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        assert moe_of(tmp_path, model_type, **{key: 40}).num_experts == 40
    assert moe_of(tmp_path, model_type, num_experts=16, num_local_experts=16).num_experts == 16


@pytest.mark.parametrize(
    ("model_type", "changes", "layers"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, (False, True, False, True)),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, (False, True, False, True)),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
        ("deepseek_v2", {"first_k_dense_replace": 1}, (False, True, True, True)),
        ("deepseek_v3", {"first_k_dense_replace": 0, "moe_layer_freq": 2}, (True, False, True, False)),
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, (False, False, True, False)),
    ],
)
def test_some_layers_are_dense(
    tmp_path: Path, model_type: str, changes: dict[str, Any], layers: tuple[bool, ...]
) -> None:
    assert moe_of(tmp_path, model_type, **changes).layers == layers


def test_a_model_without_any_moe_layer_is_dense(tmp_path: Path) -> None:
    assert read(tmp_path, "deepseek_v3", first_k_dense_replace=4).moe is None
    assert read(tmp_path, "qwen3_moe", mlp_only_layers=[0, 1, 2, 3]).moe is None
    assert read(tmp_path, "llama", num_experts=8).moe is None


def test_shared_experts_are_one_wide_mlp(tmp_path: Path) -> None:
    def width(**changes: Any) -> int:
        return moe_of(tmp_path, "deepseek_v2", moe_intermediate_size=20, **changes).shared_intermediate_size

    assert width(n_shared_experts=3) == 60
    assert width(n_shared_experts=0) == 0
    assert width(n_shared_experts=None) == 0
    assert width() == 40


def test_deepseek_v2_limits_the_groups_only_if_it_says_so(tmp_path: Path) -> None:
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    assert moe_of(tmp_path, "deepseek_v2", topk_method="greedy", **groups).router == RouterConfig(3)
    limited = moe_of(tmp_path, "deepseek_v2", topk_method="group_limited_greedy", **groups).router
    assert limited == RouterConfig(3, n_group=4, topk_group=2, group_score="max")


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mixtral", {}, (None,) * 4),
        ("mixtral", {"sliding_window": 9}, (9,) * 4),
        ("qwen3_moe", {"sliding_window": 9}, (None,) * 4),
        ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 4}, (9,) * 4),
        ("qwen3_moe", {"use_sliding_window": True}, (4096,) * 4),
        ("deepseek_v3", {"sliding_window": 9}, (None,) * 4),
        ("gpt_oss", {}, (128, None, 128, None)),
        ("gpt_oss", {"sliding_window": 9, "num_hidden_layers": 3}, (9, None, 9)),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
            (None, None, 128, None),
        ),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_windows_are_per_layer(
    tmp_path: Path, model_type: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, model_type, **changes).windows == windows


def test_gpt_oss_stretches_its_context_unless_told_otherwise(tmp_path: Path) -> None:
    usual = RopeConfig("yarn", 150000.0, factor=32.0, original_max_position_embeddings=4096, truncate=False)
    assert read(tmp_path, "gpt_oss").rope == usual
    assert read(tmp_path, "gpt_oss", rope_theta=1e4, rope_scaling=None).rope.theta == 1e4
    assert read(tmp_path, "gpt_oss", rope_parameters={"rope_type": "default"}).rope == RopeConfig(theta=150000.0)


DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}


def test_deepseek_scales_the_softmax_by_the_square_of_its_temperature(tmp_path: Path) -> None:
    def scale(**scaling: Any) -> float:
        return mla_of(tmp_path, "deepseek_v3", rope_scaling=DEEPSEEK_YARN | scaling).scale_factor

    assert scale(mscale_all_dim=1.0) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert scale(mscale_all_dim=0.707) == pytest.approx((0.0707 * math.log(40) + 1) ** 2)
    assert scale(mscale_all_dim=0.707, factor=1) == 1.0
    assert scale() == 1.0
    assert mla_of(tmp_path, "deepseek_v2").scale_factor == 1.0


def test_deepseek_rotates_neighbours_of_a_part_of_the_head(tmp_path: Path) -> None:
    for model_type in ("deepseek_v2", "deepseek_v3"):
        config = read(tmp_path, model_type, head_dim=64, qk_nope_head_dim=33, qk_rope_head_dim=14)
        assert config.rope.interleaved
        assert (config.head_dim, config.rope_head_dim) == (47, 14)
    assert not read(tmp_path, "deepseek_v3", rope_interleave=False).rope.interleaved
    others = [read(tmp_path, model_type) for model_type in ("mixtral", "qwen3_moe", "gpt_oss")]
    assert not any(config.rope.interleaved for config in others)
    assert all(config.rope_head_dim == config.head_dim for config in others)


def test_a_query_rank_of_null_is_none_and_an_absent_one_the_usual(tmp_path: Path) -> None:
    usual = MLAConfig(1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert mla_of(tmp_path, "deepseek_v2") == usual
    assert mla_of(tmp_path, "deepseek_v3", q_lora_rank=None).q_lora_rank is None
    assert mla_of(tmp_path, "deepseek_v3", q_lora_rank=20).q_lora_rank == 20


def test_qwen3_moe_norms_its_heads_and_gpt_oss_has_biases_and_sinks(tmp_path: Path) -> None:
    flags = {
        model_type: (config.qk_norm, config.qkv_bias, config.o_bias, config.sinks)
        for model_type in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
        for config in [read(tmp_path, model_type)]
    }
    assert flags == {
        "mixtral": (False,) * 4,
        "qwen3_moe": (True, False, False, False),
        "deepseek_v3": (False,) * 4,
        "gpt_oss": (False, True, True, True),
    }
    assert not read(tmp_path, "gpt_oss", attention_bias=False).qkv_bias


def test_both_dialects_describe_the_same_model(tmp_path: Path) -> None:
    yarn = DEEPSEEK_YARN | {"mscale_all_dim": 1.0}
    hub = read(tmp_path, "deepseek_v3", torch_dtype="bfloat16", rope_theta=1e4, rope_scaling=yarn)
    new = {"rope_theta": 1e4, "rope_type": "yarn"} | {key: value for key, value in yarn.items() if key != "type"}
    assert hub == read(tmp_path, "deepseek_v3", dtype="bfloat16", rope_parameters=new, head_dim=64)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, expected an integer from 1"),
        (
            "mixtral",
            {"num_local_experts": 10**9},
            "num_local_experts is 1000000000, expected an integer from 1 to 4096",
        ),
        ("mixtral", {"num_local_experts": 8.0}, "num_local_experts is 8.0"),
        (
            "mixtral",
            {"num_experts": 4, "num_local_experts": 8},
            "num_local_experts is 8, expected 4, as num_experts says",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most the 8 experts"),
        ("mixtral", {"layer_types": ["sliding_attention"] * 4}, "there is no window (a sliding_window)"),
        ("mixtral", {"architectures": ["MixtralModel"]}, "the language model of mixtral (mixtralforcausallm"),
        ("qwen3_moe", {"architectures": ["Qwen3ForCausalLM"]}, "qwen3_moe (qwen3moeforcausallm, in any case)"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok is missing, expected at most the 4 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 2**40}, "moe_intermediate_size is 1099511627776"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected an integer from 1"),
        ("qwen3_moe", {"mlp_only_layers": [0, "1"]}, "mlp_only_layers is [0, '1'], expected a list of int"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        ("deepseek_v2", {"num_experts_per_tok": ...}, "num_experts_per_tok is missing, expected an integer from 1"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True, expected false"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "expected one of greedy, group_limited_greedy"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is missing, expected an integer from 1"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected softmax"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True, expected false"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias is True, expected false"),
        ("deepseek_v2", {"num_key_value_heads": 4}, "num_key_value_heads is 4, expected num_attention_heads 8"),
        ("deepseek_v2", {"n_shared_experts": 10**6}, "n_shared_experts is 1000000, expected an integer from 0 to 2981"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', expected noaux_tc"),
        ("deepseek_v3", {"n_group": 7}, "n_group is 7, expected a divisor of the 256 experts"),
        ("deepseek_v3", {"n_group": 256}, "n_group is 256, expected groups of at least 2 of the 256 experts"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group is 9, expected at most the 8 groups"),
        (
            "deepseek_v3",
            {"n_group": 128, "topk_group": 2},
            "num_experts_per_tok is missing, expected at most the 4 experts of 2 groups",
        ),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0, expected an integer from 1"),
        ("deepseek_v3", {"q_lora_rank": 2**40}, "q_lora_rank is 1099511627776"),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "the head size is 63, expected an even number (rotary pairs)"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is {'quant_method': 'fp8'}",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config is {'quant_method': 'awq'}, expected no quantization: weights of float32, bfloat16, "
            "float16",
        ),
        ("gpt_oss", {"sliding_window": None}, "expected full_attention alone, since there is no window"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0, expected a finite number > 0"),
    ],
)
def test_what_no_model_has_is_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, Any], expected: str
) -> None:
    message = refusals.error_of(lambda: read(tmp_path, model_type, **changes))
    assert f"{tmp_path}/config.json: " in message
    assert expected in message


def test_configs_as_transformers_writes_them_are_read_whole() -> None:
    assert read_config(ROOT / "deepseek_v3") == ModelConfig(
        model_type="deepseek_v3",
        vocab_size=103,
        hidden_size=48,
        intermediate_size=68,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=18,
        max_position_embeddings=128,
        rms_norm_eps=1e-2,
        tie_word_embeddings=False,
        rope=RopeConfig(
            "yarn",
            theta=1000.0,
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=2.0,
            beta_slow=0.5,
            mscale=1.5,
            mscale_all_dim=0.7,
            interleaved=True,
        ),
        windows=(None, None, None),
        mla=MLAConfig(
            q_lora_rank=28,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=8,
            v_head_dim=12,
            scale_factor=(0.1 * 0.7 * math.log(4.0) + 1.0) ** 2,
        ),
        moe=MoEConfig(
            num_experts=12,
            intermediate_size=20,
            layers=(False, True, True),
            router=RouterConfig(
                3,
                scoring="sigmoid",
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                n_group=4,
                topk_group=2,
                group_score="top2_sum",
                bias="choice",
            ),
            tensors=MoETensors(
                router="mlp.gate.weight",
                router_bias="mlp.gate.e_score_correction_bias",
                gate="mlp.experts.{expert}.gate_proj.weight",
                up="mlp.experts.{expert}.up_proj.weight",
                down="mlp.experts.{expert}.down_proj.weight",
                shared="mlp.shared_experts.",
            ),
            shared_intermediate_size=20,
        ),
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    gpt_oss = read_config(ROOT / "gpt_oss")
    assert (gpt_oss.sinks, gpt_oss.windows, gpt_oss.head_dim) == (True, (5, None, 5), 12)
    assert gpt_oss.moe is not None
    assert gpt_oss.moe.clamped_swiglu == ClampedSwiGLU(alpha=1.702, limit=1.25)
    assert gpt_oss.moe.expert_bias
