"""The experts' FFN on one core: rows in tiles of their experts, against `ragged_dot` and one plain FFN of as many rows.

python -m benchmarks.grouped_matmul

The plain FFN sends all rows through the same weights: the same FLOPs in two large products, a bound. In decode, where
reading weights takes the time, ours is held against the experts that have rows, written out one by one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import (
    Spread,
    Turn,
    arguments,
    draw_lines,
    interleave,
    ratios,
    show,
    use_one_core,
    warn_if_busy,
    write,
)
from benchmarks.routing import drawn
from jaxpar.kernels.dense import matmul
from jaxpar.moe.grouped import expert_ffn
from jaxpar.moe.tiles import computed_rows
from jaxpar.tables import human_bytes

HIDDEN, WIDTH, CHOICES = 256, 512, 2
OURS, RAGGED, PLAIN, ONE_BY_ONE = "tiles", "ragged_dot", "one FFN", "one by one"
MOST_TIMES_PLAIN = 2.0
LEAST_GAIN = {16: 10.0, 64: 30.0}
"""How many times as fast as `ragged_dot`, by experts."""


@dataclass(frozen=True)
class Problem:
    """`tokens` that each choose two of `experts`, all alike or by Zipf's law."""

    tokens: int
    experts: int
    routing: str

    def counts(self) -> np.ndarray:
        """Rows of each expert."""
        chosen = drawn(self.tokens, self.experts, CHOICES, self.routing)
        return np.bincount(chosen.ravel(), minlength=self.experts).astype(np.int32)

    def arrays(self) -> tuple[jax.Array, ...]:
        """Rows, gate_up, down."""
        rng = np.random.default_rng(1)
        sizes = (self.tokens * CHOICES, HIDDEN), (self.experts, 2 * WIDTH, HIDDEN), (self.experts, HIDDEN, WIDTH)
        return tuple(jnp.asarray(rng.standard_normal(size, np.float32) * size[-1] ** -0.5) for size in sizes)


def gated(both: jax.Array) -> jax.Array:
    """silu(gate) * up."""
    return jax.nn.silu(both[:, :WIDTH]) * both[:, WIDTH:]


def tiles(rows: jax.Array, gate_up: jax.Array, down: jax.Array, counts: jax.Array) -> jax.Array:
    """Ours."""
    return expert_ffn(rows, gate_up, down, counts, lambda gate, up: jax.nn.silu(gate) * up)


def ragged_dot(rows: jax.Array, gate_up: jax.Array, down: jax.Array, counts: jax.Array) -> jax.Array:
    """JAX's own grouped product; it gets its weights as it wants them, [E, I, O]."""
    return lax.ragged_dot(gated(lax.ragged_dot(rows, gate_up, counts)), down, counts)


def plain(rows: jax.Array, gate_up: jax.Array, down: jax.Array, _: jax.Array) -> jax.Array:
    """All rows through the first expert."""
    return matmul(gated(matmul(rows, gate_up[0])), down[0])


def one_by_one(counts: np.ndarray) -> Callable[..., jax.Array]:
    """A program for these counts alone."""
    ends = np.cumsum(counts)

    def run(rows: jax.Array, gate_up: jax.Array, down: jax.Array, _: jax.Array) -> jax.Array:
        mine = {e: rows[ends[e] - counts[e] : ends[e]] for e in np.flatnonzero(counts)}
        return jnp.concatenate([matmul(gated(matmul(x, gate_up[e])), down[e]) for e, x in mine.items()])

    return run


def contestants(problem: Problem, decode: bool) -> dict[str, tuple[Any, tuple[jax.Array, ...]]]:
    """Compiled programs with their arguments."""
    counts = problem.counts()
    rows, gate_up, down = problem.arrays()
    arrays = rows, gate_up, down, jnp.asarray(counts)
    swapped = rows, gate_up.swapaxes(1, 2), down.swapaxes(1, 2), arrays[3]
    programs = {
        **({ONE_BY_ONE: (one_by_one(counts), arrays)} if decode else {PLAIN: (plain, arrays)}),
        OURS: (tiles, arrays),
        RAGGED: (ragged_dot, swapped),
    }
    return {name: (jax.jit(run).lower(*given).compile(), given) for name, (run, given) in programs.items()}


