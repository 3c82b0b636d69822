"""Training steps for two targets: the bytes that closed forms say, held against what the compilers make of a step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.compiled_passes import Bytes, explain
from benchmarks.compiled_programs import Kept
from jaxpar.aot.every import cut_card
from jaxpar.aot.targets import Target
from jaxpar.aot.training import lowered_step, training_programs
from jaxpar.ledger.compiled import compare_compiled
from jaxpar.ledger.hlo import collectives_of
from jaxpar.ledger.hlo_text import argument_bytes, parse_module
from jaxpar.ledger.predict import local_bytes
from jaxpar.ledger.traffic import merge
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.tables import human_bytes

BATCH, LENGTH = 8, 512

CASES: tuple[tuple[str, tuple[bool, ...], str], ...] = (
    ("llama-3.1-8b", (False,), "tp=8"),
    ("llama-3.1-8b", (False,), "dp=2,tp=4"),
    ("qwen3-235b-a22b", (True,), "dp=2,ep=2,tp=2"),
)
"""A card, whether each layer of it that is left has experts, and a mesh."""

COLUMNS = ("model (layers)", "mesh", "target", "sent", "compiled", "why", "state", "compiled")


@dataclass(frozen=True)
class TrainingRow:
    """One step on one target; the state are weights and the optimizer's moments, which are written in place."""

    model: str
    layers: int
    mesh: str
    target: str
    sent: Bytes
    state: int
    compiled_state: int
    aliased: int

    @property
    def problems(self) -> list[str]:
        """What misses its goal."""
        state = [] if self.exact else [f"state: {self.state} bytes, compiled {self.compiled_state}"]
        return [f"bytes: {line}" for line in self.sent.unexplained] + state

    @property
    def exact(self) -> bool:
        """Whether the state is as it was predicted, and written in place."""
        return self.state == self.compiled_state <= self.aliased

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of a table."""
        return (
            f"{self.model} ({self.layers})",
            self.mesh,
            self.target,
            *self.sent.cells,
            human_bytes(self.state),
            "exact" if self.exact else human_bytes(self.compiled_state),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"problems": self.problems}


def training_rows(kept: Kept, targets: Mapping[str, Target], only_kept: bool) -> list[TrainingRow]:
    """A row for each case that there is; of the others each is compiled first unless `only_kept`."""
    found = []
    for model, experts, mesh in CASES:
        for text, target in targets.items():
            name = f"training {model} {mesh}: {BATCH} x {LENGTH} on {text}"
            if only_kept and not kept.has(name):
                continue
            train = training_programs(cut_card(model, experts), Plan(MeshSpec.parse(mesh)), target, BATCH, LENGTH)
            program, _ = kept.program(name, lambda train=train: lowered_step(train).compile())
            module, sizes = parse_module(program.text), train.plan.mesh.sizes
            collectives = collectives_of(module, sizes)
            traffic = merge(train.traffic())
            sent = explain(traffic, collectives, compare_compiled(traffic, collectives))
            state = local_bytes(train.abstract_state, train.state_specs, sizes)
            held = argument_bytes(module, "state")
            row = TrainingRow(model, len(experts), mesh, text, sent, state, held, program.aliased)
            print(f"{name}: {'; '.join(row.problems) or 'well'}", file=sys.stderr, flush=True)
            found.append(row)
    return found
