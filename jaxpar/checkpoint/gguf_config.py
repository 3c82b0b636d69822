"""The metadata of a GGUF file of the llama family as a ModelConfig."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.architectures import MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.checkpoint.fields import Fields
from jaxpar.checkpoint.gguf_file import GgufFile
from jaxpar.checkpoint.hf_config import check_heads
from jaxpar.errors import CheckpointError

_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = RopeConfig("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""Those of every released Llama 3.1, 3.2 and 3.3; `factor` is 8 or 32."""


def read_gguf_config(path: Path) -> ModelConfig:
    """The model that a GGUF file's metadata describe.

    Raises:
        CheckpointError: if it is no readable GGUF file, or one of another architecture than llama.
    """
    file = GgufFile(path)
    try:
        return gguf_config(file)
    finally:
        file.ranges.close()


def gguf_config(file: GgufFile) -> ModelConfig:
    """The model that an open GGUF file describes (see `read_gguf_config`)."""
    fields = Fields(file.metadata, file.path)
    fields.choice("general.architecture", ("llama",))
    if fields.integer("llama.expert_count", 0, minimum=0):
        raise fields.error("llama.expert_count", "0: a dense model")
    vocab_size = _rows(file, "token_embd.weight")
    if fields.integer("llama.vocab_size", vocab_size) != vocab_size:
        raise fields.error("llama.vocab_size", f"{vocab_size}, the rows of token_embd.weight")
    hidden_size = fields.integer("llama.embedding_length", maximum=MAX_WIDTH)
    heads = fields.integer("llama.attention.head_count", maximum=MAX_HEADS)
    if "llama.attention.key_length" not in fields and hidden_size % heads:
        raise fields.error("llama.embedding_length", f"a multiple of llama.attention.head_count {heads}")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // heads, maximum=MAX_WIDTH)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.error(key, f"the head size {head_dim}")
    layers = fields.integer("llama.block_count", maximum=MAX_LAYERS)
    eos = fields.integer("tokenizer.ggml.eos_token_id", None, minimum=0, maximum=vocab_size - 1)
    eot = fields.integer("tokenizer.ggml.eot_token_id", None, minimum=0, maximum=vocab_size - 1)

    return check_heads(
        ModelConfig(
            model_type="llama",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("llama.feed_forward_length", maximum=MAX_WIDTH),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("llama.attention.head_count_kv", heads, maximum=MAX_HEADS),
            head_dim=head_dim,
            max_position_embeddings=fields.integer("llama.context_length"),
            rms_norm_eps=_from_float32(fields.number("llama.attention.layer_norm_rms_epsilon", above=0)),
            tie_word_embeddings="output.weight" not in file.tensors,
            rope=_rope(file, fields, head_dim),
            windows=(None,) * layers,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", None, minimum=0, maximum=vocab_size - 1),
            eos_token_ids=tuple(dict.fromkeys(token for token in (eos, eot) if token is not None)),
            dtype={"F16": "float16", "BF16": "bfloat16"}.get(file.tensors["token_embd.weight"].kind, "float32"),
        ),
        file.path,
    )


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise CheckpointError(
            f"{file.path}: tensor {name} is missing among {len(file.tensors)} tensors; fetch the file again"
        )
    rows = file.tensors[name].shape[0]
    if rows > MAX_VOCABULARY:
        raise CheckpointError(f"{file.path}: tensor {name} has {rows} rows, expected at most {MAX_VOCABULARY}")
    return rows


def _from_float32(value: float) -> float:
    """The shortest decimal with the same float32 value: 9.99999975e-06 was 1e-5 before it was stored."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, fields: Fields, head_dim: int) -> RopeConfig:
    theta = _from_float32(fields.number("llama.rope.freq_base", 10000.0, above=1))
    scaling = fields.choice("llama.rope.scaling.type", ("none", "linear"), "none")
    if scaling == "linear":
        return RopeConfig("linear", theta=theta, factor=fields.number("llama.rope.scaling.factor", minimum=1))
    if _ROPE_FACTORS not in file.tensors:
        return RopeConfig(theta=theta)

    # llama3 scaling is stored as one factor a frequency; its parameters are recovered and checked against them.
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {_ROPE_FACTORS} is {tensor.kind} of shape {tensor.shape}, expected F32 of shape "
            f"({head_dim // 2},); convert the model again"
        )
    stored = file.ranges.read_array(tensor.offset, tensor.shape, np.dtype(np.float32), ())
    factor = float(stored.max())
    if not np.allclose(stored, _llama3_factors(theta, head_dim, factor), rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: {_ROPE_FACTORS}, up to {factor:g}, is not the llama3 scaling of low_freq_factor 1, "
            "high_freq_factor 4 and 8192 original positions; convert the model from its Hugging Face directory"
        )
    return dataclasses.replace(_LLAMA3, theta=theta, factor=factor)


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """By how much llama3 scaling divides each of head_dim/2 frequencies."""
    low, high = _LLAMA3.low_freq_factor, _LLAMA3.high_freq_factor
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3.original_max_position_embeddings / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
