"""Every way to add up what ranks have, turn by turn: 8 B to 16 MiB on 2, 4 and 8 faked devices.

python -m benchmarks.reductions

Faked devices copy in the memory of one machine, and share its cores: a step costs a meeting of threads, a byte a copy.
What that says about real links is which costs count, steps or bytes; both are given beside the times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import Spread, Turn, arguments, cores, draw_lines, interleave, ratios, show, warn_if_busy, write
from jaxpar.collectives import to_varying
from jaxpar.collectives.reduction import Reduction
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.ledger.traffic import SENT_BYTES, steps_of
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.registry import STRATEGIES
from jaxpar.tables import human_bytes

BASELINE = "psum"
NAMES = [strategy.name for strategy in STRATEGIES if strategy.sublayer == "all_reduce"]
RANKS = (2, 4, 8)
SIZES = (8, 64, 512, 4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20)
"""Bytes of a rank's float32 array."""


def reductions(ranks: int) -> dict[str, Reduction]:
    """By name; `two_level` on two nodes, where each has two ranks at least."""
    plan = Plan(MeshSpec(tp=ranks), devices_per_node=ranks // 2)
    of = {strategy.name: strategy for strategy in STRATEGIES if strategy.sublayer == "all_reduce"}
    return {name: of[name].run(plan) for name in NAMES if name != "two_level" or ranks > 2}


def program(reduction: Reduction, ranks: int, size: int) -> tuple[Any, jax.Array]:
    """The compiled sum of an array of `size` bytes, and the array."""
    spec = MeshSpec(tp=ranks)
    mesh = make_mesh(spec, ensure_devices(spec, "cpu"))

    def local(x: jax.Array) -> jax.Array:
        return to_varying(reduction.all_reduce(x, ("tp",)), ("tp",))

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
    values = np.random.default_rng(0).standard_normal((ranks, size // 4), np.float32)
    x = jax.device_put(values.reshape(-1), NamedSharding(mesh, P("tp")))
    return run.lower(x).compile(), x


def turn(compiled: Any, x: jax.Array, repeats: int) -> Turn:
    """Seconds of one sum, the mean of a few."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            jax.block_until_ready(compiled(x))
        return (time.perf_counter() - start) / repeats

    return run


def measure(ranks: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one size; every sum must be the sum, within its bound, on every rank."""
    contestants = reductions(ranks)
    programs = {name: program(reduction, ranks, size) for name, reduction in contestants.items()}
    for name, (compiled, x) in programs.items():
        parts = np.asarray(x).reshape(ranks, -1).astype(np.float64)
        off = np.abs(np.asarray(compiled(x)).reshape(ranks, -1) - parts.sum(axis=0))
        if not (off <= contestants[name].error_bound(parts, np.float32)).all():
            sys.exit(f"{name} is off by {off.max()} for {size} bytes on {ranks} ranks")
    repeats = max(1, min(50, 2**20 // size))
    seconds = interleave({name: turn(*one, repeats) for name, one in programs.items()}, rounds)
    rows = []
    for name, reduction in contestants.items():
        messages = reduction.messages("all_reduce", 1, size // 4, 4, {"tp": ranks})
        rows.append(
            {
                "ranks": ranks,
                "bytes": size,
                "reduction": name,
                "steps": sum(one.calls * steps_of(one.collective) for one in messages),
                "sent": sum(one.calls * SENT_BYTES[one.collective](one.size, one.ranks or ranks) for one in messages),
                "microseconds": Spread.of([1e6 * value for value in seconds[name]]).to_json(),
                "times_psum": ratios(seconds[name], seconds[BASELINE]).to_json(),
                "seconds": seconds[name],
            }
        )
    return rows


def winners(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each number of ranks and size those that take at most 5 % more than the fastest one."""
    found = []
    for ranks, size in dict.fromkeys((row["ranks"], row["bytes"]) for row in rows):
        here = {
            row["reduction"]: row["times_psum"]["median"]
            for row in rows
            if (row["ranks"], row["bytes"]) == (ranks, size)
        }
        fastest = sorted((time, name) for name, time in here.items() if time <= 1.05 * min(here.values()))
        found.append({"ranks": ranks, "bytes": size, "fastest": [name for _, name in fastest]})
    return found


def main() -> None:
    """Measure all sizes turn by turn, report."""
    parser = arguments("Sums over ranks, on faked devices.", rounds=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of a rank's array")
    options = parser.parse_args()
    warn_if_busy()
    ensure_devices(MeshSpec(tp=max(RANKS)), "cpu")
    rows = [row for ranks in RANKS for size in options.sizes for row in measure(ranks, size, options.rounds)]
    show(
        f"Sums of float32 on faked devices, {cores()} cores, {options.rounds} rounds: median (min-max)",
        ["ranks", "message", "reduction", "steps", "sent", "us", "times psum"],
        [
            (
                row["ranks"],
                human_bytes(row["bytes"]),
                row["reduction"],
                row["steps"],
                human_bytes(row["sent"]),
                Spread(**row["microseconds"]),
                Spread(**row["times_psum"]),
            )
            for row in rows
        ],
        left=3,
    )
    best = winners(rows)
    show(
        "Fastest, or within 5 %",
        ["ranks", "message", "reductions"],
        [(row["ranks"], human_bytes(row["bytes"]), ", ".join(row["fastest"])) for row in best],
        left=3,
    )
    write(options.out, "reductions", {"rounds": options.rounds, "rows": rows, "fastest": best})
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        if row["ranks"] == max(RANKS) and row["reduction"] != BASELINE:
            lines.setdefault(row["reduction"], []).append((row["bytes"], Spread(**row["times_psum"])))
    draw_lines(
        options.out / "reductions.png",
        f"Sums of float32 over {max(RANKS)} faked devices, {cores()} cores",
        "bytes of a rank's array",
        "time, psum = 1",
        lines,
    )


if __name__ == "__main__":
    main()
