"""What a step moves between memory and the units that compute, on its fullest rank: the other half of a roofline.

Everything is counted in values, not bytes, since weights, cache and activations may have types of their own:

    matrices      weights of attention, FFNs and experts, each read once a step; of experts those that any token chose
    tables        weights that stay in 16 bits whatever the matrices are: vocabulary, routers, norms
    cache         keys, values and latents that are read for the tokens of context, and those that are stored
    rows          activations that go in and out of products, as if each were one kernel

The parts have the names of `predict_flops`, and two more: "elementwise", which are norms with their residual sums and
the gates of FFNs, and "embedding".
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpar.attention.planes import planes_of
from jaxpar.checkpoint.config import MoEConfig
from jaxpar.ledger.needed import Attended, Routed
from jaxpar.ledger.predict import projections_of
from jaxpar.strategies import Step


class Moved(NamedTuple):
    """Values that are read or written in all layers of a step.

    Only kernels that are not fused move `copies`, rows on their way to experts and back, and the `inputs` of products
    with matrices, which are rounded first where these have 8 bits.
    """

    matrices: float = 0.0
    tables: float = 0.0
    cache: float = 0.0
    rows: float = 0.0
    copies: float = 0.0
    inputs: float = 0.0


def predict_moved(step: Step, attended: Attended, routed: Routed | None) -> dict[str, Moved]:
    """What one batch of a step moves, by part; `routed` is None where it has no experts."""
    config, hidden, rows = step.config, step.config.hidden_size, step.rows
    before, after = projections_of(step)
    width = step.width_share("ffn", config.intermediate_size)
    # Projections read the residual's width and write what each weight column makes of it, and the other way round.
    projected = rows * (2 * hidden + (before + after) / hidden)
    found = {
        "embedding": Moved(tables=rows * hidden, rows=rows * hidden),
        "elementwise": _elementwise(step, width),
        "attention": Moved(
            matrices=step.layers * (before + after),
            rows=step.layers * projected,
            inputs=step.layers * rows * (hidden + after / hidden),
        ),
        f"{step.phase}_attention": _attended(step, attended),
        "head": _head(step),
    }
    if step.dense_layers:
        of_rows = rows * (2 * hidden + 3 * width)
        found["ffn"] = Moved(
            matrices=step.dense_layers * 3 * hidden * width,
            rows=step.dense_layers * of_rows,
            inputs=step.dense_layers * rows * (hidden + width),
        )
    if step.moe_layers and routed is not None and config.moe is not None:
        found |= _experts(step, config.moe, routed)
    return found


def _elementwise(step: Step, width: int) -> Moved:
    """Of each layer two norms, which read and write the residual rows and a sublayer's, and the gates of dense FFNs."""
    config, moe = step.config, step.config.moe
    norms = step.layers * 2 * 4 * step.passed_rows * config.hidden_size
    gates = step.dense_layers * 3 * step.rows * width
    if moe is not None and moe.shared_intermediate_size:
        gates += step.moe_layers * 3 * step.moe_rows * step.width_share("moe", moe.shared_intermediate_size)
    return Moved(tables=(2 * step.layers + 1) * config.hidden_size, rows=norms + gates)


def _attended(step: Step, attended: Attended) -> Moved:
    config, heads, mla = step.config, step.heads, step.config.mla
    stored = [plane.size * plane.heads // step.ranks(plane.split) for plane in planes_of(config, step.plan)]
    rows = step.layers * step.rows * heads.q_local * (config.head_dim + config.v_head_dim)
    cache = sum(stored) * (attended.keys + step.layers * step.rows)
    if mla is None:
        return Moved(cache=cache, rows=rows)
    up = heads.q_local * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    made = 2 * attended.expanded * heads.q_local * (mla.qk_nope_head_dim + mla.v_head_dim)
    return Moved(matrices=step.layers * up, cache=cache, rows=rows + made)


def _head(step: Step) -> Moved:
    config = step.config
    share = -(-config.vocab_size // step.plan.mesh.tp)
    tokens = step.rows if step.logits else step.lanes
    return Moved(tables=share * config.hidden_size, rows=tokens * (config.hidden_size + 2 * share))


def _experts(step: Step, moe: MoEConfig, routed: Routed) -> dict[str, Moved]:
    hidden, layers, rows = step.config.hidden_size, step.moe_layers, step.moe_rows
    shared, width = (step.width_share("moe", size) for size in (moe.shared_intermediate_size, moe.intermediate_size))
    of_all = rows * (hidden + moe.num_experts) + (rows * (2 * hidden + 3 * shared) if shared else 0)
    # Fused, a token's row is read once and its sum written once; unfused, each choice has a row of its own.
    fused = 2 * hidden * min(routed.tokens, routed.rows)
    unfused = routed.rows * (4 * hidden + 6 * width)
    return {
        "moe": Moved(
            matrices=layers * 3 * hidden * shared,
            tables=layers * hidden * moe.num_experts,
            rows=layers * of_all,
            inputs=layers * rows * (hidden + shared) if shared else 0,
        ),
        "experts": Moved(
            matrices=layers * routed.touched * 3 * hidden * width,
            rows=layers * fused,
            copies=layers * unfused,
            inputs=layers * routed.rows * (hidden + width),
        ),
    }
