"""Explicit against automatic for accelerators: compiled for a TPU and a GPU target, neither of which is there.

python -m benchmarks.automatic_targets             compiles what is not in --kept yet
python -m benchmarks.automatic_targets --report    tables of what there is
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from benchmarks.automatic_program import Automatic
from benchmarks.common import RESULTS, Spread, draw_bars, show, write
from benchmarks.compiled_cases import LLAMA, MOE, TARGETS, Case, decode, prefill
from benchmarks.compiled_programs import Kept, Program
from benchmarks.docs_table import DOCS, fill
from benchmarks.target_layers import Jitted, decode_attention, experts, sampling
from jaxpar.aot.sent import Sent, sent_by
from jaxpar.aot.targets import Target
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.ledger.hlo import collectives_of
from jaxpar.ledger.hlo_flops import compiled_flops
from jaxpar.ledger.hlo_text import parse_module
from jaxpar.program import Programs, compiler_options
from jaxpar.tables import human_bytes, markdown

Made = tuple[Jitted, Mesh]
"""A program, and the mesh that its groups are named by."""


@dataclass(frozen=True)
class Contest:
    """Programs of the same work on the model and mesh of `case`; they run `layers` layers."""

    work: str
    case: Case
    layers: int
    programs: dict[str, Callable[[Mesh], Made]]


def _explicit(case: Case, config: ModelConfig) -> Callable[[Mesh], Made]:
    def make(mesh: Mesh) -> Made:
        programs = Programs(config, case.plan, mesh)
        step = replace(case.step, config=config)
        jitted = programs.step(case.phase, sampled=case.sampled)
        return Jitted(jitted, programs.abstract_arguments(step, case.pages)), mesh

    return make


def _automatic(case: Case, config: ModelConfig, **how: Any) -> Callable[[Mesh], Made]:
    def make(mesh: Mesh) -> Made:
        automatic = Automatic(config, case.plan, mesh, **how)
        step = replace(case.step, config=config)
        arguments = automatic.abstract_arguments(step, case.pages)
        return Jitted(automatic.step(case.phase), arguments), automatic.mesh

    return make


def _whole(work: str, case: Case, hows: dict[str, dict[str, Any]], config: ModelConfig | None = None) -> Contest:
    config = config or case.config
    others = {name: _automatic(case, config, **how) for name, how in hows.items()}
    return Contest(work, case, case.layers, {"explicit": _explicit(case, config), **others})


def _alone(
    work: str, case: Case, layer: Callable[..., Jitted], size: tuple[int, ...], kinds: dict[str, str]
) -> Contest:
    def program(kind: str) -> Callable[[Mesh], Made]:
        return lambda mesh: (layer(case.config, case.plan, mesh, *size, kind), mesh)

    return Contest(work, case, 1, {name: program(kind) for name, kind in kinds.items()})


def contests() -> Iterator[Contest]:
    """All of them."""
    dense = replace(decode(LLAMA, "tp=8", 64, 4096), layers=4)
    yield _whole("70B, decode 64", dense, {"automatic": {}})
    yield _whole("70B, prefill 512", replace(prefill(LLAMA, "tp=8"), layers=4), {"automatic": {}})
    few = replace(decode(LLAMA, "tp=8", 64, 4096), layers=2)
    yield _whole(
        "70B with 4 KV heads, decode 64",
        few,
        {
            "automatic, heads cut": {"kv": "size"},
            "automatic, heads copied": {"kv": "copies"},
            "automatic, an axis more": {"kv": "axis"},
        },
        replace(few.config, num_key_value_heads=4),
    )
    pages = replace(decode(LLAMA, "dp=2,tp=4", 32, 4096), layers=2)
    yield _whole(
        "70B, pages over dp, decode 64",
        pages,
        {"automatic, replicas mapped": {}, "automatic, one pool": {"one_pool": True}},
    )
    for name, case in (
        ("decode 64", decode(MOE, "tp=8", 64, 4096, experts_over=("tp",))),
        ("prefill 512", prefill(MOE, "tp=8", experts_over=("tp",))),
    ):
        yield _whole(f"Qwen3-235B, {name}", replace(case, layers=2), {"automatic": {"kv": "axis"}})
    of_experts = {
        "explicit": "explicit",
        "automatic, ragged_dot": "ragged_dot",
        "automatic, capacity 1.25": "capacity",
        "automatic, all experts": "all",
    }
    yield _alone("Qwen3-235B, experts, 512 tokens", decode(MOE, "ep=8"), experts, (512,), of_experts)
    yield _alone("Qwen3-235B, experts, 8192 tokens", prefill(MOE, "ep=8"), experts, (8192,), of_experts)
    drawn = {"explicit": "explicit", "automatic, sort": "sort", "automatic, search": "search"}
    yield _alone("top-p of 64 x 128256 logits", decode(LLAMA, "tp=8"), sampling, (64,), drawn)
    over_cp = {"explicit": "explicit", "automatic": "automatic"}
    yield _alone("70B, attention over cp, decode 8", decode(LLAMA, "cp=8"), decode_attention, (8, 32768), over_cp)


def figures(program: Program, sent: list[Sent], layers: int, flops: int) -> dict[str, Any]:
    """What the table says of one program; bytes are a rank's."""
    exposed = [row for row in sent if row.hidden == "exposed"]
    return {
        "sent_bytes": sum(row.sent_bytes for row in sent),
        "layers": layers,
        "calls": sum(row.calls for row in sent),
        "asynchronous_calls": sum(row.calls for row in sent if row.asynchronous),
        "exposed_calls": sum(row.calls for row in exposed),
        "exposed_bytes": sum(row.sent_bytes for row in exposed),
        "temporary_bytes": program.temporaries,
        "argument_bytes": program.arguments,
        "flops": flops,
        "optimal_seconds": program.seconds,
        "collectives": [row.to_json() for row in sent],
    }


