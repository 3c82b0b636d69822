"""One MoE layer with experts over 8 faked devices: every dispatch, against XLA's partitioner and `ragged_dot`.

python -m benchmarks.moe_layer

All run on one core, so that times are those of all ranks' work together, not of the fullest rank. The bound is one
device that sends all rows through one FFN: the same FLOPs in two large products.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    Spread,
    arguments,
    draw_lines,
    interleave,
    ratios,
    show,
    use_one_core,
    warn_if_busy,
    write,
)
from benchmarks.moe_programs import CAPACITY, CHOICES, HIDDEN, NODE, RANKS, SPEC, WIDTH, Problem, Program
from jaxpar.devices import ensure_devices
from jaxpar.tables import human_bytes

BOUND, TILED = "one device, one FFN", "one device, tiles"
OURS: dict[str, dict[str, Any]] = {
    "standard": {"name": "standard"},
    "all_to_all": {"name": "all_to_all"},
    "all_to_all, deduplicated": {"name": "all_to_all", "moe_deduplicate": True},
    "ragged, emulated": {"name": "ragged"},
    "two_level": {"name": "two_level"},
}
DROPS, DENSE, SORTED = f"XLA, capacity {CAPACITY}", "XLA, all experts", "XLA, ragged_dot"
GATHERED = "gathered, ragged_dot"
SLOW = (DENSE, SORTED, GATHERED)
"""Those that multiply all tokens by all experts' weights."""
JUDGED = ("standard", "all_to_all")
LEAST_GAIN = {16: 10.0, 64: 30.0}
"""How many times as fast as the best of those with `ragged_dot`, by experts."""
_TOLERANCE = 1e-4


def programs(problem: Problem) -> dict[str, Program]:
    """Everyone who takes turns at a problem."""
    return {
        BOUND: problem.one_device(plain=True),
        TILED: problem.one_device(plain=False),
        **{name: problem.dispatch(**fields) for name, fields in OURS.items()},
        DROPS: problem.automatic("capacity"),
        DENSE: problem.automatic("dense"),
        SORTED: problem.automatic("ragged_dot"),
        GATHERED: problem.gathered_ragged_dot(),
    }


def measure(problem: Problem, rounds: int) -> list[dict[str, Any]]:
    """The rows of one problem; all that drop nothing must give the same result."""
    contestants = programs(problem)
    expected, wrong = contestants[TILED].result(), {}
    for name, program in contestants.items():
        wrong[name] = int((np.abs(program.result() - expected).max(axis=1) > _TOLERANCE).sum())
        if wrong[name] and name not in (BOUND, DROPS):
            sys.exit(f"{name} does not give what one device gives at {problem}: {wrong[name]} rows differ")
    fast = {name: program.turn for name, program in contestants.items() if name not in SLOW}
    seconds = interleave(fast, rounds)
    seconds |= interleave({name: contestants[name].turn for name in SLOW}, max(2, rounds // 4), warm_up=0)
    return [
        {
            "tokens": problem.tokens,
            "experts": problem.experts,
            "routing": problem.routing,
            "program": name,
            "milliseconds": Spread.of([1e3 * value for value in seconds[name]]).to_json(),
            "times_bound": _over(seconds, name, BOUND).to_json(),
            "times_capacity": _over(seconds, name, DROPS).to_json(),
            "sent_bytes": program.sent_bytes,
            "temporary_bytes": program.temporary_bytes,
            "wrong_rows": None if name == BOUND else wrong[name],
            "seconds": seconds[name],
        }
        for name, program in contestants.items()
    ]


def _over(seconds: dict[str, list[float]], name: str, other: str) -> Spread:
    """Ratios round by round; the slow ones have fewer rounds, and of the other its median."""
    mine, theirs = seconds[name], seconds[other]
    return ratios(mine, theirs if len(mine) == len(theirs) else [Spread.of(theirs).median] * len(mine))


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Goals that ours do not reach."""
    found = []
    for tokens, experts, routing in dict.fromkeys((row["tokens"], row["experts"], row["routing"]) for row in rows):
        here = {
            row["program"]: row
            for row in rows
            if (row["tokens"], row["experts"], row["routing"]) == (tokens, experts, routing)
        }
        milliseconds = {name: row["milliseconds"]["median"] for name, row in here.items()}
        at = f"{tokens} tokens, {experts} experts, {routing}"
        best = min(JUDGED, key=lambda name: milliseconds[name])
        if here[best]["times_capacity"]["median"] > 1:
            found.append(f"{best} takes {here[best]['times_capacity']['median']:.2f} times {DROPS} at {at}")
        gain = min(milliseconds[name] for name in (SORTED, GATHERED)) / milliseconds[best]
        if gain < LEAST_GAIN.get(experts, 0):
            found.append(f"{best} is {gain:.1f} times as fast as the best ragged_dot at {at}")
    return found


def main() -> None:
    """Measure all problems turn by turn, report."""
    parser = arguments("One MoE layer over 8 faked devices.", rounds=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096], help="tokens, of two choices each")
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 64], help="experts")
    options = parser.parse_args()
    warn_if_busy()
    use_one_core()
    ensure_devices(SPEC, "cpu")
    rows = []
    for tokens in options.tokens:
        for experts in options.experts:
            for routing in ("uniform", "Zipf"):
                rows += measure(Problem(tokens, experts, routing), options.rounds)
                print(f"{tokens} tokens, {experts} experts, {routing}: done", file=sys.stderr)
    not_reached = missed(rows)
    report({"rounds": options.rounds, "rows": rows, "missed": not_reached}, options.out)
    if not_reached:
        sys.exit("missed: " + "; ".join(not_reached))


def report(found: dict[str, Any], out: Path) -> None:
    """Table, JSON and picture."""
    rows = found["rows"]
    show(
        f"MoE layer, hidden {HIDDEN}, width {WIDTH}, top-{CHOICES}, float32, {RANKS} faked devices in nodes of {NODE}, "
        "one core: median (min-max)",
        ["tokens", "experts", "routing", "program", "ms", "times bound", "times capacity", "sent a rank",
         "temp. a rank", "wrong rows"],
        [
            (
                row["tokens"],
                row["experts"],
                row["routing"],
                row["program"],
                Spread(**row["milliseconds"]),
                Spread(**row["times_bound"]),
                Spread(**row["times_capacity"]),
                human_bytes(row["sent_bytes"]),
                human_bytes(row["temporary_bytes"]),
                "" if row["wrong_rows"] is None else row["wrong_rows"],
            )
            for row in rows
        ],
        left=4,
    )  # fmt: skip
    write(out, "moe_layer", found)
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        if (row["tokens"], row["routing"]) == (rows[0]["tokens"], "uniform") and row["program"] not in (BOUND, TILED):
            lines.setdefault(row["program"], []).append((row["experts"], Spread(**row["times_bound"])))
    draw_lines(
        out / "moe_layer.png",
        f"MoE layer, {rows[0]['tokens']} tokens over {RANKS} faked devices, top-{CHOICES}, one core",
        "experts",
        "time, one FFN of all rows = 1",
        lines,
    )


if __name__ == "__main__":
    main()
