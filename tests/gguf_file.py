"""A tiny dense llama written as a GGUF file, in the way of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 64, 4, 2, 16, 96, 300
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def weights() -> dict[str, np.ndarray]:
    """A dense llama under its Hugging Face names."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
    }
    draws = np.random.default_rng(0)
    return {name: draws.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores Q and K."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stored(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under GGUF's names and in its order of rows."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {f"blk.0.{theirs}": f"model.layers.0.{ours}" for theirs, ours in LAYER_NAMES.items()}
    result = {theirs: tensors[ours] for theirs, ours in names.items()}
    result["blk.0.attn_q.weight"] = permute(result["blk.0.attn_q.weight"], HEADS)
    result["blk.0.attn_k.weight"] = permute(result["blk.0.attn_k.weight"], KV_HEADS)
    return result


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    **metadata: Any,
) -> Path:
    """A GGUF file; matrices are stored as `kind`. A key of the metadata set to None is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | metadata).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
