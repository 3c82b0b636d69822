"""Every strategy there is. The command line, the oracle tests and the ledger walk this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jaxpar.attention import head_dim, local
from jaxpar.attention.decode import a2a, ag_rs, helix, q_replicated
from jaxpar.attention.prefill import all_gather, auto, ring, ring_q, ulysses, usp
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.collectives import matmul
from jaxpar.collectives.reduction import sublayers_calls
from jaxpar.collectives.reductions import auto as auto_reduction
from jaxpar.collectives.reductions import fixed_order, fp8, int8, one_shot, psum, tree, two_shot
from jaxpar.collectives.reductions import ring as ring_reduction
from jaxpar.collectives.reductions import two_level as two_level_reduction
from jaxpar.errors import PlanError
from jaxpar.moe.dispatch import all_to_all, ragged, standard, two_level
from jaxpar.moe.dispatch import auto as auto_dispatch
from jaxpar.moe.dispatch import local as local_experts
from jaxpar.pipeline import send_recv
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.strategies import Choice, Step, Strategy
from jaxpar.train import balance, gradients, loss
from jaxpar.vocabulary import embedding, head, sampling

STRATEGIES: tuple[Strategy, ...] = (
    embedding.STRATEGY,
    send_recv.STRATEGY,
    local.PREFILL,
    head_dim.PREFILL,
    ring.STRATEGY,
    ring_q.STRATEGY,
    all_gather.STRATEGY,
    ulysses.STRATEGY,
    usp.STRATEGY,
    local.DECODE,
    head_dim.DECODE,
    ag_rs.STRATEGY,
    a2a.STRATEGY,
    q_replicated.STRATEGY,
    helix.STRATEGY,
    local_experts.STRATEGY,
    standard.STRATEGY,
    all_to_all.STRATEGY,
    ragged.STRATEGY,
    two_level.STRATEGY,
    psum.STRATEGY,
    one_shot.STRATEGY,
    two_shot.STRATEGY,
    ring_reduction.STRATEGY,
    tree.STRATEGY,
    two_level_reduction.STRATEGY,
    int8.STRATEGY,
    fp8.STRATEGY,
    fixed_order.STRATEGY,
    matmul.STRATEGY,
    head.STRATEGY,
    sampling.STRATEGY,
    loss.STRATEGY,
    balance.STRATEGY,
    gradients.STRATEGY,
)

AUTO: dict[str, Callable[[Step], Choice]] = {
    "prefill_attention": auto.resolve,
    "decode_attention": lambda step: Choice(q_replicated.STRATEGY.name, "queries are projected whole, not gathered"),
    "moe_dispatch": auto_dispatch.resolve,
    "all_reduce": auto_reduction.resolve,
}
"""For each sublayer that `auto` may choose for: which strategy runs a step, and why."""


def find(sublayer: str, name: str) -> Strategy:
    """The strategy called `name` for `sublayer`; PlanError names those that exist."""
    names = {strategy.name: strategy for strategy in STRATEGIES if strategy.sublayer == sublayer}
    if name not in names:
        known = sorted([*names, *(["auto"] if sublayer in AUTO else [])])
        raise PlanError(f"{sublayer}={name!r} is not a strategy: use {', '.join(known)}")
    return names[name]


def chosen(step: Step) -> dict[str, Strategy]:
    """The strategy that runs each sublayer of a step, in the order of the forward pass.

    Without cp every attention is `local`, or `head_dim` where the plan splits KV heads inside; without ranks to split
    experts over their dispatch is `local`; `auto` takes `psum` where nothing is summed. PlanError where a strategy
    refuses the step's shapes.
    """
    if "chosen" not in step.memo:
        names = {sublayer: name if choice is None else choice.name for sublayer, name, choice in _choices(step)}
        picked = {sublayer: find(sublayer, name) for sublayer, name in names.items()}
        check(picked.values(), step)
        step.memo["chosen"] = picked
    found: dict[str, Strategy] = step.memo["chosen"]
    return found


def running(config: ModelConfig, plan: Plan) -> dict[Phase, dict[str, Strategy]]:
    """The strategies that steps of one token run, by phase and sublayer; no check depends on lengths.

    Raises:
        PlanError: a strategy that does not exist or that refuses the model.
    """
    return {phase: chosen(Step(config, plan, phase, lanes=1, tokens=1, keys=plan.page_size)) for phase in PHASES}


def reasons(step: Step) -> dict[str, Choice]:
    """What `auto` chose for a step, by sublayer."""
    return {sublayer: choice for sublayer, _, choice in _choices(step) if choice is not None}


def _choices(step: Step) -> Iterator[tuple[str, str, Choice | None]]:
    """Each sublayer, the name that the plan has for it, and `auto`'s choice where that is left to it."""
    for sublayer, name in step.plan.strategies(step.phase).items():
        is_auto = name == "auto" and sublayer in AUTO
        if not is_auto:
            find(sublayer, name)
        if (sublayer == "moe_dispatch" and not step.moe_layers) or (sublayer == "pipeline" and not step.plan.pipeline):
            continue
        if sublayer == "all_reduce":
            alone = is_auto and not sublayers_calls(step)
            yield sublayer, "psum" if alone else name, AUTO[sublayer](step) if is_auto and not alone else None
        elif sublayer in AUTO and not (step.plan.experts if sublayer == "moe_dispatch" else step.plan.sequence):
            inside = sublayer != "moe_dispatch" and step.heads.parts > 1
            yield sublayer, head_dim.PREFILL.name if inside else "local", None
        else:
            yield sublayer, name, AUTO[sublayer](step) if is_auto else None


def check(strategies: Iterable[Strategy], step: Step) -> None:
    """Raise PlanError, with the reason, if one of `strategies` cannot run the step."""
    for strategy in strategies:
        problem = strategy.check(step)
        if problem is not None:
            raise PlanError(problem)
