"""`config.json` of a Hugging Face model directory, in both dialects, as a ModelConfig.

The dialect of transformers 5 has `dtype` and `rope_parameters`; most files on the hub have `torch_dtype`, `rope_theta`
and `rope_scaling`. A key that is absent means what transformers takes it to mean.
"""

from __future__ import annotations

from pathlib import Path

from jaxpar.checkpoint.architectures import (
    ARCHITECTURES,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Architecture,
)
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.fields import Fields
from jaxpar.checkpoint.files import path_inside, read_json
from jaxpar.checkpoint.hf_attention import read_mla, read_windows
from jaxpar.checkpoint.hf_moe import read_moe
from jaxpar.checkpoint.hf_rope import read_rope
from jaxpar.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")
"""Element types of weights that are read, and MXFP4 of gpt_oss; others (float8, GPTQ, AWQ) are refused by name."""


def read_config(path: Path) -> ModelConfig:
    """The model that a directory's `config.json`, or a JSON file itself, describes.

    End-of-sequence ids are those of `config.json` followed by those that the directory's `generation_config.json`
    adds, as in vLLM: a chat model's end of turn is often named there alone.

    Raises:
        CheckpointError: names the file, the key, the value that was found and what was expected.
    """
    file = path_inside(path, "config.json") if path.is_dir() else path
    fields = Fields(read_json(file), file)
    generation = None
    if path.is_dir() and (generation_file := path_inside(path, "generation_config.json")).exists():
        generation = Fields(read_json(generation_file), generation_file)
    return _model_config(fields, generation)


def _model_config(fields: Fields, generation: Fields | None) -> ModelConfig:
    model_type = fields.choice("model_type", ARCHITECTURES)
    _refuse_other_models(fields, model_type)
    architecture = ARCHITECTURES[model_type]

    vocab_size = fields.integer("vocab_size", maximum=MAX_VOCABULARY)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    max_positions = fields.integer("max_position_embeddings", architecture.max_position_embeddings)
    rope = read_rope(fields, architecture, max_positions)
    mla = read_mla(fields, heads, rope) if architecture.latent else None
    attention_bias = model_type != "qwen2" and fields.boolean("attention_bias", architecture.attention_bias)
    eos_token_ids = _token_ids(fields, "eos_token_id", vocab_size)
    if generation is not None:
        eos_token_ids += _token_ids(generation, "eos_token_id", vocab_size)

    return check_heads(
        ModelConfig(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size", maximum=MAX_WIDTH),
            intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads if mla else _key_value_heads(fields, architecture, heads),
            head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _head_dim(fields, architecture, heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            rope=rope,
            windows=read_windows(fields, architecture, layers),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type in ("llama", "mistral") and fields.boolean("mlp_bias", False),
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            sinks=model_type == "gpt_oss",
            mla=mla,
            moe=read_moe(fields, model_type, layers),
            bos_token_id=fields.integer("bos_token_id", None, minimum=0, maximum=vocab_size - 1),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            dtype=fields.choice("dtype" if "dtype" in fields else "torch_dtype", DTYPES, "float32"),
        ),
        fields.file,
    )


def _key_value_heads(fields: Fields, architecture: Architecture, heads: int) -> int:
    is_absent = "num_key_value_heads" not in fields.values
    default = (is_absent and architecture.num_key_value_heads) or heads
    return fields.integer("num_key_value_heads", default, maximum=MAX_HEADS)


def _head_dim(fields: Fields, architecture: Architecture, heads: int) -> int:
    head_dim = fields.integer("head_dim", architecture.head_dim, maximum=MAX_WIDTH)
    if head_dim is not None:
        return head_dim
    hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    if hidden_size % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}, since head_dim is absent")
    return hidden_size // heads


def check_heads(config: ModelConfig, file: Path) -> ModelConfig:
    """The same `config`, whose heads fit each other: each KV head serves as many query heads, rope pairs up sizes.

    Raises:
        CheckpointError: if they do not.
    """
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{file}: {config.num_attention_heads} attention heads and {config.num_key_value_heads} key-value heads, "
            "expected the first to be a multiple of the second"
        )
    if config.rope_head_dim % 2:
        raise CheckpointError(
            f"{file}: the head size is {config.rope_head_dim}, expected an even number (rotary pairs)"
        )
    return config


def _refuse_other_models(fields: Fields, model_type: str) -> None:
    """Refuse what would change the answer and is not computed here."""
    architectures = fields.items("architectures", str)
    causal = f"{model_type.replace('_', '')}forcausallm"
    if architectures and causal not in (name.lower() for name in architectures):
        raise fields.error("architectures", f"the language model of {model_type} ({causal}, in any case)")
    wanted = f"no quantization: weights of {', '.join(DTYPES)}"
    quantization = fields.section("quantization_config")
    is_unpacked = model_type == "gpt_oss" and quantization and quantization.values.get("quant_method") == "mxfp4"
    if quantization is not None and not is_unpacked:
        raise fields.error("quantization_config", wanted)
    fields.choice("hidden_act", ("silu",), None)
    if model_type == "deepseek_v2" and fields.boolean("mlp_bias", False):
        raise fields.error("mlp_bias", "false: dense layers and shared experts without biases")


def _token_ids(fields: Fields, key: str, vocab_size: int) -> list[int]:
    """Token ids under `key`: none, one, or a list."""
    value = fields.values.get(key)
    ids = [] if value is None else value if type(value) is list else [value]
    if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
        raise fields.error(key, f"token ids from 0 to {vocab_size - 1}")
    return list(ids)
