"""Every strategy there is. The command line, the oracle tests and the ledger walk this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxpar.attention import local
from jaxpar.attention.decode import a2a, ag_rs, helix, q_replicated
from jaxpar.attention.prefill import all_gather, auto, ring, ring_q, ulysses, usp
from jaxpar.collectives import psum
from jaxpar.errors import PlanError
from jaxpar.strategies import Step, Strategy
from jaxpar.train import gradients, loss
from jaxpar.vocabulary import embedding, head, sampling

STRATEGIES: tuple[Strategy, ...] = (
    embedding.STRATEGY,
    local.PREFILL,
    ring.STRATEGY,
    ring_q.STRATEGY,
    all_gather.STRATEGY,
    ulysses.STRATEGY,
    usp.STRATEGY,
    local.DECODE,
    ag_rs.STRATEGY,
    a2a.STRATEGY,
    q_replicated.STRATEGY,
    helix.STRATEGY,
    psum.STRATEGY,
    head.STRATEGY,
    sampling.STRATEGY,
    loss.STRATEGY,
    gradients.STRATEGY,
)

AUTO: dict[str, Callable[[Step], str]] = {
    "prefill_attention": auto.resolve,
    "decode_attention": lambda step: q_replicated.STRATEGY.name,
}
"""For each sublayer that `auto` may choose for: which strategy runs a step."""


def find(sublayer: str, name: str) -> Strategy:
    """The strategy called `name` for `sublayer`; PlanError names those that exist."""
    names = {strategy.name: strategy for strategy in STRATEGIES if strategy.sublayer == sublayer}
    if name not in names:
        known = sorted([*names, *(["auto"] if sublayer in AUTO else [])])
        raise PlanError(f"{sublayer}={name!r} is not a strategy: use {', '.join(known)}")
    return names[name]


def chosen(step: Step) -> dict[str, Strategy]:
    """The strategy that runs each sublayer of a step, in the order of the forward pass.

    Without cp every attention is `local`. PlanError where a strategy refuses the step's shapes.
    """
    picked = {}
    for sublayer, name in step.plan.strategies(step.phase).items():
        if not (name == "auto" and sublayer in AUTO):
            picked[sublayer] = find(sublayer, name)
        if sublayer in AUTO and step.plan.mesh.cp == 1:
            picked[sublayer] = find(sublayer, "local")
        elif name == "auto" and sublayer in AUTO:
            picked[sublayer] = find(sublayer, AUTO[sublayer](step))
    check(picked.values(), step)
    return picked


def check(strategies: Iterable[Strategy], step: Step) -> None:
    """Raise PlanError, with the reason, if one of `strategies` cannot run the step."""
    for strategy in strategies:
        problem = strategy.check(step)
        if problem is not None:
            raise PlanError(problem)
