"""The planner's step times against those of this machine, for plans of the bundled models on 8 faked devices.

python -m benchmarks.predicted_measured

The machine is calibrated first, as `jaxpar calibrate` does it. Faked devices share its cores: what a rank computes in
is what all of them together leave it. What counts is the order of the plans; the error of each is stated.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Spread, Turn, arguments, cores, figure, interleave, show, warn_if_busy, write
from jaxpar.calibrate.measure import calibrate
from jaxpar.devices import ensure_devices
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.ledger.steps import make_steps
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.timing import step_time
from jaxpar.presets import DeviceKind, load_preset
from jaxpar.runner import Runner, load

STEPS = 6
"""Decode steps in a turn."""

GOAL = 0.9
"""The rank correlation."""

ASSUMED = Assumptions(overlap=0.0)
"""Devices that share cores hide nothing behind one another."""


@dataclass(frozen=True)
class Case:
    """A phase of a plan: `batch` requests of `length` tokens are prefilled, or decode their next ones."""

    model: str
    mesh: str
    phase: Phase
    batch: int
    length: int
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def planned(self) -> str:
        """The model and the plan."""
        return f"{self.model} {self.mesh}" + "".join(f" {name}={value}" for name, value in self.plan.items())

    def __str__(self) -> str:
        """What a row of the table begins with."""
        return f"{self.planned} {self.phase} {self.batch} x {self.length}"


def both(model: str, mesh: str, prefill: tuple[int, int], decode: tuple[int, int], **plan: Any) -> list[Case]:
    """A plan in prefill and in decode, each with (requests, tokens)."""
    return [Case(model, mesh, "prefill", *prefill, plan), Case(model, mesh, "decode", *decode, plan)]


CASES = [
    *both("tiny", "dp=8", (8, 256), (8, 100)),
    *both("tiny", "dp=8", (64, 64), (64, 100)),
    *both("tiny", "tp=8", (1, 512), (8, 100)),
    *both("tiny", "tp=8", (8, 64), (64, 100), chunk=64),
    *both("tiny", "dp=2,tp=4", (2, 256), (16, 200)),
    *both("tiny", "dp=4,tp=2", (4, 256), (16, 100), sequence_parallel=True),
    *both("tiny", "cp=2,tp=4", (1, 512), (8, 200), prefill_attention="ring"),
    *both("tiny", "cp=8", (1, 512), (8, 100)),
    *both("tiny", "dp=2,cp=2,tp=2", (2, 512), (16, 400)),
    *both("tiny", "pp=2,dp=2,tp=2", (2, 512), (16, 100), chunk=128),
    *both("tiny", "dp=4,tp=2", (8, 512), (32, 400)),
    *both("tiny", "pp=4,tp=2", (1, 64), (8, 100), chunk=16),
    *both("tiny-moe", "ep=8", (8, 128), (8, 100)),
    *both("tiny-moe", "ep=8", (32, 64), (64, 100)),
    *both("tiny-moe", "dp=2,ep=2,tp=2", (4, 128), (16, 100)),
    *both("tiny-moe", "cp=2,ep=4", (4, 512), (8, 400)),
    *both("tiny-moe", "dp=2,tp=4", (2, 256), (16, 100), experts_over=("dp", "tp")),
]


def session_of(runner: Runner, case: Case, more: int) -> Session:
    """Random prompts, and room for `more` tokens of each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, runner.config.vocab_size, case.length).tolist() for _ in range(case.batch)]
    return Session(runner.programs, runner.weights, prompts, [case.length + more] * case.batch, SamplingParams())


def prefill_turn(runner: Runner, case: Case) -> Turn:
    """Seconds of a step, the mean of those that the prompts take."""

    def run() -> float:
        session = session_of(runner, case, 1)
        start = time.perf_counter()
        for chunk in session.prefill():
            np.asarray(chunk.output.token)
        return (time.perf_counter() - start) / session.pipe.ticks

    return run


