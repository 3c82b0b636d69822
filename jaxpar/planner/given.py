"""A plan as somebody writes it to have it explained: "dp=4,tp=8 chunk=2048 sequence_parallel=true"."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from jaxpar.errors import PlanError
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.evaluate import Question
from jaxpar.runner import make_plan
from jaxpar.values import shown


def read_plan(text: str, question: Question) -> Plan:
    """The plan of a mesh and options, each `field=value` after a space.

    Raises:
        MeshError, PlanError: no mesh, a field or value that no plan has, or more devices than the cluster's.
    """
    if not text.strip():
        raise PlanError('the plan is empty: write a number of the table, or "dp=4,tp=8 chunk=2048"')
    mesh, settings = MeshSpec(), {}
    known: dict[str, Any] = {field.name: field.default for field in fields(Plan)}
    for piece in text.split():
        name, equals, value = piece.partition("=")
        if name in AXES:
            mesh = MeshSpec.parse(piece)
        elif equals and name in known:
            settings[name] = _read(name, value, known[name])
        else:
            raise PlanError(
                f"plan {shown(text)}: {shown(piece)} is neither a mesh nor field=value of a plan; write a number "
                'of the table, or "dp=4,tp=8 chunk=2048"'
            )
    cluster = question.cluster
    if mesh.size > cluster.devices:
        raise PlanError(f"mesh {mesh} has {mesh.size} devices and {cluster.name} has {cluster.devices}: use fewer")
    node = cluster.devices_per_node if mesh.size > cluster.devices_per_node else 0
    return make_plan(mesh, {"devices_per_node": node, "dtype": question.config.dtype} | settings)


def _read(name: str, value: str, default: object) -> object:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise PlanError(f"{name}={shown(value)}: it must be true or false")
        return value.lower() == "true"
    try:
        return int(value) if isinstance(default, int) else float(value) if isinstance(default, float) else value
    except ValueError as error:
        raise PlanError(f"{name}={shown(value)}: it must be a number") from error
