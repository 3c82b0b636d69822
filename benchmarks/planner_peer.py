"""The planner's reference cases beside aiconfigurator: bounds, times and weights, and more points of two Llamas.

python -m benchmarks.planner_peer --peer out/aic/bin/aiconfigurator

With `--peer` its command runs, case by case; without it the figures are those that version 0.12.0 gave. Exits with
status 1 where a bound misses what is right by over 2 %, a time its table by over 15 %, or weights by 0.01 GiB.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Spread, arguments, draw_bars, figure, show, write
from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.memory import memory_of
from jaxpar.planner.reference import CASES, WORKLOAD, Case, Published
from jaxpar.planner.timing import decode_time, prefill_time
from jaxpar.presets import load_preset

GIB = 2**30
MODES = {"bound": "SOL", "table": "SILICON"}
LLAMAS = {"llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B", "llama-3-70b": "meta-llama/Meta-Llama-3.1-70B"}
POINTS = Path(__file__).parent / "results" / "planner_peer_points.json"


@dataclass(frozen=True)
class Point:
    """A Llama on `tp` H200: milliseconds of a prefill of `batch` prompts and of a decode step, by the peer's tables."""

    model: str
    tp: int
    batch: int
    prefill: float
    decode: float


def main() -> int:
    """Run it."""
    parser = arguments(__doc__.splitlines()[0], rounds=1)
    parser.add_argument("--peer", type=Path, help="aiconfigurator's command; without it, pinned figures")
    chosen = parser.parse_args()
    rows, failed = [], []
    for case in CASES:
        row = compared(case, chosen.peer)
        rows.append(row)
        failed += row.pop("failed")
    points = further_points(chosen.peer)
    show(
        "Milliseconds on H200, 4000 tokens in, 500 out; peer: aiconfigurator 0.12.0",
        ("case", "phase", "bound", "peer's", "right", "time", "peer's table", "ratio"),
        [
            (row["case"], phase, *(figure(one) if one else "" for one in (*values[:5],)), _ratio(values[3], values[4]))
            for row in rows
            for phase, values in row["phases"].items()
        ],
        left=2,
    )
    show(
        "Weights of a device, GiB",
        ("case", "here", "peer's", "right"),
        [(row["case"], *(f"{one:.2f}" if one else "" for one in row["weights"])) for row in rows],
    )
    errors = errors_of(points)
    show(
        "Llama 3 in bf16 at other sizes: time over the peer's table",
        ("model", "tp", "batch", "prefill", "decode"),
        [(one["model"], one["tp"], one["batch"], one["prefill"], one["decode"]) for one in errors["ratios"]],
    )
    print(
        f"mean error {errors['mean']:.1%}, largest {errors['largest']:.1%}; "
        f"a step is timed in {errors['microseconds']:.0f} us"
    )
    for line in failed:
        print(f"missed: {line}", file=sys.stderr)
    write(chosen.out, "planner_peer", {"cases": rows, "llama": errors, "missed": failed})
    labels = [f"{row['case']} {phase}" for row in rows for phase in row["phases"] if row["phases"][phase][4]]
    held = [values for row in rows for values in row["phases"].values() if values[4] and row["case"] != "R4"]
    labels = [label for label in labels if not label.startswith("R4")]
    series = {name: [Spread.of([values[at]]) for values in held] for name, at in (("here", 3), ("peer's table", 4))}
    draw_bars(chosen.out / "planner_peer.png", "Reference cases on H200", "milliseconds", labels, series)
    return 1 if failed else 0


def compared(case: Case, peer: Path | None) -> dict[str, Any]:
    """A case on both sides, and what misses its goal."""
    bound, table = (_ask(peer, case, mode) if peer else getattr(case, mode) for mode in MODES)
    memory = memory_of(case.config, case.sums, _h200(), WORKLOAD, Assumptions(**case.types), case.batch)
    bounds, times, weights = case.bounds(), case.times(), memory.weight_bytes / GIB
    phases = {
        name: (bounds[at], getattr(bound, name), getattr(case.right, name), times[at], getattr(table, name))
        for at, name in enumerate(("prefill", "decode"))
    }
    failed = []
    for name, (lowest, _, right, taken, measured) in phases.items():
        if right and abs(lowest / right - 1) > 0.02:
            failed.append(f"{case.name} {name}: bound {lowest:.2f} ms, right is {right}")
        if measured and case.name != "R4" and abs(taken / measured - 1) > 0.15:
            failed.append(f"{case.name} {name}: {taken:.2f} ms, the table has {measured}")
    if round(weights, 2) != case.right.weights:
        failed.append(f"{case.name}: weights {weights:.2f} GiB, right is {case.right.weights}")
    return {
        "case": case.name,
        "what": case.what,
        "phases": phases,
        "weights": (weights, bound.weights, case.right.weights),
        "failed": failed,
    }


