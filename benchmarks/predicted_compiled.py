"""Predicted against compiled: closed forms held against what the compilers of two targets make of the step programs.

python -m benchmarks.predicted_compiled          compiles what is not in --kept yet, for 20 minutes
python -m benchmarks.predicted_compiled --report tables of what there is
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, show, write
from benchmarks.compiled_cases import CASES, TARGETS, Case
from benchmarks.compiled_passes import Bytes, explain
from benchmarks.compiled_programs import Kept, Program
from benchmarks.compiled_training import BATCH, COLUMNS, LENGTH, TrainingRow, training_rows
from benchmarks.docs_table import DOCS, fill
from jaxpar.aot.every import TRAINING
from jaxpar.aot.targets import Target
from jaxpar.devices import abstract_mesh
from jaxpar.ledger.compiled import compare_compiled
from jaxpar.ledger.hlo import collectives_of
from jaxpar.ledger.hlo_flops import compiled_flops
from jaxpar.ledger.hlo_text import Module, argument_bytes, parse_module
from jaxpar.ledger.predict import local_bytes, predict_flops, predict_traffic
from jaxpar.planner.buffers import buffers_of
from jaxpar.program import Programs
from jaxpar.registry import STRATEGIES, chosen
from jaxpar.tables import human_bytes, markdown

FLOPS_WITHIN, MEMORY_WITHIN = 0.02, 0.1


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds: of weights, of the cache's planes, of a step's other arguments."""

    weights: int
    cache: int
    inputs: int


