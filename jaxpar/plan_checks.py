"""What no plan can have: a value that its field cannot be, or values that cannot be together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jaxpar.errors import PlanError
from jaxpar.layout import LAYOUTS
from jaxpar.links import Links
from jaxpar.mesh import MeshSpec, parse_experts_over
from jaxpar.tables import counted
from jaxpar.values import real_number, shown, whole_number

if TYPE_CHECKING:
    from jaxpar.plan import Plan

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of weights, activations and cache, with the bytes of a value."""
KV_SPLITS = ("replicate", "head_dim")
STAGES = ("even", "balanced")
"""What `stages` may be besides the layers of each stage."""
# Fields that are whole numbers, and the least that each may be.
_NUMBERS = {
    "cp_interleave": 1,
    "devices_per_node": 0,
    "expert_slots": 0,
    "rebalance_every": 0,
    "ulysses_degree": 0,
    "decode_overlap": 1,
    "single_batch_overlap": 1,
    "chunk": 1,
    "chunk_parity": 0,
    "page_size": 1,
    "max_num_seqs": 1,
    "microbatches": 0,
}


def checked_values(plan: Plan) -> dict[str, Any]:
    """Those fields whose values have another form than they were given in: numbers, axes and stages.

    Raises:
        PlanError: a field cannot be what it is.
    """
    if not isinstance(plan.mesh, MeshSpec):
        raise PlanError(f"mesh={shown(plan.mesh)}: give a MeshSpec, such as MeshSpec(dp=2, tp=4)")
    values: dict[str, Any] = {}
    for name, least in _NUMBERS.items():
        given = getattr(plan, name)
        value = whole_number(given)
        if value is None or value < least:
            raise PlanError(f"{name}={shown(given)}: it must be a whole number of at least {least}")
        values[name] = value
    if not isinstance(plan.layout, str) or plan.layout not in LAYOUTS:
        raise PlanError(f"layout={shown(plan.layout)} is not a layout: use one of {', '.join(LAYOUTS)}")
    if not isinstance(plan.kv_split, str) or plan.kv_split not in KV_SPLITS:
        raise PlanError(f"kv_split={shown(plan.kv_split)} is unknown: use {' or '.join(KV_SPLITS)}")
    for name in ("moe_dispatch", "prefill_attention", "decode_attention", "all_reduce"):
        if not isinstance(getattr(plan, name), str):
            default = getattr(type(plan), name)
            raise PlanError(f"{name}={shown(getattr(plan, name))}: give a strategy's name, such as {default!r}")
    for name in ("moe_deduplicate", "two_batch_overlap", "sequence_parallel", "collective_matmul"):
        if not isinstance(getattr(plan, name), bool):
            raise PlanError(f"{name}={shown(getattr(plan, name))}: it must be True or False")
    if not isinstance(plan.links, Links | None):
        raise PlanError(f"links={shown(plan.links)}: give a Links value, or a preset as the mesh, which has one")
    capacity = real_number(plan.moe_capacity)
    if capacity is None or not 0 <= capacity < math.inf:
        raise PlanError(f"moe_capacity={shown(plan.moe_capacity)}: it must be 0 (nothing is dropped) or above")
    if not isinstance(plan.dtype, str) or plan.dtype not in DTYPES:
        raise PlanError(f"dtype={shown(plan.dtype)} is unknown: use one of {', '.join(DTYPES)}")
    return values | {
        "moe_capacity": capacity,
        "experts_over": parse_experts_over(plan.experts_over),
        "stages": _parse_stages(plan.stages, plan.mesh.pp),
    }


def refuse_combinations(plan: Plan) -> None:
    """Refuse fields that cannot be together.

    Raises:
        PlanError: two of them cannot.
    """
    if plan.rebalance_every and not plan.expert_slots:
        raise PlanError(
            f"rebalance_every={plan.rebalance_every} moves experts between slots, and expert_slots=0 leaves them "
            "in order: give expert_slots, or leave this"
        )
    if plan.two_batch_overlap and (plan.mesh.pp > 1 or plan.groups > 1):
        raise PlanError(
            f"two_batch_overlap on pp={plan.mesh.pp} with microbatches={plan.microbatches}: groups of requests are "
            "what overlaps there; leave two_batch_overlap out"
        )
    if plan.expert_slots and plan.mesh.pp > 1:
        raise PlanError(
            f"expert_slots={plan.expert_slots} on pp={plan.mesh.pp}: copies of experts are placed where all layers "
            "are on one stage; leave it out, or use pp=1"
        )
    if plan.ulysses_degree and plan.prefill_attention != "usp":
        raise PlanError(
            f"ulysses_degree={plan.ulysses_degree} is for prefill_attention='usp': choose it, or leave this"
        )
    if plan.cp_interleave > 1 and plan.mesh.cp > 1 and plan.cp_interleave * plan.mesh.cp > plan.chunk:
        raise PlanError(
            f"cp_interleave={plan.cp_interleave} on cp={plan.mesh.cp} leaves ranks without tokens of a chunk of "
            f"{plan.chunk}: use at most {max(1, plan.chunk // plan.mesh.cp)}, or larger chunks"
        )
    if plan.collective_matmul and not plan.sequence_parallel:
        raise PlanError(
            "collective_matmul=True overlaps what sequence parallelism sends, and sequence_parallel=False sends "
            "none of it: give sequence_parallel, or leave this"
        )


def _parse_stages(given: object, pp: int) -> str:
    """Read "17, 17,17,10", or such a list, into canonical text; whether the model has so many layers is seen later."""
    if given in STAGES:
        return str(given)
    pieces = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    layers = [int(one) if isinstance(one, str) and one.strip().isdecimal() else whole_number(one) for one in pieces]
    if not layers or None in layers:
        raise PlanError(
            f'stages={shown(given)}: give "even", "balanced", or the layers of each stage, such as "17,17,17,10"'
        )
    text = ",".join(map(str, layers))
    if len(layers) != pp:
        raise PlanError(
            f"stages={text} has {counted(len(layers), 'number')} for pp={pp}: give the layers of each of "
            f"{counted(pp, 'stage')}, or pp={len(layers)}"
        )
    for stage, count in enumerate(layers):
        if count is None or count < 1:
            raise PlanError(f"stages={text}: stage {stage} has {count} layers; give each at least 1")
    return text
