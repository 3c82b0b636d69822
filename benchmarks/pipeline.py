"""Layers over stages: what prefill in chunks and decode in groups cost, on faked devices that share one core.

python -m benchmarks.pipeline

One core does the work of all stages, one after another: a time is that of all their work together, idle ticks on rows
of padding among it, and divided by the stages it is what each of them would take on a device of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.common import (
    Spread,
    arguments,
    interleave,
    ratios,
    use_one_core,
    warn_if_busy,
)
from benchmarks.pipeline_report import Row, report
from benchmarks.random_model import RandomReader, llama
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.load import load_weights
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.ledger.report import make_ledger
from jaxpar.ledger.traffic import Traffic
from jaxpar.mesh import MeshSpec
from jaxpar.pipeline.balance import layer_work
from jaxpar.pipeline.stages import layers_of_stages
from jaxpar.pipeline.timetable import decode_timetable, prefill_timetable
from jaxpar.plan import Plan
from jaxpar.program import Programs, Weights

ONE = "tp=1"
MODEL = llama(layers=4, hidden=512, ffn=1536, queries=8, keys=2, vocabulary=2048)
WITH_A_LARGE_HEAD = replace(MODEL, num_hidden_layers=12, windows=(None,) * 12, vocab_size=20480)
"""Its head is as much as 3.5 of its layers."""
CHUNK, LENGTHS, PREFILL = 128, (512, 2048), (ONE, "pp=2", "pp=4", "tp=2", "tp=4")
REQUESTS, PROMPT, STEPS = 8, 16, 8
DECODE = ((ONE, 1), ("pp=2", 1), ("pp=2", 2), ("pp=4", 1), ("pp=4", 2), ("pp=4", 4))


@dataclass
class Model:
    """A model on a mesh, and what its last turn has left: its session, ticks of it, of which idle, and tokens."""

    config: ModelConfig
    programs: Programs
    weights: Weights
    ticks: int = 0
    idle: Fraction = Fraction(0)
    chosen: tuple[int, ...] = ()

    @classmethod
    def on(cls, config: ModelConfig, mesh: str, **plan: Any) -> Model:
        """With the same random weights on every mesh."""
        spec = MeshSpec.parse(mesh)
        devices = make_mesh(spec, ensure_devices(spec, "cpu"))
        programs = Programs(config, Plan(mesh=spec, chunk=CHUNK, **plan), devices)
        return cls(config, programs, load_weights(programs.weights, RandomReader(config), devices))

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.programs.plan.mesh.pp

    def prefill(self, length: int) -> float:
        """Seconds in which a prompt is prefilled, chunk by chunk."""
        session = self._session([length], 1)
        start = time.perf_counter()
        *_, last = session.prefill()
        self.chosen = tuple(last.decoded.tokens.values())
        seconds = time.perf_counter() - start
        self._count(session)
        return seconds

    def decode(self, requests: int = REQUESTS) -> float:
        """Seconds for `STEPS` tokens of each request after a prefill that is not counted; groups follow one another."""
        session = self._session([PROMPT] * requests, STEPS + 1)
        latest = {request: token for chunk in session.prefill() for request, token in chunk.decoded.tokens.items()}
        made: list[list[int]] = [[] for _ in range(requests)]
        ticks, idle = session.pipe.ticks, session.pipe.idle
        start = time.perf_counter()
        while latest or not session.pipe.is_empty:
            for decoded in session.turn(latest):
                for request, token in decoded.tokens.items():
                    made[request].append(token)
                    if len(made[request]) < STEPS:
                        latest[request] = token
        seconds = time.perf_counter() - start
        self.chosen = tuple(token for tokens in made for token in tokens)
        self._count(session, ticks, idle)
        return seconds

    def _session(self, lengths: Sequence[int], more: int) -> Session:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, self.config.vocab_size, length).tolist() for length in lengths]
        return Session(self.programs, self.weights, prompts, [n + more for n in lengths], SamplingParams())

    def _count(self, session: Session, ticks: int = 0, idle: int = 0) -> None:
        self.ticks = session.pipe.ticks - ticks
        self.idle = Fraction(session.pipe.idle - idle, self.stages * self.ticks)


def must_agree(models: Mapping[str, Model]) -> None:
    """Stop where meshes chose different tokens."""
    if len({model.chosen for model in models.values()}) > 1:
        sys.exit(f"different tokens: { {name: model.chosen for name, model in models.items()} }")


def must_be(measured: Fraction, expected: Fraction, what: str) -> None:
    """Stop where the engine was idle in another part of its ticks than the timetable says."""
    if measured != expected:
        sys.exit(f"{what}: {measured} of all ticks idle, the timetable says {expected}")


def turns(models: Mapping[str, Model], turn: Callable[[Model], float], rounds: int) -> dict[str, list[float]]:
    """Seconds of everyone's turns, all of which must choose the same tokens."""
    seconds = interleave({name: lambda model=model: turn(model) for name, model in models.items()}, rounds)
    must_agree(models)
    return seconds


def sent_by_all(traffic: Sequence[Traffic], plan: Plan) -> int:
    """Bytes that all ranks together send; the last stage passes nothing on."""
    size = plan.mesh.size

    def senders(row: Traffic) -> int:
        return size - size // plan.mesh.pp if row.sublayer == "pipeline" else size

    return sum(row.sent_bytes * senders(row) for row in traffic)