def measure(kept: Kept, target: Target, only_kept: bool) -> Iterator[dict[str, Any]]:
    """A row for each program of each contest; of those that are not kept each is compiled first unless `only_kept`."""
    for contest in contests():
        plan = contest.case.plan
        for name, make in contest.programs.items():
            mesh = target.mesh(plan.mesh)
            label = f"{contest.work}: {name} on {target}"
            if only_kept and not kept.has(label):
                continue
            jitted, named = make(mesh)
            program, took = kept.program(label, partial(_compiled, jitted, compiler_options(target.platform, plan)))
            print(f"{label}: compiled in {took:.0f} s", file=sys.stderr, flush=True)
            module = parse_module(program.text)
            sizes = dict(named.shape)
            sent = sent_by(collectives_of(module, sizes), plan, target.kind)
            flops = sum(compiled_flops(module).values())
            head = {"target": str(target), "work": contest.work, "mesh": str(plan.mesh), "program": name}
            yield head | figures(program, sent, contest.layers, flops)


def _compiled(jitted: Jitted, options: dict[str, str] | None) -> Any:
    return jitted.function.lower(*jitted.arguments).compile(options)


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """Tables, JSON and picture; the page in docs takes what goes to the usual folder."""
    columns = ["work", "mesh", "program", "sent", "a layer", "calls", "exposed", "temporaries", "optimal"]
    tables = []
    for target in dict.fromkeys(row["target"] for row in rows):
        cells = [_row(row) for row in rows if row["target"] == target]
        show(f"Explicit against automatic, compiled for {target}; of one rank", columns, cells, left=3)
        tables.append(f"{target}, of one rank:\n\n{markdown(columns, cells, left=3)}")
    if out == RESULTS:
        fill(DOCS / "accelerators.md", "automatic_targets", "\n\n".join(tables))
    write(out, "automatic_targets", {"rows": rows})
    _draw(rows, out / "automatic_targets.png")


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = row["optimal_seconds"]
    return (
        row["work"],
        row["mesh"],
        row["program"],
        human_bytes(row["sent_bytes"]),
        human_bytes(row["sent_bytes"] // row["layers"]),
        str(row["calls"]),
        str(row["exposed_calls"]),
        human_bytes(row["temporary_bytes"]),
        f"{1e3 * seconds:.2f} ms" if seconds else "-",
    )


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    def sent(work: str, target: str, explicit: bool) -> int:
        found = [r for r in rows if (r["work"], r["target"]) == (work, target)]
        return min(r["sent_bytes"] for r in found if (r["program"] == "explicit") == explicit)

    targets = list(dict.fromkeys(row["target"] for row in rows))
    both = {(row["work"], row["target"], row["program"] == "explicit") for row in rows}
    works = [
        work
        for work in dict.fromkeys(row["work"] for row in rows)
        if all((work, target, side) in both for target in targets for side in (True, False))
    ]
    draw_bars(
        path,
        "Bytes that a rank sends: XLA's best automatic program over the explicit one",
        "automatic / explicit",
        [work.replace(", ", "\n") for work in works],
        {t: [Spread(*[sent(w, t, False) / max(sent(w, t, True), 1)] * 3) for w in works] for t in targets},
        parity=True,
        log=True,
    )


def main() -> None:
    """Compile both ways for each target, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--kept", type=Path, default=Path("out/compiled"), help="folder of what is compiled already")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="such as v5p:2x2x2 h200:1x1x8")
    parser.add_argument("--report", action="store_true", help="compile nothing")
    options = parser.parse_args()
    kept, targets = Kept(options.kept), [Target.parse(text) for text in options.targets]
    report([row for target in targets for row in measure(kept, target, options.report)], options.out)


if __name__ == "__main__":
    main()
