"""Sequence parallelism and collective matmul: a prefill step of 8192 tokens over tp=8 faked devices, side by side.

python -m benchmarks.sequence_parallel

Beside it the residual sum and the norm after it alone, against a program that reads and writes as much as one pass
over memory must.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import (
    Spread,
    arguments,
    draw_bars,
    interleave,
    ratios,
    show,
    use_one_core,
    warn_if_busy,
    write,
)
from benchmarks.random_model import RandomReader, llama
from jaxpar.batch import StepBatch
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.load import load_weights
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.ledger.predict import predict_traffic
from jaxpar.mesh import MeshSpec
from jaxpar.nn.linear import rms_norm
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step
from jaxpar.tables import human_bytes
from jaxpar.vocabulary.sampling import SamplingArrays

TOKENS, TP = 8192, 8
OFF, SP, RING = "off", "sequence_parallel", "collective_matmul"
PLANS: dict[str, dict[str, bool]] = {
    OFF: {},
    SP: {"sequence_parallel": True},
    RING: {"sequence_parallel": True, "collective_matmul": True},
}
HIDDEN = (512, 1024)
NORM_ROWS, NORM_WIDTH = 1024, 8192


def model_of(hidden: int) -> ModelConfig:
    """One layer: what is temporary in one is free in the next."""
    made = llama(layers=1, hidden=hidden, ffn=4 * hidden, queries=hidden // 64, keys=8, vocabulary=1024)
    return replace(made, max_position_embeddings=TOKENS)


@dataclass
class Held:
    """A compiled step with its arguments; it takes its cache and gives it back."""

    compiled: Any
    weights: Any
    cache: Any
    batch: Any
    step: Step

    @classmethod
    def of(cls, config: ModelConfig, plan: Plan) -> Held:
        """The first step of one prompt."""
        mesh = make_mesh(plan.mesh, ensure_devices(plan.mesh, "cpu"))
        programs = Programs(config, plan, mesh)
        step, pages = Step(config, plan, "prefill", 1, TOKENS, TOKENS), TOKENS // plan.page_size
        compiled = programs.step("prefill").lower(*programs.abstract_arguments(step, pages)).compile()
        batch = jax.device_put(a_prompt(config, plan), programs.sharded(programs.batch_specs("prefill")))
        weights = load_weights(programs.weights, RandomReader(config), mesh)
        return cls(compiled, weights, programs.empty_cache(pages), batch, step)

    def run(self) -> float:
        """The log-probability of the next token."""
        self.cache, output = self.compiled(self.weights, self.cache, self.batch)
        return float(np.asarray(output.logprob)[0])

    def turn(self) -> float:
        """Seconds of one run."""
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start

    @property
    def temporary_bytes(self) -> int:
        """Of a rank, as the compiler lays them out."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    @property
    def sent_bytes(self) -> int:
        """That a rank sends, by closed form."""
        return sum(row.sent_bytes for row in predict_traffic(self.step))