def further_points(peer: Path | None) -> list[Point]:
    """Prefill and decode of two Llamas at several sizes, asked of the peer or as it once answered."""
    if peer is None:
        return [Point(**one) for one in json.loads(POINTS.read_text(encoding="utf-8"))]
    points = []
    for model, name in LLAMAS.items():
        for tp in (1, 4) if "8b" in model else (4, 8):
            for batch in (1, 16, 128):
                command = (name, "--tp-size", str(tp))
                prefill, _ = _run(peer, command, "static_ctx", "SILICON", min(batch, 8))
                decode, _ = _run(peer, command, "static_gen", "SILICON", batch)
                points.append(Point(model, tp, batch, prefill, decode))
    POINTS.write_text(json.dumps([vars(one) for one in points], indent=1) + "\n", encoding="utf-8")
    return points


def errors_of(points: Sequence[Point]) -> dict[str, Any]:
    """The planner's times over the peer's."""
    configs = {model: read_config(model_dir(model)) for model in LLAMAS}
    ratios, misses, began = [], [], time.perf_counter()
    for one in points:
        plan = Plan(MeshSpec(tp=one.tp), dtype="bfloat16", chunk=WORKLOAD.input, max_num_seqs=4096, devices_per_node=8)
        config = configs[one.model]
        first = prefill_time(config, plan, _h200(), WORKLOAD, Assumptions(), min(one.batch, 8))
        then = decode_time(config, plan, _h200(), WORKLOAD, Assumptions(), one.batch)
        both = 1e3 * first.prefill / one.prefill, 1e3 * then.tpot / one.decode
        misses += [abs(ratio - 1) for ratio in both]
        ratios.append({**vars(one), "prefill": f"{both[0]:.2f}", "decode": f"{both[1]:.2f}"})
    took = 1e6 * (time.perf_counter() - began) / (2 * len(points))
    return {"ratios": ratios, "mean": statistics.mean(misses), "largest": max(misses), "microseconds": took}


def _ask(peer: Path, case: Case, mode: str) -> Published:
    """What the peer says now."""
    lanes = case.batch // (8 if "--attention-dp-size" in case.command else 1)
    prefill, weights = _run(peer, case.command, "static_ctx", MODES[mode], case.prompts if case.name == "R4" else 1)
    decode, _ = _run(peer, case.command, "static_gen", MODES[mode], lanes)
    return Published(0 if case.name == "R2b" else prefill, decode, weights)


def _run(peer: Path, model: Sequence[str], kind: str, mode: str, batch: int) -> tuple[float, float]:
    """Milliseconds and GiB of weights of one estimate."""
    sizes = ("--isl", str(WORKLOAD.input), "--osl", str(WORKLOAD.output), "--batch-size", str(batch))
    command = [str(peer), "cli", "estimate", "--no-color", "--system", "h200_sxm", "--estimate-mode", kind, *sizes]
    command += ["--database-mode", mode, "--detail", "memory", "--model-path", *model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    time_of = re.search(r"(?:TTFT|TPOT):\s+([0-9.,]+) ms", done.stdout)
    weights = re.search(r"weights\s+([0-9.]+) GiB", done.stdout)
    if time_of is None or weights is None:
        raise SystemExit(f"{' '.join(command)} says no time:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(time_of[1].replace(",", "")), float(weights[1])


def _h200() -> Any:
    return load_preset("h200-calibrated-8").device


def _ratio(here: float, there: float) -> str:
    return f"{here / there:.2f}" if there else ""


if __name__ == "__main__":
    sys.exit(main())
