"""Decode over cp: a step of a small model under each strategy, as the context grows, on faked devices.

python -m benchmarks.context_decode

A whole step, since `helix` also splits the output projection and the FFN over cp, which the others compute on every
rank. All run on one core, so that times are those of all ranks' work together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
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
from benchmarks.random_model import RandomReader, llama
from jaxpar.attention.cache import Cache, cache_shapes
from jaxpar.batch import StepBatch
from jaxpar.checkpoint.load import load_weights
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.engine.sizes import pages_of, stored_by_rank
from jaxpar.layout import owner
from jaxpar.ledger.predict import predict_traffic
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step
from jaxpar.tables import human_bytes
from jaxpar.vocabulary.sampling import SamplingArrays

BATCH = 8
SIZES = (1, 2, 4, 8)
STRATEGIES = ("ag_rs", "a2a", "q_replicated", "helix")
ONE, HELIX, PLAIN = "cp=1, local", "helix", "q_replicated"
MODEL = replace(
    llama(layers=2, hidden=512, ffn=2048, queries=8, keys=2, vocabulary=1024), max_position_embeddings=2**16
)


@dataclass
class Held:
    """What the strategies of one mesh share: weights, a cache that every step takes and gives back, and a batch."""

    programs: dict[str, Programs]
    weights: Any
    cache: Any
    batch: Any
    context: int

    @classmethod
    def of(cls, cp: int, context: int) -> Held:
        """`context` tokens of each request over `cp` ranks when the step has stored its own."""
        spec = MeshSpec(cp=cp)
        mesh = make_mesh(spec, ensure_devices(spec, "cpu"))
        names = STRATEGIES if cp > 1 else ("local",)
        programs = {name: Programs(MODEL, Plan(mesh=spec, decode_attention=name), mesh) for name in names}
        any_one = programs[names[-1]]
        cache, batch = example(any_one, context)
        shardings = any_one.sharded((any_one.cache_specs(), any_one.batch_specs("decode")))
        cache, batch = jax.device_put((cache, batch), shardings)
        return cls(programs, load_weights(any_one.weights, RandomReader(MODEL), mesh), cache, batch, context)

    def step(self, name: str) -> np.ndarray:
        """The next tokens [B]. The same token is stored again and again, in the same place."""
        self.cache, output = self.programs[name].step("decode")(self.weights, self.cache, self.batch)
        return np.asarray(output.token)

    def turn(self, name: str) -> Callable[[], float]:
        """What takes the seconds of a step."""

        def seconds() -> float:
            start = time.perf_counter()
            self.step(name)
            return time.perf_counter() - start

        return seconds

    def sent(self, name: str) -> dict[str, int]:
        """Bytes that a rank sends in a step, by closed form."""
        plan = self.programs[name].plan
        keys = self.batch.table.shape[1] * plan.page_size
        found: dict[str, int] = {}
        for row in predict_traffic(Step(MODEL, plan, "decode", BATCH, 1, keys)):
            found[row.sublayer] = found.get(row.sublayer, 0) + row.sent_bytes
        return found


def example(programs: Programs, context: int) -> tuple[Cache, StepBatch]:
    """A cache of random keys, alike on every mesh, and the batch that decodes the last of `context` tokens."""
    plan, stored = programs.plan, context - 1
    width = pages_of(int(stored_by_rank(0, context, plan).max()), plan)
    slots, ranks = width * plan.page_size, plan.mesh.cp
    # Slot s of a request on rank r holds position s * ranks + r, as `owner` says.
    held = np.arange(slots)[None, :] * ranks + np.arange(ranks)[:, None]
    held = np.where(held < stored, held, -1).astype(np.int32)
    assert (owner(held, ranks) == np.arange(ranks)[:, None])[held >= 0].all()
    shapes = cache_shapes(programs.planes, BATCH * width, plan)

    def plane(seed: int, shape: tuple[int, ...]) -> np.ndarray:
        values = np.random.default_rng(seed).standard_normal((shape[1], BATCH, context, shape[-1]), np.float32)
        dealt = values[:, :, np.maximum(held, 0)].transpose(0, 2, 1, 3, 4)
        return dealt.reshape(shape)

    planes = [
        {name: plane(2 * layer + (name == "v"), kept.shape) for name, kept in slot.items()}
        for layer, slot in enumerate(shapes.planes)
    ]
    positions = np.repeat(held[:, None], BATCH, axis=1).reshape(shapes.positions.shape)
    table = np.arange(BATCH * width, dtype=np.int32).reshape(BATCH, width)
    start = np.tile((held >= 0).sum(axis=1).astype(np.int32), (BATCH, 1))
    tokens = np.random.default_rng(9).integers(0, MODEL.vocab_size, (BATCH, 1)).astype(np.int32)
    zeros = np.zeros(BATCH, np.int32)
    options = SamplingArrays(
        zeros.astype(np.float32), zeros, np.ones(BATCH, np.float32), zeros.astype(np.uint32), zeros
    )
    at = np.full((BATCH, 1), stored, np.int32)
    return Cache(planes, positions), StepBatch(tokens, at, start, table, zeros, options)


def measure(context: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one context; all must choose the same tokens."""
    meshes = {cp: Held.of(cp, context) for cp in SIZES}
    contestants = {f"cp={cp}, {name}": (held, name) for cp, held in meshes.items() for name in held.programs}
    chosen = {label: tuple(held.step(name)) for label, (held, name) in contestants.items()}
    if len(set(chosen.values())) > 1:
        sys.exit(f"different tokens at {context}: {chosen}")
    seconds = interleave({label: held.turn(name) for label, (held, name) in contestants.items()}, rounds)
    rows = []
    for label, (held, name) in contestants.items():
        sent = held.sent(name)
        plain = label.replace(name, PLAIN) if held.programs.keys() >= {PLAIN} else label
        rows.append(
            {
                "context": context,
                "cp": held.programs[name].plan.mesh.cp,
                "strategy": name,
                "milliseconds": Spread.of([1e3 * value for value in seconds[label]]).to_json(),
                "times_one": ratios(seconds[label], seconds[ONE]).to_json(),
                "times_plain": ratios(seconds[label], seconds[plain]).to_json(),
                "attention_sent": sent.get("decode_attention", 0),
                "sent": sum(sent.values()),
                "seconds": seconds[label],
            }
        )
    return rows