def decode_turn(runner: Runner, case: Case) -> Turn:
    """Seconds of a step, the mean of a few."""

    def run() -> float:
        session = session_of(runner, case, STEPS + 1)
        latest = {request: token for chunk in session.prefill() for request, token in chunk.decoded.tokens.items()}
        before, start = session.pipe.ticks, time.perf_counter()
        for _ in range(STEPS):
            latest = {request: token for one in session.decode(latest) for request, token in one.tokens.items()}
        return (time.perf_counter() - start) / (session.pipe.ticks - before)

    return run


def predicted(runner: Runner, case: Case, device: DeviceKind) -> float:
    """Seconds of a step by the planner, the mean of the steps of the case; nothing overlaps on shared cores."""
    tokens = case.length + (STEPS if case.phase == "decode" else 0)
    steps = make_steps(runner.config, runner.plan, case.phase, case.batch, tokens)
    return statistics.mean(step_time(step, device, ASSUMED).seconds for step in steps)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def draw(path: Path, rows: Sequence[Mapping[str, Any]], correlation: float) -> None:
    """Predicted against measured, and the line on which they are equal."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = drawing.subplots()
    for place, phase in enumerate(PHASES):
        points = [(1e3 * row["measured"]["median"], 1e3 * row["predicted"]) for row in rows if row["phase"] == phase]
        axes.plot(*zip(*points, strict=True), "o", color=("#2c5f8a", "#d98c3f")[place], label=phase)
    ends = [f(1e3 * row[key] for row in rows) for f, key in ((min, "predicted"), (max, "predicted"))]
    axes.plot(ends, ends, color="#444", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured ms of a step")
    axes.set_ylabel("predicted ms of a step")
    axes.set_title(f"{len(rows)} plans on 8 faked devices, rank correlation {correlation:.3f}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


def main() -> None:
    """Calibrate, compile, measure turn by turn, report."""
    parser = arguments("Predicted against measured step times, on faked devices.", rounds=9)
    parser.add_argument("--mesh", type=Path, help="a preset of `jaxpar calibrate`; default: calibrate now")
    options = parser.parse_args()
    warn_if_busy()
    spec = MeshSpec(tp=8)
    ensure_devices(spec, "cpu")
    device = load_preset(options.mesh).device if options.mesh else calibrate(spec, platform="cpu").device
    plans: dict[str, Runner] = {}
    runners = []
    for case in CASES:
        if case.planned not in plans:
            plans[case.planned] = load(case.model, case.mesh, "cpu", **case.plan)
        runners.append(plans[case.planned])
    turns = {
        str(case): (prefill_turn if case.phase == "prefill" else decode_turn)(runner, case)
        for case, runner in zip(CASES, runners, strict=True)
    }
    seconds = interleave(turns, options.rounds)
    rows = []
    for case, runner in zip(CASES, runners, strict=True):
        spread = Spread.of(seconds[str(case)])
        expected = predicted(runner, case, device)
        rows.append(
            {
                **asdict(case),
                "measured": spread.to_json(),
                "predicted": expected,
                "error": expected / spread.median - 1,
                "seconds": seconds[str(case)],
            }
        )
    correlation = spearman([row["predicted"] for row in rows], [row["measured"]["median"] for row in rows])
    within = statistics.median(abs(row["error"]) for row in rows)
    show(
        f"Steps on 8 faked devices, {cores()} cores: rank correlation {correlation:.3f}, median error {within:.0%}",
        ["plan", "measured ms: median (min-max)", "predicted ms", "error"],
        [
            (
                case,
                Spread(*(1e3 * value for value in row["measured"].values())),
                figure(1e3 * row["predicted"]),
                f"{row['error']:+.0%}",
            )
            for case, row in zip(CASES, rows, strict=True)
        ],
    )
    document = {"rounds": options.rounds, "rank_correlation": correlation, "device": asdict(device), "rows": rows}
    write(options.out, "predicted_measured", document)
    draw(options.out / "predicted_measured.png", rows, correlation)
    if correlation < GOAL:
        sys.exit(f"rank correlation {correlation:.3f}, the goal is {GOAL}")


if __name__ == "__main__":
    main()
