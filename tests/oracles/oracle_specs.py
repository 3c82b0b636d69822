"""The oracles: an architecture each, awkward sizes, how it is stored, and what of it must show in the logits."""

from __future__ import annotations

import torch
from expert_specs import EXPERT_SPECS
from spec import FULL, SLIDING, YARN, Spec, decoder


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
} | EXPERT_SPECS
