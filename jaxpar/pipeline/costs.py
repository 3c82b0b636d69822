"""What chunks of a prompt cost each pipeline stage, in FLOPs, and what stages send one another.

A token passes a layer's weights once, and its attention meets every key at or before its position that the layer's
window has. Latent attention makes the keys of earlier chunks anew for each chunk. Left out is the head, which sees one
token of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.pipeline.balance import layer_work
from jaxpar.plan import Plan


def pairs(first: int, after: int, window: int | None) -> int:
    """Keys that the queries `first` to `after` - 1 see, their own among them, all together."""

    def before(end: int) -> int:
        full = end if window is None else min(end, window)
        return full * (full + 1) // 2 + (end - full) * (window or 0)

    return before(after) - before(first)


def pair_flops(config: ModelConfig) -> int:
    """FLOPs of one query and one key of a layer, all heads: a product with the key and one with the value."""
    return 2 * config.num_attention_heads * (config.head_dim + config.v_head_dim)


def weight_flops(config: ModelConfig) -> np.ndarray:
    """FLOPs of a token with the weights that it passes in each layer [layers]."""
    return np.array([2.0 * layer_work(config, layer) for layer in range(config.num_hidden_layers)])


def attention_flops(config: ModelConfig, first: int, size: int) -> np.ndarray:
    """FLOPs of attention over positions, of a chunk of `size` tokens from `first` on, in each layer [layers]."""
    of_layers = [pair_flops(config) * pairs(first, first + size, window) for window in config.windows]
    return np.array(of_layers, np.float64) + first * _expanded(config)


def parity(config: ModelConfig, chunk: int) -> int:
    """Tokens of context at which a token's attention costs as much as the rest of its work: a plan's `chunk_parity`.

    A layer whose window is smaller than the model's context costs the same everywhere and counts among the rest.

    Args:
        config: the model.
        chunk: tokens of a chunk, among which latent attention shares the keys of the earlier ones.

    Returns:
        0 where no layer sees all of the context: equal chunks cost the same.
    """
    windows = [w for w in config.windows if w is not None and w < config.max_position_embeddings]
    growing = (config.num_hidden_layers - len(windows)) * pair_flops(config)
    if not growing:
        return 0
    slope = growing + config.num_hidden_layers * _expanded(config) / chunk
    return max(1, round((weight_flops(config).sum() + sum(windows) * pair_flops(config)) / slope))


def by_stage(of_layers: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """Sum what each layer costs [..., layers] over those of each stage, `layers` of them each -> [..., stages]."""
    return np.add.reduceat(of_layers, np.cumsum([0, *layers[:-1]]), axis=-1)


def head_flops(config: ModelConfig) -> float:
    """FLOPs of the logits of a token, on the last stage."""
    return 2.0 * config.hidden_size * config.vocab_size


def boundary_bytes(config: ModelConfig, rows: int, plan: Plan) -> int:
    """Bytes of the hidden states of `rows` tokens, which every stage but the last sends on: paid p - 1 times."""
    return rows * config.hidden_size * plan.itemsize


def _expanded(config: ModelConfig) -> float:
    """FLOPs of making the keys and values of a cached token of a layer out of its latent."""
    mla = config.mla
    if mla is None:
        return 0.0
    return 2.0 * config.num_attention_heads * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
