"""`global_batch` balance: the loss that keeps a router from sending all tokens to a few experts.

    loss of a layer = E * sum_e f_e * P_e      f_e: expert e's share of the choices, P_e: its mean score (sums to 1)

It is 1 where experts are chosen evenly and E where one gets everything (Switch Transformer, arXiv:2101.03961). Shares
are those of the tokens of all ranks: a batch may be uneven on each of them, as long as it is even as a whole
(arXiv:2501.11873). No derivative passes through counts, so a rank's part is linear in the scores of its own tokens:

    loads [L, E] of each rank -> sum -> f -> E * f . (scores of own tokens) / all tokens -> sum [L]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.collectives import all_sum, rank_index
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.record import LayerRecord
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def balance_losses(records: list[LayerRecord], choices: int, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """In the local view, from the records of L layers: the loss [L] of each and the loads [L, E], both of all ranks.

    Args:
        records: of a training step's forward pass.
        choices: experts that a token goes to.
        plan: of the step.
    """
    with jax.named_scope("balance:global_batch"):
        loads = jnp.stack([layer.loads for layer in records])
        scores = jnp.stack([layer.scores for layer in records])
        # Ranks of tp that were not dealt tokens of their own hold copies: the first one's count.
        copies = tuple(axis for axis in plan.width if axis not in plan.routed("prefill"))
        if copies:
            is_first = rank_index(copies) == 0
            loads, scores = (jnp.where(is_first, x, jnp.zeros_like(x)) for x in (loads, scores))
        axes = _axes(plan)
        loads = all_sum(loads, axes)
        chosen = loads.sum(axis=1).astype(jnp.float32)
        shares = loads / chosen[:, None]
        mean_scores = scores * (choices / chosen)[:, None]
        return all_sum(loads.shape[1] * (shares * mean_scores).sum(axis=1), axes), loads


def _axes(plan: Plan) -> tuple[str, ...]:
    return (*plan.requests, *plan.width)


def traffic(step: Step) -> list[Traffic]:
    """An all-reduce of loads [L, E] int32 and one of losses [L] float32, forward; backward nothing is sent."""
    moe, axes, scope = step.config.moe, _axes(step.plan), ("balance", "global_batch")
    if moe is None or not axes:
        return []
    sizes = step.moe_layers * moe.num_experts * 4, step.moe_layers * 4
    return [step.sends(scope, "all_reduce", axes, 1, size) for size in sizes]


def check(step: Step) -> str | None:
    """Any experts."""
    return None


STRATEGY = Strategy(
    name="global_batch",
    sublayer="balance",
    axes=("dp", "ep", "tp"),
    collectives=("all_reduce",),
    needs="any experts",
    run=balance_losses,
    traffic=traffic,
    check=check,
)
