"""`config.json` of a Hugging Face model directory, in both dialects, as a ModelConfig.

The dialect of transformers 5 has `dtype` and `rope_parameters`; most files on the hub have `torch_dtype`, `rope_theta`
and `rope_scaling`. A key that is absent means what transformers takes it to mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.checkpoint.fields import Fields
from jaxpar.checkpoint.files import path_inside, read_json
from jaxpar.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")
"""Element types of weights that are read; other formats (float8, GPTQ, AWQ, MXFP4) are refused by name."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Far above every published model: what is larger is a broken file, and would be allocated.
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**22
MAX_LAYERS = 2**12
MAX_HEADS = 2**14


@dataclass(frozen=True)
class _Defaults:
    """What transformers takes a key to be in one architecture where config.json leaves it out."""

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None


ARCHITECTURES = {
    "llama": _Defaults(max_position_embeddings=2048),
    "mistral": _Defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096),
    "qwen2": _Defaults(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096),
    "qwen3": _Defaults(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128, sliding_window=4096),
}


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
    defaults = ARCHITECTURES[model_type]

    vocab_size = fields.integer("vocab_size", maximum=MAX_VOCABULARY)
    hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    is_absent = "num_key_value_heads" not in fields.values
    kv_heads = fields.integer(
        "num_key_value_heads", (is_absent and defaults.num_key_value_heads) or heads, maximum=MAX_HEADS
    )
    head_dim = fields.integer("head_dim", defaults.head_dim, maximum=MAX_WIDTH)
    if head_dim is None:
        if hidden_size % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}, since head_dim is absent")
        head_dim = hidden_size // heads
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    attention_bias = model_type != "qwen2" and fields.boolean("attention_bias", False)
    eos_token_ids = _token_ids(fields, "eos_token_id", vocab_size)
    if generation is not None:
        eos_token_ids += _token_ids(generation, "eos_token_id", vocab_size)

    return check_heads(
        ModelConfig(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            rope=_rope(fields, max_positions),
            windows=_windows(fields, model_type, layers),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type in ("llama", "mistral") and fields.boolean("mlp_bias", False),
            qk_norm=model_type == "qwen3",
            bos_token_id=fields.integer("bos_token_id", None, minimum=0, maximum=vocab_size - 1),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            dtype=fields.choice("dtype" if "dtype" in fields else "torch_dtype", DTYPES, "float32"),
        ),
        fields.file,
    )


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
    if config.head_dim % 2:
        raise CheckpointError(f"{file}: the head size is {config.head_dim}, expected an even number (rotary pairs)")
    return config


def _refuse_other_models(fields: Fields, model_type: str) -> None:
    """Refuse what would change the answer and is not computed here."""
    architectures = fields.items("architectures", str)
    causal = f"{model_type}forcausallm"
    if architectures and causal not in (name.lower() for name in architectures):
        raise fields.error("architectures", f"the language model of {model_type} ({causal}, in any case)")
    if "quantization_config" in fields:
        raise fields.error("quantization_config", f"no quantization: weights of {', '.join(DTYPES)}")
    fields.choice("hidden_act", ("silu",), None)


def _token_ids(fields: Fields, key: str, vocab_size: int) -> list[int]:
    """Token ids under `key`: none, one, or a list."""
    value = fields.values.get(key)
    ids = [] if value is None else value if type(value) is list else [value]
    if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
        raise fields.error(key, f"token ids from 0 to {vocab_size - 1}")
    return list(ids)


def _windows(fields: Fields, model_type: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, None where attention is full."""
    if model_type == "llama":  # transformers' llama has no window, whatever its config.json says
        window = None
    elif "sliding_window" in fields.values:
        window = fields.integer("sliding_window", None)
    else:
        window = ARCHITECTURES[model_type].sliding_window

    first_sliding = 0
    if model_type in ("qwen2", "qwen3"):
        first_sliding = fields.integer("max_window_layers", 28, minimum=0)
        if not fields.boolean("use_sliding_window", False):
            window = None
    windows = tuple(window if layer >= first_sliding else None for layer in range(layers))

    kinds = fields.items("layer_types", str)
    if kinds is None:
        return windows
    if len(kinds) != layers:
        raise fields.error("layer_types", f"one entry for each of {layers} layers, not {len(kinds)}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"full_attention or sliding_attention, not {', '.join(sorted(unknown))}")
    if "sliding_attention" in kinds and window is None:
        wanted = "a sliding_window" if model_type == "mistral" else "use_sliding_window and a sliding_window"
        raise fields.error("layer_types", f"full_attention alone, since there is no window ({wanted})")
    declared = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if model_type == "mistral" and declared != windows:
        raise fields.error("layer_types", f"the one window of mistral ({window}) in every layer")
    return declared


def _rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Rotary parameters: the object under `rope_scaling` or `rope_parameters`, or the top level alone."""
    scaling = fields.section("rope_scaling")
    parameters = scaling if scaling is not None and scaling.values else fields.section("rope_parameters")
    if parameters is None:
        parameters = Fields({}, fields.file)
    for place in (fields, parameters):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "1: rotary embeddings over the whole head")
    if nested := sorted({"full_attention", "sliding_attention"} & set(parameters.values)):
        raise parameters.error(nested[0], "one set of rotary parameters for all layers")

    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0, above=1), above=1)
    rope_type = parameters.choice("rope_type" if "rope_type" in parameters else "type", ROPE_TYPES, "default")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = parameters.number("factor", minimum=1)
    if rope_type == "linear":
        return RopeConfig("linear", theta=theta, factor=factor)

    # The top level wins, and the context length stands in, as in transformers.
    place = fields if "original_max_position_embeddings" in fields else parameters
    original = place.integer("original_max_position_embeddings", max_positions)
    if rope_type == "llama3":
        low = parameters.number("low_freq_factor", above=0)
        return RopeConfig(
            "llama3",
            theta=theta,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=parameters.number("high_freq_factor", above=low),
            original_max_position_embeddings=original,
        )
    # YaRN (Peng et al. 2023, arXiv:2309.00071); 0 means absent for the options, as in transformers.
    beta_fast = parameters.number("beta_fast", None, minimum=0) or 32.0
    beta_slow = parameters.number("beta_slow", None, minimum=0) or 1.0
    if beta_fast <= beta_slow:
        raise parameters.error("beta_fast", f"a number > beta_slow {beta_slow:g}")
    return RopeConfig(
        "yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=parameters.number("mscale", None, minimum=0) or None,
        mscale_all_dim=parameters.number("mscale_all_dim", None, minimum=0) or None,
        attention_factor=parameters.number("attention_factor", None, above=0),
        truncate=parameters.boolean("truncate", True),
    )
