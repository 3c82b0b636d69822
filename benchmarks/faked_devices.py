"""The cost of faking: the same requests on one device and on 8 faked ones, which share the same cores.

python -m benchmarks.faked_devices

Faked devices add no hardware, so at best they take as long as one. What they add: collectives, rank by rank overheads,
smaller products, and what every replica or rank does over again (norms under tp, reading the weights under dp).
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Spread, arguments, cores, draw_bars, interleave, ratios, show, warn_if_busy, write
from benchmarks.random_model import RandomReader, llama
from jaxpar.checkpoint.load import load_weights
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs, Weights

ONE = "tp=1"
MESHES = (ONE, "tp=8", "dp=2,tp=4", "dp=8")
MODEL = llama(layers=6, hidden=768, ffn=2048, queries=16, keys=8, vocabulary=32000)
REQUESTS, PROMPT, STEPS = 8, 64, 8


@dataclass
class Model:
    """The model on a mesh."""

    programs: Programs
    weights: Weights
    session: Session | None = None
    latest: Any = None

    @classmethod
    def on(cls, text: str) -> Model:
        """With the same random weights on every mesh."""
        spec = MeshSpec.parse(text)
        mesh = make_mesh(spec, ensure_devices(spec, "cpu"))
        programs = Programs(MODEL, Plan(mesh=spec), mesh)
        return cls(programs, load_weights(programs.weights, RandomReader(MODEL), mesh))

    def prefill(self) -> float:
        """Seconds in which all prompts are prefilled, in one step."""
        prompts = np.random.default_rng(0).integers(0, MODEL.vocab_size, (REQUESTS, PROMPT)).tolist()
        capacity = [PROMPT + STEPS] * REQUESTS
        session = Session(self.programs, self.weights, prompts, capacity, SamplingParams())
        start = time.perf_counter()
        (chunk,) = session.prefill()
        latest = chunk.decoded.tokens
        seconds = time.perf_counter() - start
        self.session, self.latest = session, latest
        return seconds

    def decode(self) -> float:
        """Seconds a step, after a prefill that is not counted."""
        self.prefill()
        assert self.session is not None
        start = time.perf_counter()
        for _ in range(STEPS):
            (decoded,) = self.session.decode(self.latest)
            self.latest = decoded.tokens
        return (time.perf_counter() - start) / STEPS

    def chosen(self) -> list[int]:
        """The latest token of every request, in the order of the requests."""
        return [self.latest[request] for request in range(REQUESTS)]


def main() -> None:
    """Measure all meshes turn by turn, report."""
    options = arguments("The cost of faked devices.", rounds=9).parse_args()
    warn_if_busy()
    ensure_devices(MeshSpec(tp=8), "cpu")
    models = {text: Model.on(text) for text in MESHES}
    rows = []
    for phase in ("prefill", "decode"):
        seconds = interleave({text: getattr(model, phase) for text, model in models.items()}, options.rounds)
        if len({tuple(model.chosen()) for model in models.values()}) > 1:
            sys.exit(f"{phase}: the meshes chose different tokens: {[model.chosen() for model in models.values()]}")
        for text in MESHES:
            rows.append(
                {
                    "mesh": text,
                    "work": f"{phase}, {REQUESTS} x {PROMPT}" if phase == "prefill" else f"{phase}, batch {REQUESTS}",
                    "milliseconds": Spread.of([1e3 * value for value in seconds[text]]).to_json(),
                    "times_one_device": ratios(seconds[text], seconds[ONE]).to_json(),
                    "seconds": seconds[text],
                }
            )
    report(rows, options.rounds, options.out)


def report(rows: list[dict[str, Any]], rounds: int, out: Path) -> None:
    """Table, JSON and picture."""
    show(
        f"Faked devices on {cores()} cores, {rounds} rounds: median (min-max)",
        ["work", "mesh", "ms a step", "times one device"],
        [(row["work"], row["mesh"], Spread(**row["milliseconds"]), Spread(**row["times_one_device"])) for row in rows],
        left=2,
    )
    write(out, "faked_devices", {"rounds": rounds, "rows": rows})
    works = list(dict.fromkeys(row["work"] for row in rows))
    draw_bars(
        out / "faked_devices.png",
        f"The same work on one device and on 8 faked ones, {cores()} cores",
        "time, one device = 1",
        works,
        {text: [Spread(**row["times_one_device"]) for row in rows if row["mesh"] == text] for text in MESHES},
        parity=True,
    )


if __name__ == "__main__":
    main()
