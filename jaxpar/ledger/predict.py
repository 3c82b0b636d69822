"""Closed forms of a step: what its strategies send, its FLOPs, and the bytes that it holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.attention import head_dim
from jaxpar.attention.latent import absorbed_flops, expand_flops
from jaxpar.attention.tiles import FIXED_KEYS, attend_flops
from jaxpar.checkpoint.config import ModelConfig, MoEConfig
from jaxpar.fixed import product_rows, whole_tiles
from jaxpar.heads import HeadLayout
from jaxpar.ledger.flops import per_iteration
from jaxpar.ledger.rounds import all_flops, all_rounds, count_rounds
from jaxpar.ledger.traffic import Traffic, merge, times
from jaxpar.moe.aligned import aligned_rows
from jaxpar.registry import chosen
from jaxpar.strategies import Step, Strategy


def predict_traffic(step: Step) -> list[Traffic]:
    """Every collective of a step, from the closed forms of the strategies that the plan chose."""
    return merge(
        row for batch in step.batches for strategy in chosen(batch).values() for row in strategy.traffic(batch)
    )


def predict_flops(step: Step) -> dict[str, int]:
    """FLOPs of one rank by sublayer: matrix products, a multiply-add as two, padding included as it is computed.

    Attention counts every tile of the page table, as if none could be skipped: which are is known only when it runs.
    """
    total: Counter[str] = Counter()
    for batch in step.batches:
        total.update(_flops(batch))
    return dict(total)


def predict_steps(steps: Iterable[Step], loads: np.ndarray | None) -> tuple[list[Traffic], dict[str, int]]:
    """What steps send and compute together, with every iteration that `loads` (of `loads_of`) need; nothing is traced.

    Raises:
        PlanError: a strategy that refuses the shapes of a step.
    """
    traffic: list[Traffic] = []
    flops: Counter[str] = Counter()
    for step, count in Counter(steps).items():
        rounds = count_rounds(step, loads)
        traffic += [times(all_rounds(row, rounds), count) for row in predict_traffic(step)]
        flops.update({name: count * each for name, each in all_flops(predict_flops(step), rounds).items()})
    return merge(traffic), dict(flops)


def _flops(step: Step) -> dict[str, int]:
    """Those of one batch."""
    config, hidden, plan = step.config, step.config.hidden_size, step.plan
    attention = chosen(step)[f"{step.phase}_attention"]
    attends, feeds = (plan.sublayer(name, step.phase) for name in (step.attention, "ffn"))
    before, after = projections_of(step)
    projections = 2 * _multiplied(step, attends.ring_in) * before + 2 * _multiplied(step, attends.ring_out) * after
    tokens = product_rows(step.rows if step.logits else step.lanes, step.itemsize, plan.fixed_order)
    # Its products go around the same ring.
    rows = _multiplied(step, feeds.ring_in)
    ffn = _gated_ffn(rows, hidden, step.width_share("ffn", config.intermediate_size))
    return {
        "attention": step.layers * projections,
        attention.sublayer: step.layers * _attended(step, attention),
        **({"ffn": step.dense_layers * ffn} if step.dense_layers else {}),
        **(_moe(step, config.moe) if config.moe is not None else {}),
        "head": 2 * tokens * hidden * -(-config.vocab_size // plan.mesh.tp),
    }


def projections_of(step: Step) -> tuple[int, int]:
    """Weights of a layer's projections before attention and after it that a token passes on a rank."""
    config, heads, plan = step.config, step.heads, step.plan
    attention = chosen(step)[f"{step.phase}_attention"]
    # In decode ranks of cp share the output projection, and the query projection where the strategy gathers queries.
    queries = step.heads_over_cp if plan.active(attention.query_axes) else heads.q_local
    outputs = step.heads_over_cp if step.phase == "decode" else heads.q_local
    made = config.hidden_size * heads.slice_of(config.v_head_dim) * outputs
    return _projected(config, queries, heads), made


def _multiplied(step: Step, ring: tuple[str, ...]) -> int:
    """Rows of a projection's products, which are as many as there are ranks in its `ring`."""
    ranks = step.ranks(ring)
    return ranks * product_rows(-(-step.rows // ranks), step.itemsize, step.plan.fixed_order)


def _projected(config: ModelConfig, queries: int, heads: HeadLayout) -> int:
    """Weights before attention that a token passes on a rank: projections to so many heads, and those before heads."""
    hidden, mla = config.hidden_size, config.mla
    if mla is None:
        return hidden * heads.slice_of(config.head_dim) * (queries + 2 * heads.kv_local)
    latents = hidden * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
    return latents + (mla.q_lora_rank or hidden) * config.head_dim * queries


def _gated_ffn(rows: int, hidden: int, width: int) -> int:
    return 2 * rows * hidden * 3 * width


def _moe(step: Step, moe: MoEConfig) -> dict[str, int]:
    """FLOPs of the routers and shared experts, and of the experts in a rank's slots for all rows that may come."""
    hidden, rows = step.config.hidden_size, step.moe_rows
    shared = step.width_share("moe", moe.shared_intermediate_size)
    fixed = step.plan.fixed_order
    of_all = 2 * (whole_tiles(rows) if fixed else rows) * hidden * moe.num_experts
    if moe.shared_intermediate_size:
        of_all += _gated_ffn(product_rows(rows, step.itemsize, fixed), hidden, shared)
    dispatch = chosen(step)["moe_dispatch"]
    assert dispatch.expert_rows is not None
    of_experts = dispatch.expert_rows(step)
    computed = aligned_rows(of_experts.rows, step.slots_per_rank) if fixed else of_experts.rows
    experts = _gated_ffn(computed, hidden, step.width_share("moe", moe.intermediate_size))
    return {"moe": step.moe_layers * of_all, per_iteration("experts", of_experts.per): step.moe_layers * experts}


def _attended(step: Step, attention: Strategy) -> int:
    """FLOPs of one layer's products of queries, keys and values; every rank of cp computes as many."""
    share, config, mla = attention.share(step, 0), step.config, step.config.mla
    if step.heads.parts > 1:
        return head_dim.flops(step)
    if mla is not None and step.phase == "decode":
        return absorbed_flops(mla, step.lanes, share.heads, step.tokens, step.keys, step.plan.fixed_order)
    products = sum(
        attend_flops(
            step.lanes,
            share.heads,
            share.group,
            len(queries) * step.tokens,
            len(keys) * step.keys,
            config.head_dim,
            config.v_head_dim,
            step.phase if step.plan.fixed_order else None,
        )
        for queries, keys in share.blocks
    )
    if mla is None:
        return products
    # Whichever queries meet them: keys and values are made once of the latents of each block of ranks.
    expanded = {tuple(keys): len(keys) * step.keys for _, keys in share.blocks}
    made = (step.lanes * keys for keys in expanded.values())
    rows = sum(whole_tiles(keys, FIXED_KEYS) if step.plan.fixed_order else keys for keys in made)
    return products + expand_flops(mla, share.heads, rows)


def local_bytes(shapes: Any, specs: Any, sizes: Mapping[str, int]) -> int:
    """Bytes that one rank holds of arrays with these global shapes (a pytree of ShapeDtypeStructs) and specs."""

    def one(shape: jax.ShapeDtypeStruct, spec: P) -> int:
        total = math.prod(shape.shape) * shape.dtype.itemsize
        for axes in spec:
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                total //= sizes[axis]
        return total

    return sum(jax.tree.leaves(jax.tree.map(one, shapes, specs)))
