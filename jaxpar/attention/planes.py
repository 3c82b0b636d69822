"""What the cache keeps of a token in each layer, by kind of attention: what a rank stores, and what moves over cp."""

from __future__ import annotations

from jaxpar.attention.cache import Plane
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.heads import heads_of
from jaxpar.plan import Plan


def planes_of(config: ModelConfig, plan: Plan) -> list[Plane]:
    """Two planes: keys (rotated) and values of every rank's KV heads, or slices of them, which lie over tp.

    Of multi-head latent attention (arXiv:2405.04434) the latent and the rotated key, one of each for all heads: every
    rank of tp needs the whole of it, and has it.
    """
    if config.mla is not None:
        sizes = {"latent": config.mla.kv_lora_rank, "rope": config.mla.qk_rope_head_dim}
        return [Plane(name, 1, size, ()) for name, size in sizes.items()]
    heads = heads_of(config, plan)
    size = heads.slice_of(config.head_dim)
    return [Plane(name, heads.tp * heads.kv_local, size, plan.width) for name in ("k", "v")]


def values_a_token(config: ModelConfig, plan: Plan) -> int:
    """Numbers that all ranks of tp together keep of a token in a layer, copies and padding of heads among them."""
    return sum(plane.heads * plane.size * (1 if plane.split else plan.mesh.tp) for plane in planes_of(config, plan))
