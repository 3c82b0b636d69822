"""The steps of the program that a phase takes, without running any: those of `engine/`, in sizes."""

from __future__ import annotations

from dataclasses import replace

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.prefill import prefill_steps
from jaxpar.engine.room import room_of, tokens_of_decode, tokens_of_prefill
from jaxpar.engine.sizes import groups_in, lanes_of
from jaxpar.engine.ticks import Tick, all_ticks, round_of_ticks
from jaxpar.errors import PlanError
from jaxpar.ledger.held import Held
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.strategies import Step


def make_steps(
    config: ModelConfig, plan: Plan, phase: Phase, batch: int, seq: int, sampled: bool = False
) -> list[Step]:
    """The steps of the program that `batch` requests of `seq` tokens take, in order: with stages its ticks.

    Raises:
        PlanError: an unknown phase, numbers below 1, or more tokens than the model's context.
    """
    if phase not in PHASES:
        raise PlanError(f"phase={phase!r} is unknown: use {' or '.join(PHASES)}")
    for name, value in (("batch", batch), ("context", seq)):
        if value < 1:
            raise PlanError(f"{name}={value}: it must be at least 1")
    context = config.max_position_embeddings
    if seq > context:
        raise PlanError(
            f"{seq} tokens of a request are more than the model's {context} positions: ask for {context} or less"
        )
    items, steps = make_items(plan, phase, batch, seq), []
    for tick in round_of_ticks(items, plan) if phase == "decode" else all_ticks(items, plan):
        step = Step(config, plan, phase, tick.lanes, tick.tokens, tick.keys, sampled=sampled)
        steps.append(replace(step, room=room_of(tick.real, step)))
    return steps


def make_items(plan: Plan, phase: Phase, batch: int, seq: int) -> list[Tick]:
    """What enters the first stage: one token of each group of requests, or the chunks of their prompts."""
    held = Held(phase, batch, seq, plan)
    if phase == "decode":
        return [
            Tick(lanes_of(batch, plan), 1, held.keys(seq), tokens_of_decode(batch, group, plan))
            for group in range(groups_in(batch, plan))
        ]
    return [
        Tick(step.lanes, step.tokens, held.keys(min(step.offset + step.size, seq)), tokens_of_prefill(step, plan))
        for step in prefill_steps([seq] * batch, plan)
    ]
