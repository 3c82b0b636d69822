"""Explicit against automatic: the step programs, and the same model left to XLA's partitioner, on 8 faked devices.

python -m benchmarks.automatic
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.automatic_program import Automatic
from benchmarks.common import Spread, arguments, cores, draw_bars, interleave, ratios, show, warn_if_busy, write
from benchmarks.random_model import RandomReader, llama
from jaxpar.attention.cache import Cache, cache_shapes
from jaxpar.batch import StepBatch, StepOutput
from jaxpar.checkpoint.load import load_weights
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.ledger.hlo import HloCollective, parse_collectives
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs, Weights
from jaxpar.tables import human_bytes
from jaxpar.vocabulary.sampling import SamplingArrays

MESHES = ("tp=8", "dp=2,tp=4")
# Heads divide every tp here, so that nothing is copied or padded and both hold the same weights.
MODEL = llama(layers=8, hidden=1024, ffn=2816, queries=16, keys=8, vocabulary=32000)


@dataclass(frozen=True)
class Work:
    """One step: `lanes` requests, `tokens` new ones of each after `stored`, run `repeats` times a turn."""

    phase: Phase
    lanes: int
    tokens: int
    stored: int
    repeats: int

    @property
    def label(self) -> str:
        """As the table names it."""
        if self.phase == "decode":
            return f"decode {self.lanes}, context {self.stored}"
        return f"prefill {self.lanes} x {self.tokens}"


LEAST_NOISE = 0.02
"""Two compilations of the same program, or the same one in other memory, differ by this much."""

WORK = (Work("decode", 8, 1, 511, repeats=5), Work("prefill", 2, 256, 0, repeats=1))


@dataclass
class Contestant:
    """A compiled step with its arguments. The same batch runs again and again: it writes the same keys every time."""

    compiled: Any
    weights: Weights
    cache: Any
    batch: Any

    @classmethod
    def of(cls, step: Any, shardings: Any, weights: Weights, cache: Cache, batch: StepBatch) -> Contestant:
        """Compile `step` for numpy arguments, which go where `shardings` say."""
        cache, batch = jax.device_put((cache, batch), shardings)
        return cls(step.lower(weights, cache, batch).compile(), weights, cache, batch)

    def step(self) -> StepOutput:
        """One step to its end, as a loop of requests must wait for its tokens."""
        self.cache, output = self.compiled(self.weights, self.cache, self.batch)
        jax.block_until_ready(output)
        return output

    def turn(self, repeats: int) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(repeats):
            self.step()
        return (time.perf_counter() - start) / repeats

    def costs(self, sizes: dict[str, int]) -> dict[str, Any]:
        """What the compiler says: bytes that a rank sends and of its temporaries, and the collectives."""
        found = [row for row in parse_collectives(self.compiled.as_text(), sizes) if row.axes != ()]
        return {
            "sent_bytes": sum(row.sent_bytes for row in found),
            "temporary_bytes": self.compiled.memory_analysis().temp_size_in_bytes,
            "calls": sum(row.calls for row in found),
            "collectives": _collectives(found),
        }


def _collectives(found: list[HloCollective]) -> list[dict[str, Any]]:
    totals: dict[tuple[str, str], list[int]] = {}
    for row in found:
        axes = "no axes of the mesh" if row.axes is None else ",".join(row.axes)
        total = totals.setdefault((row.collective, axes + (f" per {row.per}" if row.per else "")), [0, 0])
        total[0] += row.calls
        total[1] += row.sent_bytes
    return [
        {"collective": collective, "axes": axes, "calls": calls, "sent_bytes": sent}
        for (collective, axes), (calls, sent) in totals.items()
    ]


def example(programs: Programs, work: Work) -> tuple[Cache, StepBatch]:
    """A cache that holds `work.stored` random tokens of each request, and the step that follows, as numpy arrays."""
    plan, rng = programs.plan, np.random.default_rng(0)
    lanes = work.lanes // plan.mesh.dp
    width = -(-(work.stored + work.tokens) // plan.page_size)
    table = np.tile(np.arange(lanes * width, dtype=np.int32).reshape(lanes, width), (plan.mesh.dp, 1))
    shapes = cache_shapes(programs.planes, lanes * width, plan)
    planes = [
        {name: rng.standard_normal(plane.shape, np.float32) for name, plane in slot.items()} for slot in shapes.planes
    ]
    slots = np.arange(width * plan.page_size, dtype=np.int32)
    held = np.tile(np.where(slots < work.stored, slots, -1), work.lanes).reshape(shapes.positions.shape)
    tokens = rng.integers(0, programs.config.vocab_size, (work.lanes, work.tokens)).astype(np.int32)
    positions = np.tile(np.arange(work.stored, work.stored + work.tokens, dtype=np.int32), (work.lanes, 1))
    start, last = (np.full(work.lanes, value, np.int32) for value in (work.stored, work.tokens - 1))
    zeros = np.zeros(work.lanes, np.int32)
    options = SamplingArrays(
        zeros.astype(np.float32), zeros, np.ones(work.lanes, np.float32), zeros.astype(np.uint32), zeros
    )
    return Cache(planes, held), StepBatch(tokens, positions, start[:, None], table, last, options)


def measure(mesh_text: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of one mesh."""
    spec = MeshSpec.parse(mesh_text)
    mesh = make_mesh(spec, ensure_devices(spec, "cpu"))
    plan, reader = Plan(mesh=spec), RandomReader(MODEL)
    programs, automatic = Programs(MODEL, plan, mesh), Automatic(MODEL, plan, mesh)
    weights = load_weights(programs.weights, reader, mesh), automatic.load(reader)
    rows = []
    for work in WORK:
        row = {"mesh": mesh_text, "work": work.label, **compare(programs, automatic, *weights, work, rounds)}
        print(f"{mesh_text}, {work.label}: automatic / explicit {Spread(**row['ratio'])}", file=sys.stderr)
        rows.append(row)
    return rows