def a_prompt(config: ModelConfig, plan: Plan) -> StepBatch:
    """Random tokens."""
    tokens = np.random.default_rng(9).integers(0, config.vocab_size, (1, TOKENS)).astype(np.int32)
    at, zero = np.arange(TOKENS, dtype=np.int32)[None], np.zeros(1, np.int32)
    options = SamplingArrays(zero.astype(np.float32), zero, np.ones(1, np.float32), zero.astype(np.uint32), zero)
    table = np.arange(TOKENS // plan.page_size, dtype=np.int32)[None]
    return StepBatch(tokens, at, np.zeros((1, 1), np.int32), table, np.full(1, TOKENS - 1, np.int32), options)


def measure(hidden: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one model; all must find the same next token as likely."""
    config, spec = model_of(hidden), MeshSpec(tp=TP)
    held = {name: Held.of(config, Plan(spec, chunk=TOKENS, **fields)) for name, fields in PLANS.items()}
    found = {name: one.run() for name, one in held.items()}
    if max(found.values()) - min(found.values()) > 1e-4:
        sys.exit(f"different log-probabilities: {found}")
    seconds = interleave({name: one.turn for name, one in held.items()}, rounds)
    return [
        {
            "hidden": hidden,
            "plan": name,
            "temporary_bytes": one.temporary_bytes,
            "times_off_bytes": one.temporary_bytes / held[OFF].temporary_bytes,
            "sent_bytes": one.sent_bytes,
            "milliseconds": Spread.of([1e3 * value for value in seconds[name]]).to_json(),
            "times_off": ratios(seconds[name], seconds[OFF]).to_json(),
            "seconds": seconds[name],
        }
        for name, one in held.items()
    ]


Arrays = tuple[jax.Array, jax.Array]


def norms() -> dict[str, Callable[[jax.Array, jax.Array], Arrays]]:
    """Ways from a residual stream and a finished sum to the new stream and what its norm gives."""
    scale = jnp.ones(NORM_WIDTH)

    def as_written(x: jax.Array, y: jax.Array) -> Arrays:
        return x + y, rms_norm(x + y, scale, 1e-5)

    def in_two_passes(x: jax.Array, y: jax.Array) -> Arrays:
        z = lax.optimization_barrier(x + y)
        return z, rms_norm(z, scale, 1e-5)

    def in_blocks(x: jax.Array, y: jax.Array) -> Arrays:
        rows = [part.reshape(-1, 8, NORM_WIDTH) for part in (x, y)]
        z, normed = lax.map(lambda both: as_written(*both), tuple(rows))
        return z.reshape(x.shape), normed.reshape(x.shape)

    def bound(x: jax.Array, y: jax.Array) -> Arrays:
        return x + y, x - y

    return {"bound": bound, "as written": as_written, "in two passes": in_two_passes, "in blocks of 8 rows": in_blocks}


def measure_norms(rounds: int) -> list[dict[str, Any]]:
    """The rows of the residual sum and norm alone, on one device."""
    x, y = (jax.random.normal(jax.random.key(seed), (NORM_ROWS, NORM_WIDTH)) for seed in (0, 1))

    def turn(program: Any) -> Callable[[], float]:
        def seconds() -> float:
            start = time.perf_counter()
            for _ in range(5):
                jax.block_until_ready(program(x, y))
            return (time.perf_counter() - start) / 5

        return seconds

    seconds = interleave({name: turn(jax.jit(way)) for name, way in norms().items()}, rounds)
    return [
        {
            "way": name,
            "milliseconds": Spread.of([1e3 * value for value in taken]).to_json(),
            "times_bound": ratios(taken, seconds["bound"]).to_json(),
            "seconds": taken,
        }
        for name, taken in seconds.items()
    ]


def main() -> None:
    """Measure both models turn by turn, then the norm alone; report."""
    parser = arguments("Sequence parallelism and collective matmul.", rounds=5)
    options = parser.parse_args()
    warn_if_busy()
    use_one_core()
    ensure_devices(MeshSpec(tp=TP), "cpu")
    rows = [row for hidden in HIDDEN for row in measure(hidden, options.rounds)]
    report(rows, measure_norms(3 * options.rounds), options.rounds, options.out)


def report(rows: list[dict[str, Any]], of_norms: list[dict[str, Any]], rounds: int, out: Path) -> None:
    """Tables, JSON and picture."""
    show(
        f"Prefill of {TOKENS} tokens over tp={TP} on one core, {rounds} rounds: median (min-max)",
        ["hidden", "plan", "temporary a rank", "times off", "a rank sends", "ms", "times off"],
        [
            (
                row["hidden"],
                row["plan"],
                human_bytes(row["temporary_bytes"]),
                f"{row['times_off_bytes']:.2f}",
                human_bytes(row["sent_bytes"]),
                Spread(**row["milliseconds"]),
                Spread(**row["times_off"]),
            )
            for row in rows
        ],
        left=2,
    )
    show(
        f"Residual sum and norm of [{NORM_ROWS}, {NORM_WIDTH}] float32 on one core: median (min-max)",
        ["way", "ms", "times two reads and two writes"],
        [(row["way"], Spread(**row["milliseconds"]), Spread(**row["times_bound"])) for row in of_norms],
    )
    write(out, "sequence_parallel", {"rounds": rounds, "rows": rows, "norms": of_norms})
    series: dict[str, list[Spread]] = {name: [] for name in PLANS}
    for row in rows:
        series[row["plan"]] += [Spread.of([row["times_off_bytes"]]), Spread(**row["times_off"])]
    draw_bars(
        out / "sequence_parallel.png",
        f"Prefill of {TOKENS} tokens over tp={TP} faked devices on one core, against all-reduces",
        "all-reduces = 1",
        [f"hidden {hidden}\n{what}" for hidden in HIDDEN for what in ("temporary bytes", "time")],
        series,
        parity=True,
    )


if __name__ == "__main__":
    main()