def turn(program: Any, given: tuple[jax.Array, ...], repeats: int) -> Turn:
    """Seconds of one run, the mean of a few."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            jax.block_until_ready(program(*given))
        return (time.perf_counter() - start) / repeats

    return run


def measure(problem: Problem, decode: bool, rounds: int) -> list[dict[str, Any]]:
    """The rows of one problem; ours must give what `ragged_dot` gives, and the experts one by one."""
    programs, counts = contestants(problem, decode), problem.counts()
    standard = ONE_BY_ONE if decode else PLAIN
    results = {name: np.asarray(program(*given)) for name, (program, given) in programs.items()}
    for other in programs.keys() - {PLAIN}:
        if np.abs(results[OURS] - results[other]).max() > 1e-4:
            sys.exit(f"{OURS} does not give what {other} gives at {problem}")
    turns = {name: turn(*program, 20 if decode and name != RAGGED else 1) for name, program in programs.items()}
    seconds = interleave(turns, rounds)
    return [
        {
            "tokens": problem.tokens,
            "experts": problem.experts,
            "with_rows": int((counts > 0).sum()),
            "routing": problem.routing,
            "program": name,
            "milliseconds": Spread.of([1e3 * value for value in seconds[name]]).to_json(),
            "times_standard": ratios(seconds[name], seconds[standard]).to_json(),
            "gain": ratios(seconds[RAGGED], seconds[name]).to_json(),
            "computed": computed_rows(counts, int(counts.sum())) / int(counts.sum()) if name == OURS else None,
            "temporary_bytes": int(program.memory_analysis().temp_size_in_bytes),
            "seconds": seconds[name],
        }
        for name, (program, _) in programs.items()
    ]


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Goals that ours does not reach."""
    found = []
    for row in rows:
        at = f"{row['tokens']} tokens, {row['experts']} experts, {row['routing']}"
        if row["program"] != OURS:
            continue
        if row["times_standard"]["median"] > MOST_TIMES_PLAIN:
            found.append(f"{row['times_standard']['median']:.2f} times one FFN at {at}")
        if row["gain"]["median"] < LEAST_GAIN.get(row["experts"], 0):
            found.append(f"{row['gain']['median']:.1f} times as fast as ragged_dot at {at}")
    return found


def main() -> None:
    """Measure all problems turn by turn, report."""
    parser = arguments("The experts' FFN on one core.", rounds=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096], help="tokens, of two rows each")
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 32, 64], help="experts")
    options = parser.parse_args()
    warn_if_busy()
    use_one_core()
    rows, decode = [], []
    for tokens in options.tokens:
        for experts in options.experts:
            for routing in ("uniform", "Zipf"):
                rows += measure(Problem(tokens, experts, routing), False, options.rounds)
        print(f"{tokens} tokens: {options.rounds} rounds done", file=sys.stderr)
    for tokens in (1, 8, 32):
        for experts in (8, 128):
            decode += measure(Problem(tokens, experts, "uniform"), True, options.rounds)
    not_reached = missed(rows)
    report({"rounds": options.rounds, "rows": rows, "decode": decode, "missed": not_reached}, options)
    if not_reached:
        sys.exit("missed: " + "; ".join(not_reached))


def report(found: dict[str, Any], options: Any) -> None:
    """Tables, JSON and picture."""
    for rows, standard in ((found["rows"], PLAIN), (found["decode"], ONE_BY_ONE)):
        show(
            f"FFN of experts, hidden {HIDDEN}, width {WIDTH}, top-{CHOICES}, float32, one core: median (min-max)",
            ["tokens", "experts", "with rows", "routing", "program", "ms", f"times {standard}", "ragged_dot / this",
             "computed / rows", "temporaries"],
            [
                (
                    row["tokens"],
                    row["experts"],
                    row["with_rows"],
                    row["routing"],
                    row["program"],
                    Spread(**row["milliseconds"]),
                    Spread(**row["times_standard"]),
                    Spread(**row["gain"]),
                    f"{row['computed']:.2f}" if row["computed"] else "",
                    human_bytes(row["temporary_bytes"]),
                )
                for row in rows
            ],
            left=5,
        )  # fmt: skip
    write(options.out, "grouped_matmul", found)
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for row in found["rows"]:
        if row["tokens"] == options.tokens[0] and row["program"] != PLAIN:
            line = lines.setdefault(f"{row['program']}, {row['routing']}", [])
            line.append((row["experts"], Spread(**row["times_standard"])))
    draw_lines(
        options.out / "grouped_matmul.png",
        f"FFN of experts, {options.tokens[0]} tokens, top-{CHOICES}, one core",
        "experts",
        "time, one FFN of all rows = 1",
        lines,
    )


if __name__ == "__main__":
    main()
