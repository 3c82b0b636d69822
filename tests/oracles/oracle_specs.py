"""What each oracle is: an architecture, awkward sizes, how it is stored, and what of it must show in the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Spec:
    """One oracle.

    `config` is given to transformers, `config_edits` to the written config.json. The file is written as transformers 5
    does, or with the keys that most files on the hub have (`hub_dialect`). `must_show` lists changes of the written
    config that have to move the logits. `gguf`, if given, names the storage type of each tensor of a GGUF file.
    """

    summary: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    hub_dialect: bool = False
    config_edits: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"
    must_show: tuple[dict[str, Any], ...] = ()
    gguf: Callable[[str], str] | None = None


def decoder(
    model_type: str, hidden: int, ffn: int, layers: int, heads: tuple[int, int], vocab: int, theta: float, **more: Any
) -> dict[str, Any]:
    """A config.json of `heads` = (query, KV); `theta` is the rotary base, unless `more` has `rope_parameters`."""
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    } | more


def mixed_gguf(name: str) -> str:
    """Storage types as in a typical quantized file: F32 for norms, F16 for some matrices, Q8_0 for the rest."""
    if name.endswith("norm.weight"):
        return "F32"
    return "F16" if "attn_k" in name or name == "output.weight" else "Q8_0"


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ALL = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 1.5,
    "mscale_all_dim": 0.5,
    "truncate": False,
}

SPECS: dict[str, Spec] = {
    "llama": Spec(
        "8 query / 2 KV heads, default rope",
        decoder("llama", 64, 140, 2, (8, 2), 97, 1e4),
        must_show=({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, {"rms_norm_eps": 1e-2}),
    ),
    "llama_9_3": Spec(
        "9 query / 3 KV heads, tied embeddings, no `head_dim` key",
        decoder("llama", 72, 100, 2, (9, 3), 101, 1e5, tie_word_embeddings=True),
        hub_dialect=True,
        must_show=({"rope_theta": 1e4},),
    ),
    "llama_mqa": Spec(
        "8 query heads on one KV head, head size 12 over a hidden size of 40",
        decoder("llama", 40, 90, 2, (8, 1), 103, 1e4, head_dim=12),
    ),
    "llama_llama3_rope": Spec(
        "llama3 rope, biases on every projection, hub dialect, sharded files, a list of end tokens",
        decoder(
            "llama",
            64,
            100,
            2,
            (4, 2),
            107,
            0.0,
            rope_parameters=LLAMA3_ROPE,
            attention_bias=True,
            mlp_bias=True,
            eos_token_id=[2, 5],
        ),
        hub_dialect=True,
        max_shard_size="60KB",
        must_show=(
            {"rope_scaling": None},
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 2.0}},
            {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 128}},
        ),
    ),
    "llama_linear_rope": Spec(
        "linear rope under the old key `type`, hub dialect",
        decoder("llama", 48, 88, 2, (6, 2), 109, 1e4),
        hub_dialect=True,
        config_edits={"rope_scaling": {"type": "linear", "factor": 2.5}},
        must_show=({"rope_scaling": None}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ),
    "llama_yarn": Spec(
        "yarn rope with every default (cos and sin scaled by 0.1 ln(factor) + 1)",
        decoder("llama", 64, 100, 2, (4, 2), 113, 0.0, rope_parameters=YARN),
        must_show=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
            {"rope_parameters": YARN | {"attention_factor": 1.0}},
            {"rope_parameters": YARN | {"beta_fast": 1.5, "beta_slow": 0.25}},
            {"rope_parameters": YARN | {"original_max_position_embeddings": 64}},
        ),
    ),
    "mistral": Spec(
        "a window of 5 in all layers, head size 16 over a hidden size of 48 with 6 heads",
        decoder("mistral", 48, 100, 2, (6, 2), 127, 1e4, head_dim=16, sliding_window=5),
        must_show=({"sliding_window": None}, {"sliding_window": 4}, {"sliding_window": 6}),
    ),
    "mistral_bf16": Spec(
        "stored in bfloat16, 5 query / 5 KV heads, `sliding_window` null, hub dialect",
        decoder("mistral", 40, 84, 3, (5, 5), 131, 1e6, sliding_window=None),
        dtype=torch.bfloat16,
        hub_dialect=True,
        must_show=({"sliding_window": 5},),
    ),
    "qwen2": Spec(
        "stored in float16, 28 query / 7 KV heads, q/k/v biases, an unused `sliding_window` of 5, hub dialect",
        decoder("qwen2", 112, 92, 2, (28, 7), 97, 1e6),
        dtype=torch.float16,
        hub_dialect=True,
        config_edits={"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
        must_show=({"use_sliding_window": True},),
    ),
    "qwen2_sliding": Spec(
        "a window of 5 in the layers that `layer_types` names (1st and 3rd of 4), tied embeddings",
        decoder(
            "qwen2",
            48,
            60,
            4,
            (4, 2),
            101,
            1e4,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            tie_word_embeddings=True,
        ),
        must_show=(
            {"layer_types": None},
            {"layer_types": [FULL, SLIDING, FULL, SLIDING]},
            {"sliding_window": 4},
            {"sliding_window": 6},
        ),
    ),
    "qwen3": Spec(
        "q/k norms, tied embeddings, head size 16 over a hidden size of 40 with 4 heads",
        decoder("qwen3", 40, 92, 3, (4, 2), 103, 1e6, head_dim=16, tie_word_embeddings=True),
    ),
    "qwen3_bf16": Spec(
        "stored in bfloat16, 6 query / 3 KV heads, a window of 6 in layers 1 and 2 (max_window_layers 1), hub dialect",
        decoder("qwen3", 48, 76, 3, (6, 3), 107, 1e6, head_dim=12),
        dtype=torch.bfloat16,
        hub_dialect=True,
        config_edits={"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        must_show=({"use_sliding_window": False}, {"max_window_layers": 0}, {"max_window_layers": 2}),
    ),
    "qwen3_yarn": Spec(
        "yarn rope with every option, under the old key `type`; biases on q, k, v, o; hub dialect",
        decoder("qwen3", 48, 76, 2, (4, 1), 109, 1e3, head_dim=16, attention_bias=True),
        hub_dialect=True,
        config_edits={"rope_scaling": YARN_ALL},
        must_show=tuple(
            {"rope_scaling": {key: value for key, value in YARN_ALL.items() if key != left_out}}
            for left_out in ("beta_fast", "beta_slow", "mscale", "truncate")
        ),
    ),
    "mixtral": Spec(
        "6 experts, 2 a token; 9 query / 3 KV heads, stored in bfloat16, sharded files, hub dialect",
        decoder(
            "mixtral", 72, 44, 2, (9, 3), 101, 1e6, num_local_experts=6, num_experts_per_tok=2, sliding_window=None
        ),
        dtype=torch.bfloat16,
        hub_dialect=True,
        max_shard_size="100KB",
        must_show=({"num_experts_per_tok": 3}, {"sliding_window": 5}),
    ),
    "qwen3_moe": Spec(
        "8 experts, 3 a token, their weights renormalised; 6 query / 3 KV heads, tied embeddings",
        decoder(
            "qwen3_moe",
            40,
            64,
            2,
            (6, 3),
            103,
            1e4,
            head_dim=12,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=36,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        ),
        must_show=({"norm_topk_prob": False}, {"num_experts_per_tok": 2}),
    ),
    "qwen3_moe_dense": Spec(
        "12 experts, 4 a token, weights as they are, in layer 1 of 4 alone (decoder_sparse_step, mlp_only_layers), "
        "hub dialect",
        decoder(
            "qwen3_moe",
            40,
            76,
            4,
            (5, 1),
            107,
            1e4,
            head_dim=8,
            num_experts=12,
            num_experts_per_tok=4,
            moe_intermediate_size=28,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
        hub_dialect=True,
        must_show=({"norm_topk_prob": True}, {"num_experts_per_tok": 3}),
    ),
    "deepseek_v2": Spec(
        "latent attention with 5 heads, no query latent; 8 experts, 3 a token, of 2 of 4 groups; 2 shared; hub dialect",
        decoder(
            "deepseek_v2",
            40,
            68,
            2,
            (5, 5),
            101,
            1e4,
            q_lora_rank=None,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=28,
            n_shared_experts=2,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
        ),
        hub_dialect=True,
        must_show=({"topk_method": "greedy"}, {"topk_group": 3}, {"routed_scaling_factor": 1.0}),
    ),
    "deepseek_v2_dense": Spec(
        "latent attention without experts: 9 heads, values larger than keys, no query latent, stored in bfloat16, hub "
        "dialect",
        decoder(
            "deepseek_v2",
            54,
            68,
            2,
            (9, 9),
            107,
            1e4,
            q_lora_rank=None,
            kv_lora_rank=24,
            qk_nope_head_dim=6,
            qk_rope_head_dim=8,
            v_head_dim=18,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=2,
        ),
        dtype=torch.bfloat16,
        hub_dialect=True,
    ),
    "deepseek_v3": Spec(
        "latent attention with 6 heads, yarn with both mscales; 12 experts, 3 a token, of 2 of 4 groups; 1 shared; "
        "layer 0 dense",
        decoder(
            "deepseek_v3",
            48,
            68,
            3,
            (6, 6),
            103,
            0.0,
            rms_norm_eps=1e-2,  # which the norms of latents do not follow
            rope_parameters=YARN | {"mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 2.0, "beta_slow": 0.5},
            q_lora_rank=28,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
        ),
        must_show=(
            {"topk_group": 3},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"rope_interleave": False},
            {"rms_norm_eps": 1e-6},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
            {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 2.0, "beta_slow": 0.5}},
            {"rope_parameters": YARN | {"mscale": 1.5, "beta_fast": 2.0, "beta_slow": 0.5}},
        ),
    ),
    "deepseek_v3_dense": Spec(
        "latent attention without experts: 6 heads, yarn with both mscales",
        decoder(
            "deepseek_v3",
            48,
            68,
            2,
            (6, 6),
            109,
            0.0,
            rms_norm_eps=1e-2,  # which the norms of latents do not follow
            rope_parameters=YARN | {"mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 2.0, "beta_slow": 0.5},
            q_lora_rank=28,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=2,
        ),
        must_show=(
            {"rope_interleave": False},
            {"rms_norm_eps": 1e-6},
            {"rope_parameters": YARN | {"mscale": 1.5, "beta_fast": 2.0, "beta_slow": 0.5}},
        ),
    ),
    "gpt_oss": Spec(
        "sinks, a window of 5 in layers 0 and 2 of 3, yarn, biases; 6 fused experts, 2 a token, clamped at 1.25",
        decoder(
            "gpt_oss",
            48,
            28,
            3,
            (6, 2),
            97,
            0.0,
            rope_parameters=YARN | {"truncate": False, "beta_fast": 2.0, "beta_slow": 0.5},
            head_dim=12,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=5,
            swiglu_limit=1.25,
        ),
        must_show=(
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 3},
            {"sliding_window": 4},
            {"layer_types": [FULL, SLIDING, FULL]},
            {"rope_parameters": YARN | {"truncate": True, "beta_fast": 2.0, "beta_slow": 0.5}},
        ),
    ),
    "llama_gguf": Spec(
        "GGUF: 6 query / 3 KV heads, F32, F16 and Q8_0 tensors, an `output.weight` of its own",
        decoder("llama", 96, 160, 2, (6, 3), 101, 1e4),
        gguf=mixed_gguf,
        must_show=({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},),
    ),
    "llama_gguf_tied": Spec(
        "GGUF: 6 query / 2 KV heads, no `output.weight`",
        decoder("llama", 96, 96, 2, (6, 2), 97, 1e5, tie_word_embeddings=True),
        gguf=mixed_gguf,
    ),
}
