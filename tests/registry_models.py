"""The models that test_registry.py counts: one with everything that a dense layer can have, and one with latents."""

from __future__ import annotations

from dataclasses import replace

from jaxpar.checkpoint.config import MLAConfig, ModelConfig, RopeConfig

LAYERS = 3
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=101,
    hidden_size=24,
    intermediate_size=34,
    num_hidden_layers=LAYERS,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope=RopeConfig(),
    windows=(None, 5, None),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    sinks=True,
)
LATENT = replace(
    CONFIG,
    num_hidden_layers=1,
    num_key_value_heads=9,
    head_dim=10,
    windows=(None,),
    qkv_bias=False,
    qk_norm=False,
    sinks=False,
    mla=MLAConfig(q_lora_rank=14, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7),
)
