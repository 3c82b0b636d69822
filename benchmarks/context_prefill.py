"""Causal prefill attention over cp: rings in three layouts, all-gather and Ulysses on 8 faked devices, against others.

python -m benchmarks.context_prefill

Times are also given over those of one device with the same code; "plain" is a blockwise softmax on one device, as one
writes it, and what the goal is over. All run on one core, so that times are those of all ranks' work together, not of
the slowest rank: what that one has to do stands beside them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    Spread,
    arguments,
    draw_lines,
    figure,
    interleave,
    ratios,
    show,
    use_one_core,
    warn_if_busy,
    write,
)
from benchmarks.context_programs import QUERY_HEADS, SIZE, TILES, Problem, Program
from benchmarks.random_model import llama
from jaxpar.devices import ensure_devices
from jaxpar.ledger.steps import make_steps
from jaxpar.ledger.work import Work, prefill_work
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.tables import human_bytes

RANKS = 8
FLOOR, PLAIN = "one device", "one device, plain"
OURS = {
    "ring, zigzag": ("ring", "zigzag"),
    "ring, striped": ("ring", "striped"),
    "ring, contiguous": ("ring", "contiguous"),
    "all_gather, zigzag": ("all_gather", "zigzag"),
    "ulysses, contiguous": ("ulysses", "contiguous"),
}
PACKAGE, AUTOMATIC = "ringattention", ("XLA, online softmax", "XLA, dot_product_attention")
GOALS = {PLAIN: 1.1, PACKAGE: 1 / 1.4, AUTOMATIC[0]: 1 / 2, AUTOMATIC[1]: 1 / 2}
"""Times of the balanced rings over those of others, at most."""
JUDGED = ("ring, zigzag", "ring, striped")
MOST_SCORES = 8192
"""`dot_product_attention` keeps all scores: beyond this length gigabytes."""


def programs(problem: Problem, best: dict[str, tuple[int, int]]) -> dict[str, Program]:
    """Everyone who takes turns at a problem."""
    found: dict[str, Program | None] = {FLOOR: problem.one_device(best[FLOOR]), PLAIN: problem.blockwise(best[PLAIN])}
    found |= {name: problem.strategy(*which, RANKS) for name, which in OURS.items()}
    found[PACKAGE] = problem.ringattention(RANKS)
    found[AUTOMATIC[0]] = problem.automatic(False, RANKS)
    if problem.length <= MOST_SCORES:
        found[AUTOMATIC[1]] = problem.automatic(True, RANKS)
    return {name: program for name, program in found.items() if program is not None}


def best_tiles(kv_heads: int, length: int) -> dict[str, tuple[int, int]]:
    """The tile with which each program of one device is fastest."""
    problem, found = Problem(length, kv_heads), {}
    for name, program in ((FLOOR, problem.one_device), (PLAIN, problem.blockwise)):
        seconds = interleave({str(tile): program(tile).turn for tile in TILES}, 3)
        found[name] = min(TILES, key=lambda tile: min(seconds[str(tile)]))
    return found


def work(problem: Problem, which: tuple[str, str]) -> Work:
    """Pairs of queries and keys of each rank, as a session deals the tokens."""
    config = replace(llama(1, 64, 64, QUERY_HEADS, problem.kv_heads, 64), max_position_embeddings=problem.length)
    plan = Plan(MeshSpec(cp=RANKS), prefill_attention=which[0], layout=which[1], chunk=problem.length)
    return prefill_work(make_steps(config, plan, "prefill", 1, problem.length), problem.length)


def measure(problem: Problem, best: dict[str, tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """The rows of one problem; all must give the same result."""
    contestants = programs(problem, best)
    expected = contestants[FLOOR].result()
    for name, program in contestants.items():
        if np.abs(program.result() - expected).max() > 1e-4:
            sys.exit(f"{name} does not give what one device gives at {problem}")
    # The comparison was everyone's warm-up.
    turns = {name: program.turn for name, program in contestants.items()}
    seconds = interleave(turns, rounds, warm_up=1 if problem.length <= MOST_SCORES else 0)
    rows = []
    for name, program in contestants.items():
        counted = work(problem, OURS[name]) if name in OURS else None
        rows.append(
            {
                "tokens": problem.length,
                "kv_heads": problem.kv_heads,
                "program": name,
                "milliseconds": Spread.of([1e3 * value for value in seconds[name]]).to_json(),
                "times_one_device": ratios(seconds[name], seconds[FLOOR]).to_json(),
                "sent_bytes": program.sent_bytes,
                "temporary_bytes": program.temporary_bytes,
                "imbalance": counted and counted.imbalance,
                "excess": counted and counted.excess,
                "goals": {
                    other: ratios(seconds[name], seconds[other]).median
                    for other in GOALS
                    if name in JUDGED and other in seconds
                },
                "seconds": seconds[name],
            }
        )
    return rows


def temporaries(problem: Problem) -> list[dict[str, Any]]:
    """Temporaries of a rank as cp grows."""
    return [
        {"program": name, "bytes": {cp: problem.strategy(*OURS[name], cp).temporary_bytes for cp in (2, 4, 8)}}
        for name in ("ring, zigzag", "all_gather, zigzag", "ulysses, contiguous")
    ]


def main() -> None:
    """Measure all lengths turn by turn, report."""
    parser = arguments("Causal prefill attention over cp.", rounds=9)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="tokens of the prompt"
    )
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2], help="KV heads, for 8 query heads of 64")
    options = parser.parse_args()
    warn_if_busy()
    use_one_core()
    ensure_devices(MeshSpec(cp=RANKS), "cpu")
    rows, best = [], {}
    for kv_heads in options.kv_heads:
        best[kv_heads] = best_tiles(kv_heads, min(options.lengths))
        for length in options.lengths:
            # A turn at twice the length takes four times as long.
            rounds = max(2, options.rounds * min(options.lengths) // length)
            rows += measure(Problem(length, kv_heads), best[kv_heads], rounds)
            print(f"{length} tokens, {kv_heads} KV heads: {rounds} rounds done", file=sys.stderr)
    shrinking = temporaries(Problem(min(options.lengths, key=lambda length: abs(length - 8192)), options.kv_heads[0]))
    missed = [
        f"{row['program']} over {other} at {row['tokens']} tokens, {row['kv_heads']} KV heads: {ratio:.2f}"
        for row in rows
        for other, ratio in row["goals"].items()
        if ratio > GOALS[other]
    ]
    report(
        {"rounds": options.rounds, "tiles": best, "rows": rows, "temporaries": shrinking, "missed": missed}, options.out
    )
    if missed:
        sys.exit("missed: " + "; ".join(missed))


def report(found: dict[str, Any], out: Path) -> None:
    """Tables, JSON and picture."""
    rows = found["rows"]
    show(
        f"Causal attention, {QUERY_HEADS} query heads of {SIZE}, float32, cp={RANKS} on one core: median (min-max)",
        ["tokens", "KV heads", "program", "ms", "times one device", "ns a pair", "sent a rank", "temp. a rank",
         "slowest / mean", "computed / seen"],
        [
            (
                row["tokens"],
                row["kv_heads"],
                row["program"],
                Spread(**row["milliseconds"]),
                Spread(**row["times_one_device"]),
                figure(1e6 * row["milliseconds"]["median"] / pairs(row["tokens"])),
                human_bytes(row["sent_bytes"]),
                human_bytes(row["temporary_bytes"]),
                f"{row['imbalance']:.2f}" if row["imbalance"] else "",
                f"{row['excess']:.3f}" if row["excess"] else "",
            )
            for row in rows
        ],
        left=3,
    )  # fmt: skip
    show(
        "Temporaries of a rank",
        ["program", *(f"cp={cp}" for cp in found["temporaries"][0]["bytes"])],
        [(row["program"], *map(human_bytes, row["bytes"].values())) for row in found["temporaries"]],
    )
    write(out, "context_prefill", found)
    heads = rows[0]["kv_heads"]
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        if row["kv_heads"] == heads and row["program"] != FLOOR:
            lines.setdefault(row["program"], []).append((row["tokens"], Spread(**row["times_one_device"])))
    draw_lines(
        out / "context_prefill.png",
        f"Causal attention over cp={RANKS} against one device, {heads} KV heads, one core",
        "tokens",
        "time, one device = 1",
        lines,
    )


def pairs(tokens: int) -> int:
    """Pairs of a query and a key that it sees, in all heads."""
    return QUERY_HEADS * tokens * (tokens + 1) // 2


if __name__ == "__main__":
    main()
