"""What a `config.json` says of attention beside its heads: sliding windows, and the sizes of latent attention."""

from __future__ import annotations

from jaxpar.checkpoint.architectures import MAX_WIDTH, Architecture
from jaxpar.checkpoint.config import MLAConfig, RopeConfig
from jaxpar.checkpoint.fields import Fields

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(fields: Fields, architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, None where attention is full.

    Raises:
        CheckpointError: `layer_types` that the architecture cannot have, or that want a window where there is none.
    """
    window = None
    if architecture.slides != "none":  # others have no window, whatever config.json says
        is_given = "sliding_window" in fields.values
        window = fields.integer("sliding_window", None) if is_given else architecture.sliding_window
    if architecture.window_option and not fields.boolean("use_sliding_window", False):
        window = None

    if architecture.slides == "alternating":
        usual = [_FULL if layer % 2 else _SLIDING for layer in range(layers)]
    else:
        late = architecture.slides == "late"
        first_sliding = fields.integer("max_window_layers", 28, minimum=0) if late else 0
        usual = [_SLIDING if window and layer >= first_sliding else _FULL for layer in range(layers)]
    kinds = fields.items("layer_types", str)
    kinds = usual if kinds is None else kinds
    if len(kinds) != layers:
        raise fields.error("layer_types", f"one entry for each of {layers} layers, not {len(kinds)}")
    if unknown := set(kinds) - {_FULL, _SLIDING}:
        raise fields.error("layer_types", f"{_FULL} or {_SLIDING}, not {', '.join(sorted(unknown))}")
    if _SLIDING in kinds and window is None:
        wanted = "use_sliding_window and a sliding_window" if architecture.window_option else "a sliding_window"
        raise fields.error("layer_types", f"{_FULL} alone, since there is no window ({wanted})")
    if architecture.slides == "uniform" and kinds != usual:
        raise fields.error("layer_types", f"the one window of {fields.values['model_type']} ({window}) in every layer")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def read_mla(fields: Fields, heads: int, rope: RopeConfig) -> MLAConfig:
    """The sizes of latent attention (DeepSeek-V2, V3).

    Raises:
        CheckpointError: sizes that cannot be, or an option that no published model has.
    """
    if fields.boolean("attention_bias", False):
        raise fields.error("attention_bias", "false: latent attention without biases")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads {heads}: every head has keys of its own")
    # A rank that is null means that there is no query latent; one that is absent, the usual one.
    has_latent_queries = "q_lora_rank" in fields or "q_lora_rank" not in fields.values
    return MLAConfig(
        q_lora_rank=fields.integer("q_lora_rank", 1536, maximum=MAX_WIDTH) if has_latent_queries else None,
        kv_lora_rank=fields.integer("kv_lora_rank", 512, maximum=MAX_WIDTH),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", 128, maximum=MAX_WIDTH),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 64, maximum=MAX_WIDTH),
        v_head_dim=fields.integer("v_head_dim", 128, maximum=MAX_WIDTH),
        scale_factor=rope.temperature(rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0,
    )
