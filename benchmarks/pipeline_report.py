"""The report of `benchmarks/pipeline.py`: tables, JSON and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import Spread, draw_bars, show, write
from jaxpar.tables import human_bytes

Row = dict[str, Any]


def report(
    prefill: list[Row],
    decode: list[Row],
    stages: list[Row],
    *,
    rounds: int,
    chunk: int,
    requests: int,
    tokens: int,
    out: Path,
) -> None:
    """Tables, JSON and picture of the three measurements: `chunk` tokens a step, `tokens` of each of `requests`."""
    show(
        f"Prefill of one prompt in chunks of {chunk} on one core, {rounds} rounds: median (min-max)",
        ["prompt", "mesh", "chunks", "ticks", "idle", "ms", "times one device", "ticks / chunks", "FLOPs / one device",
         "all send", "messages in turn"],
        [
            (
                *(row[key] for key in ("length", "mesh", "chunks", "ticks")),
                f"{row['idle_share']:.2%}",
                Spread(**row["milliseconds"]),
                Spread(**row["times_one_device"]),
                f"{row['ticks_over_chunks']:.3f}",
                f"{row['flops_times_one_device']:.3f}",
                human_bytes(row["sent_by_all"]),
                row["messages_in_turn"],
            )
            for row in prefill
        ],
        left=2,
    )  # fmt: skip
    show(
        f"Decode of {requests} requests, {tokens} tokens each, on one core",
        [
            "mesh",
            "groups",
            "ticks",
            "idle",
            "idle, without end",
            "tokens/s",
            "times one device",
            "a core a stage: tokens/s",
        ],
        [
            (
                *(row[key] for key in ("mesh", "groups", "ticks")),
                f"{row['idle_share']:.2%}",
                f"{row['idle_without_end']:.2%}",
                *(Spread(**row[key]) for key in ("tokens_a_second", "times_one_device", "tokens_a_second_core_each")),
            )
            for row in decode
        ],
    )
    show(
        f"A decode tick of 4 stages, {requests // 4} requests each, with a head of 3.5 layers, on one core",
        ["layers", "slots", "ms of all stages", "stages alone, ms", "slowest alone, ms", "its work, layers"],
        [
            (
                ",".join(map(str, row["stages"])),
                row["slots"],
                *(Spread(**row[key]) for key in ("tick", "stages_alone", "slowest_alone")),
                f"{row['work_of_slowest']:.2f}",
            )
            for row in stages
        ],
    )
    write(out, "pipeline", {"rounds": rounds, "prefill": prefill, "decode": decode, "stages": stages})
    staged = [row for row in prefill if row["mesh"].startswith("pp")]

    def exactly(key: str) -> list[Spread]:
        return [Spread.of([row[key]]) for row in staged]

    draw_bars(
        out / "pipeline.png",
        f"Prefill in chunks of {chunk} through faked stages on one core against one device",
        "one device = 1",
        [f"{row['mesh']}, {row['length']} tokens" for row in staged],
        {
            "time": [Spread(**row["times_one_device"]) for row in staged],
            "FLOPs, by the ledger": exactly("flops_times_one_device"),
            "ticks / chunks": exactly("ticks_over_chunks"),
        },
        parity=True,
    )