def compare(
    programs: Programs, automatic: Automatic, explicit_weights: Weights, weights: Weights, work: Work, rounds: int
) -> dict[str, Any]:
    """Compile one step both ways, check that they agree, and let them take turns."""
    cache, batch = example(programs, work)
    shardings = programs.sharded((programs.cache_specs(), programs.batch_specs(work.phase)))
    ours = Contestant.of(programs.step(work.phase), shardings, explicit_weights, cache, batch)
    cache, batch = automatic.arguments(cache, batch)
    theirs = Contestant.of(automatic.step(work.phase), automatic.shardings()[1:], weights, cache, batch)
    check_same(ours.step(), theirs.step(), f"{programs.plan.mesh}, {work.label}")
    seconds = interleave(
        {
            "explicit": lambda: ours.turn(work.repeats),
            "automatic": lambda: theirs.turn(work.repeats),
            "explicit again": lambda: ours.turn(work.repeats),
        },
        rounds,
    )
    sizes = programs.plan.mesh.sizes
    costs = {"explicit": ours.costs(sizes), "automatic": theirs.costs(sizes)}
    return {**judge(seconds, costs), "costs": costs}


def check_same(ours: StepOutput, theirs: StepOutput, where: str) -> None:
    """Refuse to compare programs that do not choose the same tokens."""
    tokens = np.asarray(ours.token), np.asarray(theirs.token).reshape(-1)
    logprobs = np.asarray(ours.logprob), np.asarray(theirs.logprob).reshape(-1)
    if (tokens[0] != tokens[1]).any() or not np.allclose(*logprobs, atol=1e-3):
        raise SystemExit(f"{where}: explicit chose {tokens[0]} {logprobs[0]}, automatic {tokens[1]} {logprobs[1]}")


def judge(seconds: dict[str, list[float]], costs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Times, and whether explicit is slower by more than noise or sends more.

    The noise is how far two turns of the same explicit program lie apart within a round, in the median, and at least
    LEAST_NOISE.
    """
    explicit = [(a + b) / 2 for a, b in zip(seconds["explicit"], seconds["explicit again"], strict=True)]
    ratio = ratios(seconds["automatic"], explicit)
    pairs = zip(seconds["explicit again"], seconds["explicit"], strict=True)
    noise = max(LEAST_NOISE, Spread.of([abs(again / first - 1) for again, first in pairs]).median)
    return {
        "milliseconds": {
            "explicit": Spread.of([1e3 * value for value in explicit]).to_json(),
            "automatic": Spread.of([1e3 * value for value in seconds["automatic"]]).to_json(),
        },
        "ratio": ratio.to_json(),
        "noise": noise,
        "as_fast": ratio.median >= 1 - noise,
        "sends_no_more": costs["explicit"]["sent_bytes"] <= costs["automatic"]["sent_bytes"],
        "seconds": seconds,
    }


def main() -> None:
    """Measure both meshes, report."""
    options = arguments("Explicit step programs against XLA's automatic partitioning.", rounds=15).parse_args()
    warn_if_busy()
    ensure_devices(MeshSpec(tp=8), "cpu")
    rows = [row for mesh in MESHES for row in measure(mesh, options.rounds)]
    report(rows, options.rounds, options.out)
    if not all(row["as_fast"] and row["sends_no_more"] for row in rows):
        sys.exit("explicit is slower than automatic, or sends more")


def report(rows: list[dict[str, Any]], rounds: int, out: Path) -> None:
    """Table, JSON and picture."""

    def verdict(row: dict[str, Any]) -> str:
        return "SLOWER" if not row["as_fast"] else "met" if row["sends_no_more"] else "SENDS MORE"

    def both(row: dict[str, Any], figure: str) -> tuple[str, ...]:
        return tuple(human_bytes(row["costs"][name][figure]) for name in ("explicit", "automatic"))

    show(
        f"Explicit (E) against automatic (A), 8 faked devices on {cores()} cores, {rounds} rounds: median (min-max)",
        ["mesh", "step", "E ms", "A ms", "A / E", "noise", "E sends", "A sends", "E temp.", "A temp.", ""],
        [
            (
                row["mesh"],
                row["work"],
                *(Spread(**row["milliseconds"][name]) for name in ("explicit", "automatic")),
                Spread(**row["ratio"]),
                f"{100 * row['noise']:.2g}%",
                *both(row, "sent_bytes"),
                *both(row, "temporary_bytes"),
                verdict(row),
            )
            for row in rows
        ],
        left=2,
    )
    write(out, "automatic", {"rounds": rounds, "rows": rows})
    draw_bars(
        out / "automatic.png",
        f"XLA's automatic partitioning against explicit, 8 faked devices on {cores()} cores",
        "automatic / explicit",
        [f"{row['mesh']}\n{row['work']}" for row in rows],
        {
            "time": [Spread(**row["ratio"]) for row in rows],
            "bytes sent": [
                Spread.of([row["costs"]["automatic"]["sent_bytes"] / row["costs"]["explicit"]["sent_bytes"]])
                for row in rows
            ],
        },
        parity=True,
    )


if __name__ == "__main__":
    main()
