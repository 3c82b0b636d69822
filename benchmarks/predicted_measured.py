"""The planner's step times against those of this machine, for plans of the bundled models on 8 faked devices.

python -m benchmarks.predicted_measured

The machine is calibrated first, as `jaxpar calibrate` does it. Faked devices share its cores: what a rank computes in is
what all of them together leave it. What counts is the order of the plans; the error of each is stated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common import Spread, Turn, arguments, cores, figure, interleave, show, warn_if_busy, write
from jaxpar.devices import ensure_devices
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase
from jaxpar.runner import Runner, load

STEPS = 6
"""Decode steps in a turn."""


@dataclass(frozen=True)
class Case:
    """A phase of a plan: `batch` requests of `length` tokens are prefilled, or decode their next ones."""

    model: str
    mesh: str
    phase: Phase
    batch: int
    length: int
    plan: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """What a row of the table begins with."""
        options = "".join(f" {name}={value}" for name, value in self.plan.items())
        return f"{self.model} {self.mesh}{options} {self.phase} {self.batch} x {self.length}"


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
    *both("tiny-moe", "ep=8", (8, 128), (8, 100)),
    *both("tiny-moe", "ep=8", (32, 64), (64, 100)),
    *both("tiny-moe", "dp=2,ep=2,tp=2", (4, 128), (16, 100)),
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


def measured(cases: list[Case], rounds: int) -> list[Spread]:
    """Seconds of a step of each."""
    runners: dict[str, Runner] = {}
    turns: dict[str, Turn] = {}
    for case in cases:
        key = f"{case.model} {case.mesh} {case.plan}"
        runner = runners.setdefault(key, load(case.model, case.mesh, "cpu", **case.plan))
        turns[str(case)] = (prefill_turn if case.phase == "prefill" else decode_turn)(runner, case)
    seconds = interleave(turns, rounds)
    return [Spread.of(seconds[str(case)]) for case in cases]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    options = parser.parse_args()
    warn_if_busy()
    ensure_devices(MeshSpec(tp=8), "cpu")
    for case, spread in zip(CASES, measured(CASES, options.rounds), strict=True):
        print(case, 1e3 * spread.median, 1e3 * spread.low, 1e3 * spread.high)


if __name__ == "__main__":
    main()
