"""What an architecture is where its config.json does not say: what transformers takes absent keys to mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Far above every published model: what is larger is a broken file, and would be allocated.
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**22
MAX_LAYERS = 2**12
MAX_HEADS = 2**14
MAX_EXPERTS = 2**12


@dataclass(frozen=True)
class Architecture:
    """Defaults of keys, under their names, and what no key says.

    `slides` says which layers may have a sliding window: none; all or none of them (`uniform`); those from
    max_window_layers on (`late`); every second one (`alternating`). `layer_types` may name others, except where they
    are uniform. `window_option`: there is a window only under `use_sliding_window`. `latent`: attention is MLA.
    """

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 1e4
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    attention_bias: bool = False
    slides: Literal["none", "uniform", "late", "alternating"] = "none"
    sliding_window: int | None = None
    window_option: bool = False
    latent: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(2048),
    "mistral": Architecture(131072, num_key_value_heads=8, slides="uniform", sliding_window=4096),
    "qwen2": Architecture(32768, num_key_value_heads=32, slides="late", sliding_window=4096, window_option=True),
    "qwen3": Architecture(
        32768, num_key_value_heads=32, head_dim=128, slides="late", sliding_window=4096, window_option=True
    ),
    "mixtral": Architecture(131072, num_key_value_heads=8, rope_theta=1e6, slides="uniform"),
    "qwen3_moe": Architecture(32768, num_key_value_heads=4, slides="uniform", sliding_window=4096, window_option=True),
    "deepseek_v2": Architecture(2048, latent=True),
    "deepseek_v3": Architecture(4096, latent=True),
    "gpt_oss": Architecture(
        131072,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        attention_bias=True,
        slides="alternating",
        sliding_window=128,
    ),
}
