"""What the slowest stage of a pipeline does in a tick: stages have different layers, and the last one the head.

The ledger counts a program that has a layer in every slot. A stage computes its own layers alone, and only the first
looks tokens up, only the last makes logits; what is sent, all of them send.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.pipeline.stages import kinds_of, slots_of
from jaxpar.plan import Plan
from jaxpar.planner.roofline import Part

_EXPERTS = ("moe", "experts")


def slowest_stage(parts: Sequence[Part], config: ModelConfig, plan: Plan) -> list[Part]:
    """The parts of the stage that takes longest, of those that are counted for a layer in every slot."""
    if plan.mesh.pp == 1:
        return [*parts]
    stages = {tuple(shares.items()): shares for shares in _shares(config, plan)}
    return max(
        ([part.scaled(shares.get(part.name, shares["layers"])) for part in parts] for shares in stages.values()),
        key=lambda made: sum(part.seconds for part in made),
    )


def _shares(config: ModelConfig, plan: Plan) -> list[dict[str, float]]:
    """For each stage the part of all slots' work that it has, by part of the step."""
    slots = slots_of(config, plan)
    kinds = kinds_of(config, plan)
    dense, experts = ([kind[i] for kind in kinds if kind[i] is not None] for i in (0, 1))
    found = []
    for stage in range(plan.mesh.pp):
        has = {
            "layers": sum(layers[stage] is not None for layers in slots) / len(slots),
            "embedding": float(stage == 0),
            "head": float(stage == plan.mesh.pp - 1),
            "sampling": 1.0,
            "pipeline": 1.0,
        }
        if dense:
            has["ffn"] = sum(layers[stage] is not None for layers in dense if layers) / len(dense)
        if experts:
            of_stage = sum(layers[stage] is not None for layers in experts if layers) / len(experts)
            has |= dict.fromkeys(_EXPERTS, of_stage)
        found.append(has)
    return found