@dataclass(frozen=True)
class Row:
    """One case on one target."""

    case: Case
    target: str
    sent: Bytes
    predicted_flops: int
    compiled_flops: int
    predicted: Held
    compiled: Held
    temporaries: int
    program: Program
    strategies: dict[str, str]
    took: float

    @property
    def flops_off(self) -> float:
        """By what part compiled FLOPs differ."""
        return self.compiled_flops / self.predicted_flops - 1

    @property
    def predicted_total(self) -> int:
        """Everything that a device holds, as predicted."""
        return self.predicted.weights + self.predicted.cache + self.predicted.inputs + self.temporaries

    @property
    def total_off(self) -> float:
        """By what part the compiled total differs."""
        return self.program.total / self.predicted_total - 1

    @property
    def exact(self) -> bool:
        """Whether weights and cache are those that were predicted, and the cache is written in place."""
        mine, theirs = self.predicted, self.compiled
        return (mine.weights, mine.cache) == (theirs.weights, theirs.cache) and self.program.aliased >= mine.cache

    @property
    def problems(self) -> list[str]:
        """What misses its goal."""
        found = [f"bytes: {line}" for line in self.sent.unexplained]
        if abs(self.flops_off) > FLOPS_WITHIN:
            found.append(f"FLOPs: {100 * self.flops_off:+.1f} %")
        if not self.exact:
            found.append(f"weights and cache: {self.predicted} against {self.compiled}")
        if abs(self.total_off) > MEMORY_WITHIN:
            mine, theirs = (f"{size / 2**20:.1f} MiB" for size in (self.temporaries, self.program.temporaries))
            found.append(f"memory: {100 * self.total_off:+.1f} %, temporaries {theirs} and predicted {mine}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        program = {name: value for name, value in asdict(self.program).items() if name != "text"}
        return {
            "case": self.case.name,
            "layers": self.case.layers,
            "lanes": self.case.lanes,
            "tokens": self.case.tokens,
            "keys": self.case.keys,
            "target": self.target,
            "strategies": self.strategies,
            "sent": asdict(self.sent),
            "predicted_flops": self.predicted_flops,
            "compiled_flops": self.compiled_flops,
            "predicted_bytes": asdict(self.predicted),
            "compiled_bytes": asdict(self.compiled),
            "memory": program | {"total": self.program.total},
            "predicted_memory": {"temporaries": self.temporaries, "total": self.predicted_total},
            "compile_seconds": self.took,
            "problems": self.problems,
        }


def compiled(case: Case, target: Target) -> Any:
    """Compile a case."""
    step = case.step
    programs = Programs(step.config, step.plan, target.mesh(step.plan.mesh))
    arguments = programs.abstract_arguments(step, case.pages)
    return programs.step(step.phase, sampled=step.sampled).lower(*arguments).compile()


def compare(case: Case, target: str, program: Program, took: float) -> Row:
    """Hold what was compiled against closed forms."""
    step, module = case.step, parse_module(program.text)
    traffic, found = predict_traffic(step), collectives_of(module, step.plan.mesh.sizes)
    return Row(
        case,
        target,
        explain(traffic, found, compare_compiled(traffic, found)),
        sum(predict_flops(step).values()),
        sum(compiled_flops(module).values()),
        predicted_bytes(case),
        compiled_bytes(module),
        max(sum(buffers_of(one, Target.parse(target).kind)) for one in step.batches),
        program,
        {sublayer: strategy.name for sublayer, strategy in chosen(step.batches[0]).items()},
        took,
    )


def predicted_bytes(case: Case) -> Held:
    """From shapes and PartitionSpecs alone."""
    step = case.step
    programs = Programs(step.config, step.plan, abstract_mesh(step.plan.mesh))
    weights, cache, batch = programs.abstract_arguments(step, case.pages)
    specs = programs.array_specs, programs.cache_specs(step.phase), programs.batch_specs(step.phase)
    sizes = step.plan.mesh.sizes
    of_weights, of_cache, of_batch = (
        local_bytes(shapes, spec, sizes) for shapes, spec in zip((weights, cache, batch), specs, strict=True)
    )
    planes = local_bytes(cache.planes, specs[1].planes, sizes)
    return Held(of_weights, planes, of_cache - planes + of_batch)


def compiled_bytes(module: Module) -> Held:
    """From the shapes of the program's arguments; those that it does not use are left out of it."""
    weights, planes = (argument_bytes(module, name) for name in ("weights", "cache.planes"))
    return Held(weights, planes, argument_bytes(module) - weights - planes)


def report(rows: list[Row], training: list[TrainingRow], out: Path) -> None:
    """Table and JSON; the page in docs takes what goes to the usual folder."""
    columns = [
        "model (layers)",
        "mesh",
        "step",
        "target",
        "sent",
        "compiled",
        "why",
        "FLOPs",
        "weights, cache",
        "temporaries",
        "compiled",
        "total",
        "off",
    ]
    cells = [_cells(row) for row in rows]
    of_training = [row.cells for row in training]
    show("Predicted against compiled, of one rank", columns, cells, left=4)
    show("Training steps, of one rank", COLUMNS, of_training, left=3)
    if out == RESULTS:
        tables = markdown(columns, cells, left=4), markdown(COLUMNS, of_training, left=3)
        between = f"Training steps ({BATCH} sequences of {LENGTH} tokens in float32):"
        text = "\n\n".join([_summary(rows, training), tables[0], between, tables[1]])
        fill(DOCS / "accelerators.md", "predicted_compiled", text)
    rows_json, training_json = ([row.to_json() for row in every] for every in (rows, training))
    write(out, "predicted_compiled", {"rows": rows_json, "training": training_json})


def _summary(rows: list[Row], training: list[TrainingRow]) -> str:
    """How many there are, what strategies are in none, and what misses its goal."""
    seen = {item for row in rows for item in row.strategies.items()}
    every = [(one.sublayer, one.name) for one in STRATEGIES if not (training and one.sublayer in TRAINING)]
    left = [f"{sublayer}={name}" for sublayer, name in every if (sublayer, name) not in seen]
    misses = [f"- {row.case.name} on {row.target}: {'; '.join(row.problems)}" for row in rows if row.problems]
    equal = sum(row.sent.equal for row in rows)
    line = f"{len(rows)} programs: {equal} send the predicted bytes, a pass explains the others"
    line += f". Strategies in none of them: {', '.join(left)}" if left else ". Every registered strategy is in one"
    line += f"; {len(misses)} programs miss a goal:" if misses else "; no program misses a goal."
    return "\n".join([line, *(["", *misses] if misses else [])])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.case.model} ({row.case.layers})",
        row.case.mesh,
        f"{row.case.phase} {row.case.options}".strip(),
        row.target,
        *row.sent.cells,
        f"{100 * row.flops_off:+.2f} %",
        "exact" if row.exact else "DIFFER",
        human_bytes(row.temporaries),
        human_bytes(row.program.temporaries),
        human_bytes(row.program.total),
        f"{100 * row.total_off:+.1f} %",
    )


def measure(kept: Kept, targets: Mapping[str, Target], only_kept: bool) -> list[Row]:
    """A row for each case that there is; of the others each is compiled first unless `only_kept`."""
    rows = []
    for case in CASES:
        for text, target in targets.items():
            name = f"{case.name} on {text}"
            if only_kept and not kept.has(name):
                continue
            program, took = kept.program(name, lambda case=case, target=target: compiled(case, target))
            row = compare(case, text, program, took)
            rows.append(row)
            print(f"{name}: {'; '.join(row.problems) or 'well'}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Compile, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--kept", type=Path, default=Path("out/compiled"), help="folder of what is compiled already")
    parser.add_argument("--report", action="store_true", help="compile nothing")
    options = parser.parse_args()
    kept, targets = Kept(options.kept), {text: Target.parse(text) for text in TARGETS}
    rows, training = measure(kept, targets, options.report), training_rows(kept, targets, options.report)
    report(rows, training, options.out)
    if any(row.problems for row in (*rows, *training)):
        sys.exit("some predictions miss what was compiled")


if __name__ == "__main__":
    main()
