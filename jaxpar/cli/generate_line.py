"""The inverse of `plan_options`: the `jaxpar generate` line that runs exactly a plan."""

from __future__ import annotations

import shlex
from dataclasses import fields

from jaxpar.cli.plan_options import PLAN_OPTIONS
from jaxpar.errors import PlanError
from jaxpar.plan import Plan

_OWN = ("rebalance_every", "max_num_seqs")
"""Fields of the plan for which `generate` has options of its own."""


def generate_arguments(model: str, plan: Plan, output: int) -> list[str]:
    """The arguments after `jaxpar`, of prompts in a file `prompts.txt` and `output` tokens for each.

    Raises:
        PlanError: the plan has `links`, which only a mesh preset can give.
    """
    if plan.links is not None:
        raise PlanError("links come from a mesh preset and have no option: choose all_reduce by name")
    given = ["generate", model, "--mesh", str(plan.mesh), "--dtype", plan.dtype]
    for field in fields(Plan):
        value = getattr(plan, field.name)
        default = Plan.experts_over if field.name == "experts_over" else field.default
        if field.name not in (*PLAN_OPTIONS, *_OWN) or value == default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            given.append(flag)
        else:
            given += [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return [*given, "--prompt-file", "prompts.txt", "--max-new-tokens", str(output)]


def generate_line(model: str, plan: Plan, output: int) -> str:
    """The whole line, as a shell takes it."""
    return shlex.join(["jaxpar", *generate_arguments(model, plan, output)])
