"""What a fixed order costs: `all_reduce="fixed_order"` against `psum`, in prefill and decode, on one device and four.

python -m benchmarks.fixed_order

All run on one core, so that times are those of all ranks' work together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import jax
import numpy as np

import jaxpar
from benchmarks.common import (
    Spread,
    Turn,
    arguments,
    draw_bars,
    interleave,
    ratios,
    show,
    use_one_core,
    warn_if_busy,
    write,
)
from jaxpar.devices import ensure_devices
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.mesh import MeshSpec
from jaxpar.runner import Runner

MODEL, MESHES, REDUCTIONS = "tiny", ("tp=1", "tp=4"), ("psum", "fixed_order")
PROMPT, CACHED, STEPS = 512, 128, 16
WORK = {f"prefill of {PROMPT}": 0, "decode, batch 1": 1, "decode, batch 8": 8}
"""Requests that are decoded; 0: one prompt is prefilled."""


def tokens_of(batch: int) -> int:
    """Tokens that a turn makes or takes."""
    return batch * STEPS if batch else PROMPT


def turn(runner: Runner, batch: int) -> float:
    """Seconds of one turn of the work."""
    length = CACHED if batch else PROMPT
    prompts = np.random.default_rng(0).integers(2, runner.config.vocab_size, (max(batch, 1), length)).tolist()
    params = SamplingParams(ignore_eos=True)
    session = Session(runner.programs, runner.weights, prompts, [length + STEPS] * len(prompts), params)
    start = time.perf_counter()
    for chunk in session.prefill():
        latest = jax.block_until_ready(chunk).decoded.tokens if chunk.ended else {}
    if batch:
        start = time.perf_counter()
        for _ in range(STEPS):
            for decoded in session.decode(latest):
                latest = decoded.tokens
    return time.perf_counter() - start


def measure(rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Seconds of each turn, by mesh, work and reduction."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for mesh in MESHES:
        runners = {name: jaxpar.load(MODEL, mesh=mesh, dtype="float32", all_reduce=name) for name in REDUCTIONS}
        for work, batch in WORK.items():
            turns: Mapping[str, Turn] = {name: partial(turn, runner, batch) for name, runner in runners.items()}
            found |= {(mesh, work, name): seconds for name, seconds in interleave(turns, rounds).items()}
    return found


def main() -> None:
    """Measure turn by turn, report."""
    options = arguments("What a fixed order of sums and fixed shapes of products cost.", rounds=7).parse_args()
    warn_if_busy()
    use_one_core()
    ensure_devices(MeshSpec(tp=4), "cpu")
    seconds = measure(options.rounds)
    rows = []
    for (mesh, work, name), taken in seconds.items():
        rates = [tokens_of(WORK[work]) / second for second in taken]
        rows.append(
            {
                "mesh": mesh,
                "work": work,
                "all_reduce": name,
                "tokens_per_second": Spread.of(rates).to_json(),
                "times_psum": ratios(taken, seconds[mesh, work, "psum"]).to_json(),
                "seconds": taken,
            }
        )
    show(
        f"{MODEL}, float32, one core: median (min-max)",
        ["mesh", "work", "all_reduce", "tokens/s", "time, psum = 1"],
        [
            (
                row["mesh"],
                row["work"],
                row["all_reduce"],
                Spread(**row["tokens_per_second"]),
                Spread(**row["times_psum"]),
            )
            for row in rows
        ],
        left=3,
    )
    write(options.out, "fixed_order", {"rounds": options.rounds, "rows": rows})
    ours = {mesh: [Spread(**row["times_psum"]) for row in rows if row["mesh"] == mesh and
                   row["all_reduce"] == "fixed_order"] for mesh in MESHES}  # fmt: skip
    draw_bars(
        options.out / "fixed_order.png", f"{MODEL}: a fixed order, one core", "time, psum = 1", list(WORK), ours, True
    )


if __name__ == "__main__":
    main()
