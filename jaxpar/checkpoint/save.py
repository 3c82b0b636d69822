"""The inverse of loading: weights on the mesh -> the tensors of a Hugging Face directory, and its files.

Files appear whole or not at all: they are written elsewhere and then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save

from jaxpar.checkpoint.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxpar.checkpoint.files import one_line
from jaxpar.checkpoint.load import pieces
from jaxpar.checkpoint.safetensors_reader import DTYPES, SINGLE_FILE
from jaxpar.errors import CheckpointError
from jaxpar.nn.weights import Source, Weight
from jaxpar.whole_file import written_whole

CONFIG_FILE = "config.json"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
SAVED_EXPERTS = ("mixtral", "qwen3_moe")
"""Architectures whose experts can be written."""
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


def collect_tensors(weights: Mapping[str, Weight], arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Arrays that are laid out like `weights` -> whole tensors by checkpoint name, in the arrays' dtype.

    Copied heads are written once and padding is left out. Host memory holds all tensors and one whole weight.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        values = np.asarray(arrays[name])
        by_source = values.reshape(len(weight.sources), *weight.sources[0].shape)
        for value, source in zip(by_source, weight.sources, strict=True):
            _split(value, source, tensors)
    return tensors


def _split(values: np.ndarray, source: Source, tensors: dict[str, np.ndarray]) -> None:
    for name, shape in source.stored.items():
        tensors[name] = np.empty(shape, values.dtype)
    before = (slice(None),) * source.dim
    for piece in pieces(source, 0, values.shape[source.dim]):
        rows = values[(*before, slice(piece.at, piece.at + piece.size))]
        tensors[source.tensors[piece.tensor]][(*before, slice(piece.start, piece.start + piece.size))] = rows


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A temporary directory whose files move into `directory` when the block ends, `config.json` last.

    A directory that has a `config.json` is therefore whole. If the block raises (Ctrl-C, too), nothing is left behind.

    Raises:
        CheckpointError: `directory` holds a model already, or cannot be written.
    """
    if (directory / CONFIG_FILE).exists():
        raise CheckpointError(f"{directory} already holds a model: remove it, or choose another directory")
    existed = directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=directory))
        try:
            yield folder
            for file in sorted(folder.iterdir(), key=lambda file: (file.name == CONFIG_FILE, file.name)):
                os.replace(file, directory / file.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if not existed and not any(directory.iterdir()):
                directory.rmdir()
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {one_line(error)}; choose another directory") from error


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file, replacing an older one only when the new one is whole.

    Raises:
        CheckpointError: it cannot be written.
    """
    # Not the library's save_file, which leaves a file that only its owner can read.
    content = save({name: np.ascontiguousarray(value) for name, value in tensors.items()}, dict(metadata))
    try:
        with written_whole(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {one_line(error)}; choose another directory") from error


def write_model(folder: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `model.safetensors` in `config.dtype`, `config.json` and `generation_config.json` into a staged folder."""
    dtype = next(dtype for dtype in DTYPES.values() if dtype.name == config.dtype)
    # transformers before version 5 refuses a file that does not name a format.
    write_tensors(
        folder / SINGLE_FILE, {name: value.astype(dtype) for name, value in tensors.items()}, {"format": "pt"}
    )
    document = config_document(config)
    ends = {key: document[key] for key in ("bos_token_id", "eos_token_id")}
    for name, content in ((CONFIG_FILE, document), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def config_document(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `read_config` reads back as `config`; transformers 4 and 5 both understand it."""
    ends = list(config.eos_token_ids)
    document: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.rope_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rope.theta,
        "rope_parameters": _rope_document(config.rope),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }
    window = next((window for window in config.windows if window is not None), None)
    if config.model_type == "mistral":
        document["sliding_window"] = window
    elif window is not None:
        kinds = ["full_attention" if size is None else "sliding_attention" for size in config.windows]
        document |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if config.moe is not None or config.model_type in SAVED_EXPERTS:
        document |= _expert_document(config, config.moe)
    return document if config.mla is None else document | _latent_document(config, config.mla)


def _expert_document(config: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """The experts, or that no layer of an architecture that may have some has any."""
    if config.model_type not in SAVED_EXPERTS:
        raise CheckpointError(f"experts of {config.model_type} cannot be written: choose {' or '.join(SAVED_EXPERTS)}")
    if moe is None:
        return {"mlp_only_layers": list(range(config.num_hidden_layers))}
    if config.model_type == "mixtral":
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.router.top_k}
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.router.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(moe.layers) if not has_experts],
    }


def _latent_document(config: ModelConfig, mla: MLAConfig) -> dict[str, Any]:
    """The sizes of latent attention, and that no layer has experts."""
    sizes = {name: getattr(mla, name) for name in _LATENT_FIELDS}
    dense = {"first_k_dense_replace": config.num_hidden_layers, "num_experts_per_tok": 1}
    return sizes | dense | {"rope_interleave": config.rope.interleaved}


def _rope_document(rope: RopeConfig) -> dict[str, Any]:
    values = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.rope_type]}
    return {"rope_type": rope.rope_type, "rope_theta": rope.theta} | {
        name: value for name, value in values.items() if value is not None
    }
