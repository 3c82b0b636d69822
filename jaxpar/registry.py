"""Every strategy there is. The command line, the oracle tests and the ledger walk this table."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpar.attention import local
from jaxpar.collectives import psum
from jaxpar.errors import PlanError
from jaxpar.plan import Phase, Plan
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


def named(plan: Plan, phase: Phase) -> dict[str, Strategy]:
    """The strategy of each sublayer that `plan` names for a phase, in the order of the forward pass."""
    return {sublayer: find(sublayer, name) for sublayer, name in plan.strategies(phase).items()}


def chosen(step: Step) -> tuple[Strategy, ...]:
    """The strategies that a step runs, in the order of the forward pass; PlanError where one refuses its shapes."""
    picked = tuple(named(step.plan, step.phase).values())
    check(picked, step)
    return picked


def check(strategies: Iterable[Strategy], step: Step) -> None:
    """Raise PlanError, with the reason, if one of `strategies` cannot run the step."""
    for strategy in strategies:
        problem = strategy.check(step)
        if problem is not None:
            raise PlanError(problem)
