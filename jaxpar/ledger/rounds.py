"""How often the loops of a dispatch run: the one thing that a step's bytes depend on beside its shapes.

A loop that runs until nothing is left is counted per iteration, in the closed forms as in the jaxpr. How many there are
follows from how uneven the routing is: from loads of the experts that are given, or else are even.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.ledger.flops import without_iterations
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.loads import check_loads
from jaxpar.moe.placement import place_experts
from jaxpar.registry import chosen
from jaxpar.strategies import Step
from jaxpar.tables import counted

Rounds = Mapping[str, Sequence[int]]
"""Iterations of each loop in every MoE layer, by what the loop is called."""


def loads_of(config: ModelConfig, loads: ArrayLike | None) -> np.ndarray | None:
    """Loads [MoE layers, experts] of a model; None where it has no experts.

    Args:
        config: the model.
        loads: as `check_loads` takes them, of its layers with experts; None: even.

    Raises:
        PlanError: loads of another model, or that are none.
    """
    if config.moe is None:
        if loads is not None:
            raise PlanError(f"loads are of experts, and this {config.model_type} has none: leave them out")
        return None
    shape = sum(config.moe.layers), config.moe.num_experts
    if loads is None:
        return np.ones(shape)
    given = check_loads(loads)
    if given.shape != shape:
        raise PlanError(
            f"loads are of {counted(given.shape[0], 'layer')} and {counted(given.shape[1], 'expert')}, and the model "
            f"has {counted(shape[0], 'layer')} with {counted(shape[1], 'expert')}: give a list for each of these layers"
        )
    return given


def count_rounds(step: Step, loads: np.ndarray | None) -> Rounds:
    """The iterations that loads [MoE layers, experts] need; of two half batches each needs as many."""
    step = step.batches[0]
    dispatch = chosen(step).get("moe_dispatch")
    if dispatch is None or dispatch.rounds is None or loads is None:
        return {}
    layers = [dispatch.rounds(step, shares) for shares in _shares(step, loads)]
    return {symbol: [layer[symbol] for layer in layers] for symbol in layers[0]}


def all_rounds(row: Traffic, rounds: Rounds) -> Traffic:
    """A row per iteration -> that of all iterations of all layers, of which each has an equal part; `per` stays."""
    if not row.per:
        return row
    factor = _iterations(row.per, rounds)
    return replace(row, calls=int(row.calls * factor), sent_bytes=int(row.sent_bytes * factor))


def all_flops(flops: Mapping[str, int], rounds: Rounds) -> dict[str, int]:
    """FLOPs by name, per iteration -> by sublayer, of all iterations of all layers."""
    total: Counter[str] = Counter()
    for name, count in flops.items():
        sublayer, per = without_iterations(name)
        known = set(per.split("*")) <= rounds.keys()
        total[sublayer if known else name] += int(count * _iterations(per, rounds))
    return dict(total)


def in_words(per: str, rounds: Rounds) -> str:
    """What follows the name of what is counted in loops: " x 2 rounds", or " per iterations" if nobody knows them."""
    loops = per.split("*") if per else []
    return "".join(f" x {_span(loop, rounds[loop])}" if loop in rounds else f" per {loop}" for loop in loops)


def _span(symbol: str, iterations: Sequence[int]) -> str:
    least, most, noun = min(iterations), max(iterations), symbol.replace("_", " ").removesuffix("s")
    return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"


def _iterations(per: str, rounds: Rounds) -> Fraction:
    """The mean over layers of the iterations of loops in loops."""
    loops = [rounds[symbol] for symbol in per.split("*") if symbol in rounds]
    layers = [math.prod(layer) for layer in zip(*loops, strict=True)]
    return Fraction(sum(layers), len(layers)) if layers else Fraction(1)


def _shares(step: Step, loads: np.ndarray) -> np.ndarray:
    """The part of each layer's load that each rank has [layers, P]; even where a layer has none.

    Experts lie in order, or where the plan has slots for copies as `place` puts them for these loads.
    """
    layers, experts = loads.shape
    ranks, slots = step.ranks(step.plan.experts), step.slots_per_rank
    loads = np.where(loads.sum(axis=1, keepdims=True) > 0, loads, 1.0)
    if step.plan.expert_slots:
        assert step.config.moe is not None
        held = place_experts(step.config.moe, step.plan, loads).device_loads
    else:
        held = np.pad(loads, ((0, 0), (0, ranks * slots - experts))).reshape(layers, ranks, slots).sum(axis=2)
    shares: np.ndarray = held / held.sum(axis=1, keepdims=True)
    return shares
