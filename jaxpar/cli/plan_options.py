"""The options that say how a model runs: fields of the plan, the same for every command that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from jaxpar.plan import Plan

_HELP: dict[str, str] = {
    "stages": "Layers of each stage of pp: even, balanced, or 17,17,17,10.",
    "experts_over": "Axes over which experts are split: ep, or dp,tp; default: the preset's, or ep.",
    "moe_dispatch": "auto, standard, all_to_all, ragged or two_level, to experts on other ranks.",
    "moe_deduplicate": "Send a token once to each rank that has experts of it.",
    "moe_capacity": "Drop what exceeds so many times an even share; 0: nothing.",
    "devices_per_node": "Ranks that fast links join; default: the preset's.",
    "expert_slots": "Experts that all ranks have room for; those left over are copies; 0: no copies.",
    "kv_split": "Where tp exceeds the KV heads: replicate stores copies, head_dim splits inside the head.",
    "layout": "How cp splits a prompt: striped, zigzag or contiguous.",
    "cp_interleave": "Positions that follow one another on a rank of cp.",
    "prefill_attention": "auto, ring, ring_q, all_gather, ulysses or usp, over cp.",
    "ulysses_degree": "Of usp: how much of cp is Ulysses; 0: as much as KV heads allow.",
    "decode_attention": "auto, ag_rs, a2a, q_replicated or helix, over cp.",
    "decode_overlap": "Parts in which decode attention takes the requests.",
    "two_batch_overlap": "Run a step as two half batches, layer by layer in turn.",
    "single_batch_overlap": "Blocks in which all_to_all sends back what experts made.",
    "all_reduce": "Sums over ranks: psum, one_shot, two_shot, ring, tree, two_level, int8, fp8, fixed_order or auto.",
    "sequence_parallel": "Split the residual stream over tp along its tokens.",
    "collective_matmul": "With sequence_parallel: prefill products send as they go.",
    "microbatches": "Groups of a replica's requests that follow one another over pp; 0: one a stage.",
    "chunk": "Most tokens of a prompt that one prefill step takes; with --chunk-parity about the most in the mean.",
    "chunk_parity": "Context at which attention costs as much as the rest: levels chunks; 0: equal ones.",
    "page_size": "Tokens of a KV cache page.",
}
"""Help for each field that is an option of all of them; the mesh, the dtype and what has one value so far are none."""

_OF_PRESETS = {"experts_over": str, "devices_per_node": int}
"""Fields that a mesh preset may say, with the type of their options: left out of the plan unless they are given."""


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these fields of the plan as options, which it takes as a dictionary `plan`, where that stands."""
    defaults = {field.name: None if field.name in _OF_PRESETS else field.default for field in fields(Plan)}

    def option(name: str) -> inspect.Parameter:
        default = defaults[name]
        flags = [f"--{name.replace('_', '-')}"] if isinstance(default, bool) else []
        of = _OF_PRESETS[name] | None if name in _OF_PRESETS else type(default)
        kind = Annotated[of, typer.Option(*flags, help=_HELP[name])]  # type: ignore[valid-type]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += [option(name) for name in names] if parameter.name == "plan" else [parameter]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            plan = {name: given.pop(name) for name in names}
            command(**given, plan={name: value for name, value in plan.items() if value is not None})

        ordered = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        with_options.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        return with_options

    return decorate


PLAN_OPTIONS = tuple(_HELP)
"""Fields of the plan that are options."""

takes_plan = takes(*PLAN_OPTIONS)
"""Give a command the options of the whole plan."""
