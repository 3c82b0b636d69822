"""The work that a step cannot do without, on its fullest rank: pairs that the mask lets be seen, rows that experts get.

`ledger/predict.py` counts what programs are built for: every tile of a page table, every row of a buffer. What an
accelerator spends its time on is less, since kernels leave out what is masked, empty or padding:

    attention   a chunk of F tokens after C cached ones sees F C + F (F + 1) / 2 pairs, not F x (the table's width)
    experts     the rows that are routed to a rank, R k in the mean, times how much fuller the fullest one is

Everything else is the same as there.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from jaxpar.attention.latent import expand_flops
from jaxpar.checkpoint.config import ModelConfig, MoEConfig
from jaxpar.pipeline.costs import pairs
from jaxpar.registry import chosen
from jaxpar.strategies import Step


class Context(NamedTuple):
    """What each request of a step has: `before` tokens that are cached already, and `fresh` ones on all ranks of cp."""

    before: int
    fresh: int

    @property
    def after(self) -> int:
        """Tokens that are cached when the step has stored its own."""
        return self.before + self.fresh


class Attended(NamedTuple):
    """A rank's attention in all layers of a step.

    `flops` are of products with keys and values, `expanding` of those that make them of latents, or latents of queries;
    `keys` are the tokens whose cache is read (of each layer, of all lanes), `expanded` those made of latents.
    """

    flops: float
    expanding: float
    keys: float
    expanded: float


class Routed(NamedTuple):
    """What the experts of the fullest rank get in a layer: `rows`, for `touched` of the slots, of `tokens` in all."""

    rows: float
    touched: float
    tokens: int


def attended(step: Step, context: Context, skips: bool = True) -> Attended:
    """Attention's work; ranks of cp have equal parts of it, but for contiguous chunks, whose last rank has most.

    Unless it `skips` what the mask hides, every query meets every key, and all ranks have as much.
    """
    config, plan, heads = step.config, step.plan, step.heads
    cp, mla = plan.mesh.cp, config.mla
    per_layer = step.layers / config.num_hidden_layers
    seen, read = (per_layer * count for count in _seen(config, context))
    if not skips:
        seen, read = step.layers * context.fresh * context.after, step.layers * context.after
    elif step.phase == "prefill" and plan.layout == "contiguous" and cp > 1:
        seen *= _last_rank(context, cp)
    strategy = chosen(step)[f"{step.phase}_attention"]
    share = strategy.share(step, 0)
    if mla is not None and step.phase == "decode":
        size = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
        flops = 2 * step.lanes * share.heads * seen / cp * size
        return Attended(flops, step.layers * expand_flops(mla, share.heads, step.rows), step.lanes * read / cp, 0)
    size = heads.slice_of(config.head_dim) + heads.slice_of(config.v_head_dim)
    flops = 2 * step.lanes * heads.q_local * seen / cp * size
    # A rank meets the keys of each block of ranks once, its own where there is one block.
    keys = step.lanes * read / cp * sum(len(keys) for keys in {tuple(keys) for _, keys in share.blocks})
    if mla is None:
        return Attended(flops, 0, keys, 0)
    return Attended(flops, expand_flops(mla, share.heads, 1) * keys, keys, keys)


def routed(step: Step, imbalance: float = 1.0) -> Routed:
    """Rows of the rank whose experts get most, `imbalance` times the mean where ranks have different experts.

    Experts touched: e (1 - (1 - k / E)^B) of the e that a rank has, for B tokens.
    """
    ranks = step.ranks(step.plan.experts)
    tokens = step.moe_rows * ranks
    rows = step.moe_rows * step.choices * (imbalance if ranks > 1 else 1.0)
    slots = step.slots_per_rank
    return Routed(rows, min(rows, experts_touched(slots, step.choices, slots * ranks, tokens)), tokens)


def experts_touched(held: int, choices: int, experts: int, tokens: int) -> float:
    """Of `held` experts those that any of `tokens` chooses, in the mean, if each of `experts` is chosen as often."""
    return held * (1 - (1 - choices / experts) ** tokens)


def gated_flops(step: Step, moe: MoEConfig, rows: float) -> float:
    """FLOPs of a layer's experts on a rank for so many rows."""
    return 2 * rows * 3 * step.config.hidden_size * step.width_share("moe", moe.intermediate_size)


def _last_rank(context: Context, ranks: int) -> float:
    """How much more than the mean the last rank of a contiguous chunk sees: under twice as much."""
    last = context.after - -(-context.fresh // ranks)
    return ranks * pairs(last, context.after, None) / pairs(context.before, context.after, None)


@lru_cache(maxsize=4096)
def _seen(config: ModelConfig, context: Context) -> tuple[int, int]:
    """Pairs of a query and a key that it sees, and keys that any sees, of one request in all layers."""
    windows = Counter(config.windows)
    seen = sum(layers * pairs(context.before, context.after, window) for window, layers in windows.items())
    read = sum(
        layers * (context.after if window is None else min(context.after, window + context.fresh - 1))
        for window, layers in windows.items()
    )
    return seen, read
