"""`jaxpar ledger`: what a plan costs, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxpar.cli.options import Json, Mesh, Platform
from jaxpar.cli.output import OUT, print_json, progress
from jaxpar.cli.plan_options import takes_plan


@takes_plan
def ledger(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, config.json, GGUF file, or a bundled model's name.")
    ],
    mesh: Mesh = "tp=1",
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    batch: Annotated[int, typer.Option(help="Requests in all.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens of each request: prefilled, or cached when decoding.")] = 1024,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's own.")] = None,
    sampled: Annotated[bool, typer.Option(help="Count drawing by temperature, top-k and top-p.")] = False,
    loads: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Loads of experts, JSON as `jaxpar balance` takes it, in place of even ones."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Where tp exceeds the KV heads: the four answers to it, side by side.")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Ask the compiler for temporaries and collectives.")
    ] = True,
    *,
    plan: dict[str, Any],
    platform: Platform = None,
    json: Json = False,
) -> None:
    """Count what a phase sends, its FLOPs and its memory.

    No weights are needed. Exit status 1 if what is predicted and what is traced differ (--compare predicts alone).
    """
    from jaxpar.assets import model_dir
    from jaxpar.checkpoint import open_checkpoint
    from jaxpar.devices import ensure_devices, make_mesh
    from jaxpar.ledger.compare import compare_answers
    from jaxpar.ledger.render import render
    from jaxpar.ledger.render_compare import render_answers
    from jaxpar.ledger.report import make_ledger
    from jaxpar.ledger.rounds import loads_of
    from jaxpar.ledger.steps import make_steps
    from jaxpar.moe.loads import read_loads
    from jaxpar.presets import resolve_mesh
    from jaxpar.registry import chosen
    from jaxpar.runner import make_plan

    config = open_checkpoint(model_dir(model)).config
    spec, preset = resolve_mesh(mesh)
    fields = plan | {"dtype": dtype or config.dtype}
    planned = make_plan(spec, (preset.plan_fields if preset else {}) | fields)
    counts = loads_of(config, None if loads is None else read_loads(loads))
    if compare:
        answers = compare_answers(config, planned, phase, batch, context, sampled, counts)  # type: ignore[arg-type]
        if json:
            print_json([answer.to_json() for answer in answers])
        else:
            OUT.print(render_answers(answers, config.num_key_value_heads, phase, batch, context, preset))  # type: ignore[arg-type]
        return
    for step in make_steps(config, planned, phase, batch, context):  # type: ignore[arg-type]  # it checks the phase
        chosen(step.batches[0])
    devices = make_mesh(spec, ensure_devices(spec, platform)) if compile_ else None
    with progress(f"{'Compiling' if compile_ else 'Tracing'} for {spec}"):
        counted = make_ledger(config, planned, phase, batch, context, devices, sampled, counts)  # type: ignore[arg-type]
    if json:
        print_json(counted.to_json())
    else:
        OUT.print(render(counted, preset))
    raise typer.Exit(1 if counted.differences else 0)
