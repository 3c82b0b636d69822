"""The plans that tests walk: one for every registered value of every choice, so that a new one is tested at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.registry import STRATEGIES

_FIELDS = {field.name for field in fields(Plan)}
_BY_FIELD = {
    f"{strategy.sublayer}={strategy.name}": {strategy.sublayer: strategy.name}
    for strategy in STRATEGIES
    if strategy.sublayer in _FIELDS and strategy.name not in ("local", "head_dim")
}
CHOICES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    **_BY_FIELD,
    "all_reduce=two_level": {"all_reduce": "two_level", "devices_per_node": 2},
    "sequence_parallel,ring": {"sequence_parallel": True, "all_reduce": "ring"},
    "sequence_parallel,int8": {"sequence_parallel": True, "all_reduce": "int8"},
    "usp=2": {"prefill_attention": "usp", "ulysses_degree": 2},
    "overlap=2": {"decode_attention": "a2a", "decode_overlap": 2},
    "helix,overlap=3": {"decode_attention": "helix", "decode_overlap": 3},
    "sequence_parallel": {"sequence_parallel": True},
    "sequence_parallel,helix": {"sequence_parallel": True, "decode_attention": "helix"},
    "collective_matmul": {"sequence_parallel": True, "collective_matmul": True},
    "fixed_order,sequence_parallel": {"all_reduce": "fixed_order", "sequence_parallel": True},
    "two_batches": {"two_batch_overlap": True},
    "head_dim": {"kv_split": "head_dim"},
}
"""Keyword arguments of plans, by the name that tests show."""


def phases_of(choice: str, mesh: str) -> tuple[Phase, ...]:
    """The phases in which a choice makes a program on `mesh` that the default does not; all of them for the default."""
    sizes, chosen = MeshSpec.parse(mesh), CHOICES[choice]
    if not chosen:
        return PHASES
    if "two_batch_overlap" in chosen:
        # Steps are cut in two in the same way everywhere: a few meshes of several axes show it.
        return PHASES if min(sizes.dp, sizes.tp) > 1 else ()
    if chosen.get("all_reduce") == "fixed_order":
        # It changes every product in the same way everywhere.
        return PHASES if sizes.dp == 2 and sizes.tp <= 4 and sizes.pp == 1 else ()
    if chosen.get("all_reduce", "psum") != "psum":
        # Of every way to add up one step that fills up its parts, and one over two axes where its groups are nodes.
        if mesh == "dp=2,cp=2,tp=2":
            return ("decode",)
        has_nodes = sizes.tp % chosen.get("devices_per_node", 1) == 0
        return ("prefill",) if sizes.cp == 1 and sizes.tp in (3, 4) and has_nodes else ()
    if chosen.get("collective_matmul"):
        return ("prefill",)
    if chosen.get("sequence_parallel") and (len(chosen) == 1 or sizes.cp > 1):
        return PHASES
    if "kv_split" in chosen:
        # The walked models have 3 KV heads, and 8 or 10 dimensions of each.
        return PHASES if sizes.tp == 6 else ()
    of_cp = [phase for phase in PHASES if sizes.cp > 1 and f"{phase}_attention" in chosen]
    if chosen.get("ulysses_degree", 1) > 1 and sizes.cp % chosen["ulysses_degree"]:
        return ()
    return tuple(of_cp)


def every_program(*meshes: str) -> list[tuple[str, str, Phase]]:
    """(mesh, choice, phase) of every program worth a test of its own."""
    return [(mesh, choice, phase) for mesh in meshes for choice in CHOICES for phase in phases_of(choice, mesh)]
