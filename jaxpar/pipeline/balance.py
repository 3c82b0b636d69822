"""How many layers each pipeline stage runs: evenly, or so that the slowest stage has the least work.

What balances is the weights that a token passes: twice as many FLOPs, and in decode the bytes that are read for a few
tokens. Of experts those that it chooses count, of the embedding the one row that is looked up, and of the head all of
it. What attention does with the context is left out: it is the same in layers of the same window.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jaxpar.checkpoint.config import ModelConfig


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """As even as can be, those left over to the first stages: 61 over 4 are 16, 15, 15, 15."""
    each, over = divmod(layers, stages)
    return tuple(each + (stage < over) for stage in range(stages))


def balanced_layers(work: Sequence[float], stages: int, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Cut layers into stages so that the stage of most work has as little as can be.

    A tail of beta stages is `last` = beta * sum(work) / stages: of 61 equal layers over 4 stages beta .5 is as much as
    7.625 layers, 68.625 / 4 = 17.16 is what each should have, and 17, 17, 17, 10 is the only cut with at most 17.625.
    Among several cuts the evenest one is taken (the least sum of squares), of those the one with more layers first.

    Args:
        work: of each layer, in any unit.
        stages: at most as many as layers; each has one at least.
        first: work of the first stage besides its layers (the embedding).
        last: the same of the last stage (the head).

    Returns:
        Layers of each stage.
    """
    sums, layers = [0.0], len(work)
    for one in work:
        sums.append(sums[-1] + one)

    def of_stage(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    def stops(stage: int, start: int) -> range:
        """Where a stage that starts there may end, leaving a layer for each stage after it."""
        after = stages - 1 - stage
        return range(start + 1, layers - after + 1) if after else range(layers, layers + 1)

    @cache
    def slowest(stage: int, start: int) -> float:
        """The least that the fullest stage can have, of `stage` and those after it."""
        if stage == stages:
            return 0.0
        return min(max(of_stage(stage, start, stop), slowest(stage + 1, stop)) for stop in stops(stage, start))

    @cache
    def evenest(stage: int, start: int) -> tuple[float, tuple[int, ...]]:
        """The least sum of squares with no stage above `most`, and minus the layers of each stage."""
        if stage == stages:
            return 0.0, ()
        cuts = []
        for stop in stops(stage, start):
            here, (squares, counts) = of_stage(stage, start, stop), evenest(stage + 1, stop)
            cuts.append((squares + here * here if here <= most else float("inf"), (start - stop, *counts)))
        return min(cuts)

    # Sums of the same layers in another order differ in their last digits.
    most = slowest(0, 0) * (1 + 1e-12)
    return tuple(-count for count in evenest(0, 0)[1])


def layer_work(config: ModelConfig, layer: int) -> int:
    """The weights of a layer that a token passes: projections, and the FFN or the experts that it chooses."""
    hidden, moe = config.hidden_size, config.moe
    if moe is None or not moe.layers[layer]:
        return _attention_work(config) + 3 * hidden * config.intermediate_size
    chosen = moe.router.top_k * moe.intermediate_size + moe.shared_intermediate_size
    return _attention_work(config) + hidden * moe.num_experts + 3 * hidden * chosen


def _attention_work(config: ModelConfig) -> int:
    hidden, heads, mla = config.hidden_size, config.num_attention_heads, config.mla
    out = hidden * heads * config.v_head_dim
    if mla is None:
        return out + hidden * config.head_dim * (heads + 2 * config.num_key_value_heads)
    latents = hidden * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return out + latents + (mla.q_lora_rank or hidden) * config.head_dim * heads + up