def main() -> None:
    """Measure all contexts turn by turn, report."""
    parser = arguments("Decode over cp.", rounds=15)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens of each request")
    options = parser.parse_args()
    warn_if_busy()
    use_one_core()
    ensure_devices(MeshSpec(cp=max(SIZES)), "cpu")
    rows = [row for context in options.contexts for row in measure(context, options.rounds)]
    report(rows, options.rounds, options.out)
    sent = {(row["cp"], row["strategy"]): row["sent"] for row in rows}
    if any(row["sent"] != sent[row["cp"], row["strategy"]] for row in rows):
        sys.exit("what a rank sends grows with the context")


def report(rows: list[dict[str, Any]], rounds: int, out: Path) -> None:
    """Table, JSON and picture."""
    show(
        f"A decode step of {BATCH} requests on one core, {rounds} rounds: median (min-max)",
        ["context", "cp", "strategy", "ms a step", "times cp=1", f"times {PLAIN}", "attention sends", "a rank sends"],
        [
            (
                row["context"],
                row["cp"],
                row["strategy"],
                *(Spread(**row[key]) for key in ("milliseconds", "times_one", "times_plain")),
                human_bytes(row["attention_sent"]),
                human_bytes(row["sent"]),
            )
            for row in rows
        ],
        left=3,
    )
    write(out, "context_decode", {"rounds": rounds, "rows": rows})
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        if row["cp"] == max(SIZES):
            lines.setdefault(row["strategy"], []).append((row["context"], Spread(**row["times_one"])))
    draw_lines(
        out / "context_decode.png",
        f"A decode step over cp={max(SIZES)} faked devices against one device, {BATCH} requests, one core",
        "cached tokens of each request",
        "time, one device = 1",
        lines,
    )


if __name__ == "__main__":
    main()
