"""Every way to run a model on so many devices: a plan for each, or why there is none. Nothing is loaded.

    "tp", "dp", "cp x tp", ...          a shape of the mesh, or an option of the plan that no strategy has
    prefill_attention=ring, ...         each strategy of the registry that a field of the plan chooses

Of the meshes and options that could show a strategy the first one is taken that the model can run, so that a strategy
which is added to the registry comes by itself. Those without axes (`local`) run wherever nothing is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jaxpar import registry
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.devices import abstract_mesh
from jaxpar.errors import PlanError
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.runner import make_plan
from jaxpar.strategies import Strategy
from jaxpar.tables import counted

Axes = tuple[str, ...]

WHOLE = "model"
"""In place of a sublayer: a way to run all of them."""


@dataclass(frozen=True)
class Way:
    """One way to run a model: its plan, or the `problem` for which there is none."""

    sublayer: str
    strategy: str
    plan: Plan | None
    problem: str = ""

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return self.strategy if self.sublayer == WHOLE else f"{self.sublayer}={self.strategy}"


def every_way(config: ModelConfig, devices: int, fields: Mapping[str, Any]) -> list[Way]:
    """All ways to run a model, those that differ most first.

    Args:
        config: the model; one without experts has no ways of experts.
        devices: how many, all of which each plan uses.
        fields: of the plan, kept where a way does not need another value.

    Raises:
        PlanError: fewer than two devices, which leave nothing to split, or fields that no plan can have.
    """
    if devices < 2:
        raise PlanError(f"devices={devices}: a model is split over 2 at least; give 2 or more")
    Programs(config, make_plan(MeshSpec(), fields), abstract_mesh(MeshSpec()))
    ways = [
        _first(config, devices, (WHOLE, name), axes, [{**fields, **options}])
        for name, axes, options in _of_the_whole(config, devices)
    ]
    by_sublayer: dict[str, list[Strategy]] = {}
    for strategy in registry.STRATEGIES:
        if strategy.axes and strategy.sublayer in Plan.__dataclass_fields__:
            by_sublayer.setdefault(strategy.sublayer, []).append(strategy)
    if not config.has_experts:
        by_sublayer.pop("moe_dispatch", None)
    # The first of each sublayer, then the second of each.
    turns = (strategy for turn in zip_longest(*by_sublayer.values()) for strategy in turn if strategy is not None)
    return [*ways, *(_of_strategy(config, devices, fields, strategy) for strategy in turns)]


def _of_the_whole(config: ModelConfig, devices: int) -> Iterator[tuple[str, list[Axes], dict[str, Any]]]:
    """What is no strategy of a sublayer: its name, axes of meshes in order of preference, fields of the plan."""
    # A multiple of the devices, so that any of them have as many.
    slots = devices * (-(-config.moe.num_experts // devices) + 1) if config.moe else 0
    ways: list[tuple[str, list[Axes], dict[str, Any]]] = [
        ("tp", [("tp",)], {}),
        ("dp", [("dp",)], {}),
        ("cp x tp", [("tp", "cp")], {}),
        ("experts over ep", [("ep", "tp"), ("ep",)], {"experts_over": ("ep",)}),
        ("pp", [("pp",), ("pp", "dp")], {}),
        ("dp x tp", [("tp", "dp")], {}),
        ("pp x tp", [("tp", "pp")], {}),
        (
            "experts over all axes",
            [("tp", "cp", "dp"), ("tp", "dp"), ("tp",)],
            {"experts_over": ("dp", "ep", "cp", "tp")},
        ),
        ("sequence_parallel", [("tp", "dp"), ("tp",)], {"sequence_parallel": True}),
        ("collective_matmul", [("tp", "dp"), ("tp",)], {"sequence_parallel": True, "collective_matmul": True}),
        ("two_batch_overlap", [("tp", "dp"), ("tp",)], {"two_batch_overlap": True}),
        ("expert_slots", [("ep", "tp"), ("ep",)], {"experts_over": ("ep",), "expert_slots": slots}),
    ]
    yield from (way for way in ways if config.has_experts or "experts_over" not in way[2])


def _of_strategy(config: ModelConfig, devices: int, fields: Mapping[str, Any], strategy: Strategy) -> Way:
    """The first plan that runs a strategy over all of its axes, or over as many as the devices and the model allow."""
    own = strategy.axes
    chosen: dict[str, Any] = {**fields, strategy.sublayer: strategy.name}
    if strategy.sublayer == "moe_dispatch":
        own = chosen.setdefault("experts_over", ("dp", "ep"))
    inner_first = tuple(reversed(own))
    axes: list[Axes] = [inner_first] if len(own) > 1 or own == ("tp",) else [(*own, "tp")]
    axes += [(axis,) for axis in inner_first] + [(axis, "dp") for axis in inner_first if axis != "dp"]
    # Some need nodes, two of them at least; and KV heads split inside choose their attention themselves.
    nodes = {"devices_per_node": devices // _least_factor(devices)}
    options = [chosen, chosen | nodes, {**fields, "kv_split": "head_dim"}]
    return _first(config, devices, (strategy.sublayer, strategy.name), axes, options, strategy)


def _first(
    config: ModelConfig,
    devices: int,
    name: tuple[str, str],
    axes: Sequence[Axes],
    options: Iterable[Mapping[str, Any]],
    strategy: Strategy | None = None,
) -> Way:
    """The first plan that the model can run, and that runs `strategy`; or the first reason for which one cannot."""
    meshes = [mesh for some in dict.fromkeys(axes) for mesh in _meshes(some, devices)]
    if not meshes:
        over = " and ".join(sorted(axes[0]))
        return Way(*name, None, f"{counted(devices, 'device')} cannot be split over {over}: their number is a prime")
    problems = []
    for fields in options:
        for mesh in meshes:
            try:
                plan = make_plan(mesh, fields)
                steps = registry.running(config, plan).values()
                if strategy is None or any(strategy is step.get(strategy.sublayer) for step in steps):
                    return Way(*name, plan)
            except PlanError as error:
                problems.append(str(error))
    return Way(*name, None, (problems or [f"no mesh of {devices} devices runs it with this model"])[0])


def _meshes(axes: Axes, devices: int) -> list[MeshSpec]:
    """The meshes with more than one rank on each of `axes` and on no other, the first axis as large as can be first."""
    return [MeshSpec(**dict(zip(axes, sizes, strict=True))) for sizes in _factors(devices, len(axes))]


def _factors(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of `count` factors above 1, those with the largest first."""
    if count == 1:
        return [(number,)] if number > 1 else []
    return [
        (factor, *others)
        for factor in range(number // 2, 1, -1)
        if number % factor == 0
        for others in _factors(number // factor, count - 1)
    ]


def _least_factor(number: int) -> int:
    return next(factor for factor in range(2, number + 1) if number % factor == 0)
