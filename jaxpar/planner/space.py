"""Every plan that could run a model on a cluster: meshes of exactly its devices, and the options that change one.

A mesh with dp copies of a smaller one is that many independent replicas, so that meshes of all devices are all there
is. Requests are split over dp and ep alike; of two meshes that differ only in which of the two has the ranks, the one
is kept in which experts are split over all of ep, and dp counts the copies of everything.

    axes       pp x dp x ep x cp x tp = devices
    experts    over ep, with cp and tp or without
    options    each field of the plan that changes what a step sends, computes or holds (`options`)

Whether a plan runs is the registry's word: `problem` asks the plan's own checks and every strategy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import JaxparError
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.registry import STRATEGIES, running

CHUNKS = (512, 1024, 2048, 4096, 8192)
"""Tokens of a prefill step that are tried."""

_COARSE_CHUNK = 2048
_PAGE = 16


def factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of `count` factors, in order; 1 may be among them."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in factors(number // first, count - 1):
                yield (first, *others)


def meshes(config: ModelConfig, devices: int, tokens: int) -> list[MeshSpec]:
    """Meshes of exactly `devices`, of which no axis is larger than there is anything to split.

    pp ends at the layers, tp at the query heads, cp at the `tokens` of a request, ep at the experts; without experts
    ep says nothing that dp does not.
    """
    experts = config.moe.num_experts if config.has_experts and config.moe is not None else 1
    return [
        MeshSpec(pp=pp, dp=dp, ep=ep, cp=cp, tp=tp)
        for pp, dp, ep, cp, tp in factors(devices, 5)
        if pp <= config.num_hidden_layers and tp <= config.num_attention_heads and cp <= tokens and ep <= experts
    ]


def expert_axes(config: ModelConfig, mesh: MeshSpec) -> list[tuple[str, ...]]:
    """Axes over which experts are split on a mesh: ep, with any of cp and tp; no more ranks than experts."""
    if config.moe is None or not config.has_experts:
        return [Plan.experts_over]
    inner = [axis for axis in ("cp", "tp") if mesh.sizes[axis] > 1]
    subsets = chain.from_iterable(combinations(inner, size) for size in range(len(inner) + 1))
    choices = [("ep", *subset) if mesh.ep > 1 or not subset else subset for subset in subsets]
    return [axes for axes in choices if mesh.extent(axes) <= config.moe.num_experts]


def base_plans(
    config: ModelConfig, devices: int, tokens: int, devices_per_node: int, dtype: str, prompt: int
) -> list[Plan]:
    """A plan for every mesh and choice of expert axes, with the default of every option.

    `tokens` is the length of a request, `prompt` those of them that are prefilled.
    """
    chunk = min([size for size in CHUNKS if size >= prompt] or [_COARSE_CHUNK])
    return [
        Plan(
            mesh,
            experts_over=axes,
            devices_per_node=devices_per_node if devices > devices_per_node else 0,
            chunk=max(min(chunk, _COARSE_CHUNK), mesh.cp),
            page_size=_PAGE,
            dtype=dtype,
        )
        for mesh in meshes(config, devices, tokens)
        for axes in expert_axes(config, mesh)
    ]


def sparse(plans: Sequence[Plan], node: int) -> list[Plan]:
    """Those of meshes whose axes grow in steps of four at least, or are a node; experts over ep alone or over all.

    dp takes what is left, so that these reach everywhere that a few steps of `neighbours` do not.
    """

    def large_steps(axis: str) -> set[int]:
        sizes = sorted({plan.mesh.sizes[axis] for plan in plans})
        kept = [sizes[0]]
        for size in sizes:
            if size >= 4 * kept[-1]:
                kept.append(size)
        return {*kept, *({node} & {*sizes})}

    allowed = {axis: large_steps(axis) for axis in ("pp", "ep", "cp", "tp")}

    def ends(plan: Plan) -> bool:
        inner = [axis for axis in ("cp", "tp") if plan.mesh.sizes[axis] > 1]
        over = [axis for axis in inner if axis in plan.experts_over]
        return over in ([], inner)

    return [
        plan for plan in plans if ends(plan) and all(plan.mesh.sizes[axis] in sizes for axis, sizes in allowed.items())
    ]


def neighbours(mesh: MeshSpec) -> list[MeshSpec]:
    """The mesh itself, and those with a prime factor of one axis on another one."""
    found = [mesh]
    for giver, size in mesh.sizes.items():
        for prime in _primes(size):
            for taker in mesh.sizes:
                if taker != giver:
                    moved = {giver: size // prime, taker: mesh.sizes[taker] * prime}
                    found.append(MeshSpec(**(mesh.sizes | moved)))
    return found


def _primes(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0 and all(n % k for k in range(2, n))]


def problem(config: ModelConfig, plan: Plan) -> str | None:
    """Why jaxpar cannot run a plan, or None: the checks of the strategies that its steps would run."""
    try:
        running(config, plan)
    except JaxparError as error:
        return str(error)
    return None


def changed(config: ModelConfig, plan: Plan, fields: dict[str, Any]) -> Plan | None:
    """The plan with other fields, None where that is no plan or nothing runs it."""
    try:
        other = replace(plan, **fields)
    except JaxparError:
        return None
    return None if other == plan or problem(config, other) else other


def options(config: ModelConfig, plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes of the plan's options, one at a time; not all of them are plans that run (`changed` asks).

    Strategies come from the registry, so that one that is added there is tried here. Sums that round more than the
    dtype does are never chosen for anybody.
    """
    mesh = plan.mesh
    yield from ({"chunk": chunk} for chunk in CHUNKS)
    if mesh.tp > 1:
        yield {"sequence_parallel": not plan.sequence_parallel, "collective_matmul": False}
        yield {"sequence_parallel": True, "collective_matmul": True}
    if mesh.tp > config.num_key_value_heads and config.mla is None:
        yield from _each("kv_split", ("replicate", "head_dim"))
    if mesh.tp > 1 or mesh.cp > 1:
        yield from _each("all_reduce", _names("all_reduce"))
    if mesh.cp > 1:
        yield from _each("prefill_attention", ("auto", *_over_cp("prefill_attention")))
        yield from _each("decode_attention", ("auto", *_over_cp("decode_attention")))
        yield from _each("layout", ("striped", "zigzag"))
        yield from _each("decode_overlap", (1, 2))
    if mesh.pp > 1:
        yield from _each("stages", ("even", "balanced"))
        yield from _each("microbatches", (0, 2 * mesh.pp))
    else:
        yield from _each("two_batch_overlap", (False, True))
    if config.moe is not None and config.has_experts and plan.experts:
        yield from _each("moe_dispatch", ("auto", *_names("moe_dispatch")))
        for name in _names("moe_dispatch"):
            yield {"moe_dispatch": name, "moe_deduplicate": True}
        yield from ({"moe_dispatch": "all_to_all", "single_batch_overlap": blocks} for blocks in (1, 2, 4))
        if mesh.pp == 1:
            yield from _each("expert_slots", _slots(config.moe.num_experts, mesh.extent(plan.experts_over)))


def _slots(experts: int, ranks: int) -> list[int]:
    """None for copies, one more a rank than experts take, and a quarter more."""
    each = -(-experts // ranks)
    return [0, *sorted({ranks * (each + 1), ranks * (each + max(1, each // 4))})]


def _each(field: str, values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    return ({field: value} for value in values)


def _names(sublayer: str) -> Sequence[str]:
    """Strategies of a sublayer that split something; those for bit-equal results cost more and save nothing."""
    return [
        strategy.name
        for strategy in STRATEGIES
        if strategy.sublayer == sublayer and strategy.axes and strategy.name != "fixed_order" and not strategy.lossy
    ]


def _over_cp(sublayer: str) -> Sequence[str]:
    return [strategy.name for strategy in STRATEGIES if strategy.sublayer == sublayer and strategy.axes == ("cp",)]