def prefills(rounds: int) -> list[Row]:
    """One long prompt in chunks, through stages and over tp."""
    models, rows = {mesh: Model.on(MODEL, mesh) for mesh in PREFILL}, []
    for length in LENGTHS:
        seconds = turns(models, lambda model, length=length: model.prefill(length), rounds)
        flops: dict[str, int] = {}
        for mesh, model in models.items():
            plan, items = model.programs.plan, -(-length // CHUNK)
            ledger = make_ledger(MODEL, plan, "prefill", 1, length)
            flops[mesh] = sum(ledger.flops.values())
            must_be(model.idle, prefill_timetable(items, model.stages).idle_share, f"prefill of {length}, {mesh}")
            rows.append(
                {
                    "length": length,
                    "mesh": mesh,
                    "chunks": items,
                    "ticks": model.ticks,
                    "idle_share": float(model.idle),
                    "milliseconds": Spread.of([1e3 * value for value in seconds[mesh]]).to_json(),
                    "times_one_device": ratios(seconds[mesh], seconds[ONE]).to_json(),
                    "ticks_over_chunks": model.ticks / items,
                    "flops_of_a_rank": flops[mesh],
                    "flops_times_one_device": flops[mesh] * plan.mesh.size / flops[ONE],
                    "sent_by_all": sent_by_all(ledger.traffic, plan),
                    "messages_in_turn": sum(row.steps for row in ledger.traffic),
                    "seconds": seconds[mesh],
                }
            )
    return rows


def decodes(rounds: int) -> list[Row]:
    """A batch in groups that take turns, against the same batch on one device."""
    models = {f"{mesh}, {groups}": Model.on(MODEL, mesh, microbatches=groups) for mesh, groups in DECODE}
    seconds, rows = turns(models, Model.decode, rounds), []
    for (mesh, groups), (name, model) in zip(DECODE, models.items(), strict=True):
        must_be(model.idle, decode_timetable(groups, STEPS, model.stages).idle_share, f"decode, {name}")
        each = [model.stages * REQUESTS * STEPS / value for value in seconds[name]]
        rows.append(
            {
                "mesh": mesh,
                "groups": groups,
                "ticks": model.ticks,
                "idle_share": float(model.idle),
                "idle_without_end": max(0.0, 1 - groups / model.stages),
                "tokens_a_second": Spread.of([REQUESTS * STEPS / value for value in seconds[name]]).to_json(),
                "times_one_device": ratios(seconds[name], seconds[f"{ONE}, 1"]).to_json(),
                "tokens_a_second_core_each": Spread.of(each).to_json(),
                "seconds": seconds[name],
            }
        )
    return rows


def stages_alone(rounds: int) -> list[Row]:
    """Even and balanced stages of a model with a large head: a tick of all, and every stage as a model of its own."""
    config, requests = WITH_A_LARGE_HEAD, REQUESTS // 4
    cuts = {cut: Model.on(config, "pp=4", stages=cut) for cut in ("even", "balanced")}
    layers = {cut: layers_of_stages(config, model.programs.plan) for cut, model in cuts.items()}
    kinds = {(n, stage == 3) for counts in layers.values() for stage, n in enumerate(counts)}
    alone = {
        f"{n}, {with_head}": Model.on(
            replace(
                config, num_hidden_layers=n, windows=(None,) * n, vocab_size=config.vocab_size if with_head else 32
            ),
            ONE,
        )
        for n, with_head in sorted(kinds)
    }
    seconds = interleave(
        {name: lambda model=model: model.decode() for name, model in cuts.items()}
        | {name: lambda model=model: model.decode(requests) for name, model in alone.items()},
        rounds,
    )
    must_agree(cuts)
    head, rows = config.vocab_size * config.hidden_size / layer_work(config, 0), []
    for cut, model in cuts.items():
        of_stages = [f"{n}, {stage == 3}" for stage, n in enumerate(layers[cut])]
        slowest = [
            max(1e3 * each / STEPS for each in turn) for turn in zip(*(seconds[n] for n in of_stages), strict=True)
        ]
        together = [
            sum(1e3 * each / STEPS for each in turn) for turn in zip(*(seconds[n] for n in of_stages), strict=True)
        ]
        rows.append(
            {
                "stages": list(layers[cut]),
                "slots": max(layers[cut]),
                "tick": Spread.of([1e3 * value / model.ticks for value in seconds[cut]]).to_json(),
                "stages_alone": Spread.of(together).to_json(),
                "slowest_alone": Spread.of(slowest).to_json(),
                "work_of_slowest": max(n + head * (stage == 3) for stage, n in enumerate(layers[cut])),
                "seconds": seconds[cut],
            }
        )
    return rows


def main() -> None:
    """Measure all three turn by turn, report."""
    options = arguments("Layers over stages.", rounds=5).parse_args()
    warn_if_busy()
    use_one_core()
    ensure_devices(MeshSpec(pp=4), "cpu")
    rows = prefills(options.rounds), decodes(options.rounds), stages_alone(options.rounds)
    report(*rows, rounds=options.rounds, chunk=CHUNK, requests=REQUESTS, tokens=STEPS, out=options.out)


if __name__ == "__main__":
    main()
