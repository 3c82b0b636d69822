"""`jaxpar pipeline`: which stage works on what in which tick, what is idle, and what the chunks of a prompt cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpar.cli.options import Json
from jaxpar.cli.output import OUT, human_bytes, print_json
from jaxpar.errors import PlanError
from jaxpar.tables import counted

if TYPE_CHECKING:
    from jaxpar.checkpoint.config import ModelConfig
    from jaxpar.pipeline.prompt import Chunked
    from jaxpar.pipeline.timetable import Timetable
    from jaxpar.plan import Plan

# What is counted and printed within seconds.
_MOST_STAGES, _MOST_ITEMS, _MOST = 256, 4096, 1 << 24
_CONTEXT, _ROUNDS = 4096, 4


def pipeline(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Count its stages and chunks; a config.json is enough.")
    ] = None,
    pp: Annotated[int, typer.Option(help="Stages that the layers are split over.")] = 4,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    microbatches: Annotated[int | None, typer.Option(help="Items of prefill; those of a MODEL are its chunks.")] = None,
    groups: Annotated[int | None, typer.Option(help="Groups of requests in decode; default: one a stage.")] = None,
    rounds: Annotated[int | None, typer.Option(help=f"Tokens of each group in decode; default: {_ROUNDS}.")] = None,
    context: Annotated[
        int | None, typer.Option(help=f"Tokens of the prompt; default: {_CONTEXT}, or as many as the MODEL takes.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens of a chunk, of unequal ones in the mean; default: 512.")
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="Layers of each stage: even, balanced, or 17,17,17,10; default: even.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Prompts side by side (default: 1), or requests of all groups (default: one each)."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of what stages send one another; default: the model's own.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timetable.")] = None,
    json: Json = False,
) -> None:
    """Print a pipeline's timetable and its bubble.

    Of a MODEL also its stages, what each chunk of a prompt costs, what unequal chunks save, and what stages send.
    No device and no weights are needed.
    """
    from jaxpar.pipeline.render import bubble, timetable_json, timetable_table
    from jaxpar.pipeline.timetable import decode_timetable, prefill_timetable
    from jaxpar.plan import PHASES

    if phase not in PHASES:
        raise PlanError(f"phase={phase!r} is unknown: use {' or '.join(PHASES)}")
    of_prefill = {"--microbatches": microbatches, "--context": context, "--chunk": chunk}
    of_decode = {"--groups": groups, "--rounds": rounds}
    if phase == "prefill":
        _refuse(of_decode, "is for --phase decode")
    else:
        _refuse(of_prefill, "is for --phase prefill")
    of_model = {"--context": context, "--chunk": chunk, "--stages": stages, "--batch": batch, "--dtype": dtype}
    if model is None:
        _refuse(of_model, "is for a MODEL, such as llama-3-70b")
    else:
        _refuse({"--microbatches": microbatches}, "is not for a MODEL, whose items are the chunks of --context")
    bounds: list[tuple[str, int | None, int]] = [("--pp", pp, _MOST_STAGES)]
    bounds += [(name, value, _MOST_ITEMS) for name, value in ({"--microbatches": microbatches} | of_decode).items()]
    bounds += [("--context", context, _MOST), ("--chunk", chunk, _MOST), ("--batch", batch, _MOST)]
    for option, value, most in bounds:
        if value is not None and not 1 <= value <= most:
            raise PlanError(f"{option} {value}: it must be from 1 to {most}")

    found = None if model is None else _OfModel(model, phase, pp, context, chunk, stages, batch, dtype, groups)
    if phase == "decode":
        in_turn = found.groups if found is not None else groups or pp
        timetable = decode_timetable(in_turn, rounds or _ROUNDS, pp)
        what = f"{counted(rounds or _ROUNDS, 'token')} of each of {counted(in_turn, 'group')}"
    elif found is not None:
        timetable = found.ways["equal"].timetable
        what = f"{counted(found.length, 'token')} in {counted(timetable.items, 'chunk')}"
    elif microbatches is not None:
        timetable = prefill_timetable(microbatches, pp)
        what = counted(microbatches, "item")
    else:
        raise PlanError("prefill has no item: give --microbatches, or a MODEL whose prompt is cut into chunks")
    head = f"{phase}{f' of {model}' if model else ''}: {what} through {counted(pp, 'stage')}"
    head += f" in {counted(timetable.ticks, 'tick')}"
    if png is not None:
        _draw(png, head, timetable, found.ways if found else {})
    if json:
        document = {"model": model, "phase": phase, "pp": pp} | timetable_json(timetable)
        print_json(document | (found.document() if found else {}) | ({"png": str(png)} if png else {}))
        return
    OUT.print(f"{head}\n", markup=False)
    OUT.print(timetable_table(timetable))
    OUT.print(f"\n{bubble(timetable, found.requests if found is not None else None)}", markup=False)
    if found is not None:
        found.show()
    if png is not None:
        OUT.print(f"\n{png} shows it", markup=False)


class _OfModel:
    """What only a model says: its stages, chunks and bytes."""

    config: ModelConfig
    plan: Plan

    def __init__(
        self,
        model: str,
        phase: str,
        pp: int,
        context: int | None,
        chunk: int | None,
        stages: str | None,
        batch: int | None,
        dtype: str | None,
        groups: int | None,
    ) -> None:
        from jaxpar.assets import model_dir
        from jaxpar.checkpoint import open_checkpoint
        from jaxpar.engine.sizes import groups_in, lanes_of, local_tokens, prefill_chunks
        from jaxpar.mesh import MeshSpec
        from jaxpar.pipeline.costs import boundary_bytes, by_stage, head_flops, weight_flops
        from jaxpar.pipeline.prompt import three_ways
        from jaxpar.pipeline.stages import layers_of_stages
        from jaxpar.plan import Plan

        config = open_checkpoint(model_dir(model)).config
        # The chunks of one group follow one another in prefill, and all groups in decode.
        plan = Plan(
            MeshSpec(pp=pp),
            stages=stages or "even",
            microbatches=1 if phase == "prefill" else groups or pp,
            chunk=chunk or Plan.chunk,
            dtype=dtype or config.dtype,
        )
        self.layers = layers_of_stages(config, plan)
        self.ways: dict[str, Chunked] = {}
        if phase == "prefill":
            self.length = context or min(_CONTEXT, config.max_position_embeddings)
            if -(-self.length // plan.chunk) > _MOST_ITEMS:
                raise PlanError(
                    f"--context {self.length} in chunks of {plan.chunk} is more than {_MOST_ITEMS} of them: "
                    f"use --chunk {-(-self.length // _MOST_ITEMS)} or more"
                )
            self.parity, self.ways = three_ways(config, plan, self.length)
            self.work = self.ways["equal"].costs.sum(axis=0)
            requests = batch or 1
            rows = requests * min(plan.chunk, self.length)
            what = f"{counted(rows, 'token')} of a chunk"
            tokens = max(local_tokens(size, plan) for _, size in prefill_chunks(self.length, plan))
        else:
            self.work = by_stage(weight_flops(config), self.layers)
            self.work[-1] += head_flops(config)
            requests, tokens = batch or plan.groups, 1
            self.groups = groups_in(requests, plan)
            rows = -(-requests // self.groups)
            what = f"{counted(rows, 'request')} of a group"
        self.requests = requests
        sent = lanes_of(requests, plan) * tokens
        self.rows_are = what if sent == rows else f"{what}, {sent} rows with padding,"
        self.dtype, self.hidden = plan.dtype, config.hidden_size
        self.useful, self.sent = (boundary_bytes(config, count, plan) for count in (rows, sent))

    def document(self) -> dict[str, Any]:
        from jaxpar.pipeline.render import chunks_json

        document = {
            "layers": [*self.layers],
            "stage_work": (self.work / self.work.mean()).tolist(),
            "boundary_bytes": self.useful,
            "boundary_sent_bytes": self.sent,
            "boundaries": len(self.layers) - 1,
        }
        if not self.ways:
            return document
        return document | {"context": self.length, "chunk_parity": self.parity} | {"ways": chunks_json(self.ways)}

    def show(self) -> None:
        from jaxpar.pipeline.render import chunks_table, saving, schedules_table, stages_table

        OUT.print()
        OUT.print(stages_table(self.layers, self.work))
        if hops := len(self.layers) - 1:
            which = f"Each of {hops} boundaries" if hops > 1 else "The boundary"
            of_use = "" if self.sent == self.useful else f", of which {_in_bytes(self.useful)} are no padding"
            OUT.print(
                f"\n{which} sends {_in_bytes(self.sent)} an item{of_use}: "
                f"{self.rows_are} x {self.hidden} in {self.dtype}",
                markup=False,
            )
        if not self.ways:
            return
        OUT.print("\nChunks, costs in units of the mean equal one\n")
        OUT.print(chunks_table(self.ways))
        OUT.print("\nTime in units of the mean equal chunk on a mean stage\n")
        OUT.print(schedules_table(self.ways))
        if self.parity:
            saves = saving(self.ways["equal"], self.ways["levelled"], "one program") > 0
            but = "" if saves else ", which save nothing here"
            OUT.print(
                f"\nA token's attention costs as much as the rest of its work at {counted(self.parity, 'token')} of "
                f"context: --chunk-parity {self.parity} runs levelled chunks{but}"
            )
        else:
            OUT.print("\nNo layer attends to all of the context: equal chunks cost the same")


def _in_bytes(count: int) -> str:
    return f"{count:,} bytes ({human_bytes(count)})"


def _refuse(options: Mapping[str, object], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise PlanError(f"{option} {value} {why}: leave it out")


def _draw(png: Path, title: str, timetable: Timetable, ways: Mapping[str, Chunked]) -> None:
    import numpy as np

    from jaxpar.pipeline.picture import draw
    from jaxpar.pipeline.timetable import Schedule, lockstep

    if not ways:
        ticks = lockstep(timetable, np.ones((timetable.items, timetable.stages)))
        draw(png, title, {"": ticks}, "tick", timetable.groups)
        return
    unit, panels = ways["equal"].costs.mean(), {}
    for name, way in ways.items():
        # What a stage does beside a chunk's own work in a tick is padding: idle.
        one = Schedule(way.padded.starts / unit, way.costs / unit, way.padded.duration / unit)
        panels[f"{name} chunks in one program: {one.duration:.2f}, {100 * one.idle_share:.2f} % idle"] = one
    draw(png, title, panels, "time, in mean equal chunks on a mean stage")
