"""Which layers a pipeline stage runs, and in which of its slots.

    7 layers over 3 stages, "even": 3 2 2             a dense layer before layers with experts: D M M M M M M

    slot      0   1   2                               slot      0   1   2
    stage 0   0   1   2                               stage 0   D   M   M
    stage 1   3   4   -                               stage 1   -   M   M        the absent slot goes where no slot
    stage 2   5   6   -      - absent                 stage 2   -   M   M        has to hold both kinds for it

Every stage runs the same program, so all have as many slots as the stage of most layers. A slot in which some stages
have a dense FFN and others experts holds both: stages place their layers so that as few slots as possible do.
"""

from __future__ import annotations

from functools import lru_cache

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.pipeline.balance import balanced_layers, even_layers, layer_work
from jaxpar.plan import Plan
from jaxpar.tables import counted

Layers = tuple[int | None, ...]
"""The layer of each stage in one slot, None where a stage has none there."""

Slots = tuple[Layers, ...]
"""[slot][stage]; in every slot one stage has a layer at least."""


def layers_of_stages(config: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """How many layers each stage of `plan.mesh.pp` runs, by `plan.stages`.

    Raises:
        PlanError: more stages than layers, or layers given that are not as many as the model's.
    """
    layers, stages = config.num_hidden_layers, plan.mesh.pp
    if stages > layers:
        raise PlanError(f"pp={stages} for {counted(layers, 'layer')}: a stage needs one at least; use pp <= {layers}")
    if plan.stages == "even":
        return even_layers(layers, stages)
    if plan.stages == "balanced":
        work = [layer_work(config, layer) for layer in range(layers)]
        hidden = config.hidden_size
        return balanced_layers(work, stages, first=hidden, last=config.vocab_size * hidden)
    given = tuple(map(int, plan.stages.split(",")))
    if sum(given) != layers:
        raise PlanError(
            f"stages={plan.stages} are {counted(sum(given), 'layer')} and the model has {layers}: "
            f"give {counted(stages, 'number')} that add up to {layers}"
        )
    return given


def slots_of(config: ModelConfig, plan: Plan) -> Slots:
    """The layer in each slot of each stage, in order; one stage has a layer in every slot.

    Raises:
        PlanError: those of `layers_of_stages`.
    """
    return aligned(layers_of_stages(config, plan), _with_experts(config))


def kinds_of(config: ModelConfig, plan: Plan) -> tuple[tuple[Layers | None, Layers | None], ...]:
    """`by_kind` of each slot.

    Raises:
        PlanError: those of `layers_of_stages`.
    """
    return _kinds(layers_of_stages(config, plan), _with_experts(config))


def by_kind(config: ModelConfig, layers: Layers) -> tuple[Layers | None, Layers | None]:
    """A slot's layers with a dense FFN, and those with experts; None where there is none of a kind."""
    return _by_kind(_with_experts(config), layers)


def _with_experts(config: ModelConfig) -> tuple[bool, ...]:
    return tuple(config.moe.layers) if config.moe is not None else (False,) * config.num_hidden_layers


@lru_cache(maxsize=64)
def _kinds(counts: tuple[int, ...], kinds: tuple[bool, ...]) -> tuple[tuple[Layers | None, Layers | None], ...]:
    return tuple(_by_kind(kinds, layers) for layers in aligned(counts, kinds))


def _by_kind(kinds: tuple[bool, ...], layers: Layers) -> tuple[Layers | None, Layers | None]:
    def of(experts: bool) -> Layers | None:
        held = tuple(layer if layer is not None and kinds[layer] == experts else None for layer in layers)
        return None if held == (None,) * len(layers) else held

    return of(False), of(True)


def moe_layer_of(config: ModelConfig, plan: Plan) -> list[tuple[int, int]]:
    """For each layer with experts, in order: its stage, and its place among the slots that hold experts."""
    slots = [experts for layers in slots_of(config, plan) if (experts := by_kind(config, layers)[1]) is not None]
    places = {layer: (stage, place) for place, slot in enumerate(slots) for stage, layer in enumerate(slot)}
    return [places[layer] for layer in sorted(layer for layer in places if layer is not None)]


@lru_cache(maxsize=64)
def aligned(counts: tuple[int, ...], kinds: tuple[bool, ...]) -> Slots:
    """Deal layers of these kinds out, so many a stage, with as few slots of both kinds as there can be.

    Slots are as many as the fullest stage has layers. A slot takes layers of one kind or of both; whichever it takes,
    a stage loses nothing by placing its next layer as soon as it is of such a kind. So what a choice leads to is how
    far each stage has come, and of all choices that lead to the same the one with fewest slots of both kinds is kept.
    """
    slots = max(counts)
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    reached: dict[tuple[int, ...], tuple[int, Slots]] = {(0,) * len(counts): (0, ())}
    for slot in range(slots):
        following: dict[tuple[int, ...], tuple[int, Slots]] = {}
        for done, (mixed, placed) in reached.items():
            for takes in ((False, True), (False,), (True,)):
                layers = tuple(
                    first + at if at < count and kinds[first + at] in takes else None
                    for first, at, count in zip(firsts, done, counts, strict=True)
                )
                now = tuple(at + (layer is not None) for at, layer in zip(done, layers, strict=True))
                if any(count - at > slots - slot - 1 for at, count in zip(now, counts, strict=True)):
                    continue
                cost = mixed + (len({kinds[layer] for layer in layers if layer is not None}) > 1)
                if now not in following or cost < following[now][0]:
                    following[now] = cost, (*placed, layers)
        reached = following
    return reached[counts][1]
