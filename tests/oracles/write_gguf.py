"""A GGUF file of a llama model, as llama.cpp's converter writes it: the inverse of what a reader has to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in GLOBAL:
        return f"{GLOBAL[stem]}.weight"
    layer, module = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER[module]}.weight"


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute a query or key projection `[heads * size, in]` from rotating halves to rotating neighbours, per head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel, storage: Callable[[str], str]) -> None:
    """Write `model`; `storage(tensor name)` is the GGML type that a tensor is stored in."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, parameter in model.named_parameters():  # a tied lm_head is not among them
        weight, target = parameter.detach().numpy(), gguf_name(name)
        if "attn_q." in target:
            weight = interleave_halves(weight, config.num_attention_heads)
        elif "attn_k." in target:
            weight = interleave_halves(weight, config.num_key_value_heads)
        kind = GGMLQuantizationType[storage(target)]
        writer.add_tensor(target, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
