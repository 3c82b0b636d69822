"""`jaxpar compile`: a step compiled for accelerators that need not be there."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxpar.cli.options import Json, Mesh
from jaxpar.cli.output import OUT, print_json, progress
from jaxpar.cli.plan_options import takes_plan
from jaxpar.errors import RequestError

TARGETS = "v5p:2x2x2", "h200:1x1x8"
"""What `--all` compiles for unless targets are given."""


@takes_plan
def compile(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model directory, config.json, GGUF file, or a bundled model's name."),
    ] = None,
    mesh: Mesh = "tp=1",
    target: Annotated[
        list[str] | None,
        typer.Option(help="TPU slice in chips (v5p:2x2x4) or GPUs as slices x hosts x devices (h200:1x4x8)."),
    ] = None,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    batch: Annotated[int, typer.Option(help="Requests in all.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens of each request: prefilled, or cached when decoding.")] = 1024,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's own.")] = None,
    sampled: Annotated[bool, typer.Option(help="Draw by temperature, top-k and top-p.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Every registered strategy at a small shape, in place of one model.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --all: the table as Markdown.")] = False,
    *,
    plan: dict[str, Any],
    json: Json = False,
) -> None:
    """Compile a step for accelerators that need not be there.

    Says what a device holds, computes and sends, by the accelerator's real compiler.

    Neither weights nor accelerators are needed, only the compiler: pip install 'jaxpar[tpu]' or 'jaxpar[gpu-compile]'.
    Exit status 1 if the step does not fit, or computes other FLOPs than the ledger says by more than 2 %.
    """
    if all_:
        if model is not None:
            raise RequestError(f"MODEL {model!r} and --all: give one of them; --all has models of its own")
        raise typer.Exit(_every_strategy(target, markdown, json))
    if model is None or not target or len(target) > 1 or markdown:
        raise RequestError("compile needs a MODEL and one --target, such as --target v5p:2x2x4, or --all")
    from jaxpar.aot.targets import Target
    from jaxpar.assets import model_dir
    from jaxpar.checkpoint import open_checkpoint
    from jaxpar.presets import resolve_mesh

    aimed = Target.parse(target[0])
    spec, preset = resolve_mesh(mesh)
    aimed.check(spec)
    config = open_checkpoint(model_dir(model)).config

    # All of the runtime, which takes longer to import than what has been refused until here.
    from jaxpar.aot.compile import compile_step
    from jaxpar.aot.remedy import remedy
    from jaxpar.aot.render import render
    from jaxpar.runner import make_plan

    fields = aimed.plan_fields | (preset.plan_fields if preset else {}) | plan | {"dtype": dtype or config.dtype}
    planned = make_plan(spec, fields)
    with progress(f"Compiling for {spec} on {aimed}"):
        found = compile_step(config, planned, aimed, phase, batch, context, sampled)  # type: ignore[arg-type]
    advice = "" if found.fits else remedy(found, config)
    if json:
        print_json({"model": model} | found.to_json() | {"remedy": advice or None})
    else:
        OUT.print(render(found, advice))
    raise typer.Exit(0 if found.fits and found.agrees else 1)


def _every_strategy(targets: list[str] | None, markdown: bool, json: bool) -> int:
    from jaxpar.aot.every import compile_every, render_every, rows_markdown
    from jaxpar.aot.targets import Target

    aimed = [Target.parse(text) for text in targets or TARGETS]
    with progress("Compiling every strategy") as status:
        rows = compile_every(aimed, status.say)
    if json:
        print_json([row.to_json() for row in rows])
    elif markdown:
        print(rows_markdown(rows, aimed))
    else:
        OUT.print(render_every(rows, aimed))
    return 0 if all(row.proved for row in rows) else 1
