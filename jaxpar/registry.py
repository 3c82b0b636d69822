"""Every strategy there is. The command line, the oracle tests and the ledger walk this table."""

from __future__ import annotations

from jaxpar.attention import local
from jaxpar.collectives import psum
from jaxpar.errors import PlanError
from jaxpar.strategies import Step, Strategy
from jaxpar.train import gradients, loss
from jaxpar.vocabulary import embedding, head, sampling

STRATEGIES: tuple[Strategy, ...] = (
    embedding.STRATEGY,
    local.PREFILL,
    local.DECODE,
    psum.STRATEGY,
    head.STRATEGY,
    sampling.STRATEGY,
    loss.STRATEGY,
    gradients.STRATEGY,
)


def find(sublayer: str, name: str) -> Strategy:
    """The strategy called `name` for `sublayer`; PlanError names those that exist."""
    names = {strategy.name: strategy for strategy in STRATEGIES if strategy.sublayer == sublayer}
    if name not in names:
        raise PlanError(f"{sublayer}={name!r} is not a strategy: use {', '.join(sorted(names))}")
    return names[name]


def chosen(step: Step) -> tuple[Strategy, ...]:
    """The strategies that a step runs, in the order of the forward pass; PlanError where one refuses its shapes."""
    plan = step.plan
    attention = plan.prefill_attention if step.phase == "prefill" else plan.decode_attention
    picked = (
        find("embedding", "vocab_parallel"),
        find(f"{step.phase}_attention", attention),
        find("all_reduce", plan.all_reduce),
        find("head", "vocab_parallel"),
        find("sampling", "vocab_parallel"),
    )
    for strategy in picked:
        problem = strategy.check(step)
        if problem is not None:
            raise PlanError(problem)
    return picked
