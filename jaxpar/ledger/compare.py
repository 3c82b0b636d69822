"""What to do with more ranks of tp than KV heads: the four answers on the same devices, side by side.

8 KV heads, 16 ranks      rank 0      rank 1      ...
copies  tp=16             head 0      head 0              the cache of all ranks twice; nothing is sent for it
inside  tp=16             head 0 a    head 0 b            scores are summed over the two ranks of a head
cp      tp=8, cp=2        head 0, half the positions      partial results are exchanged
dp, ep  tp=8, dp=2        head 0, half the requests       weights twice, experts not (ep)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from numpy.typing import ArrayLike

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.devices import abstract_mesh
from jaxpar.errors import PlanError
from jaxpar.ledger.memory import Memory, memory_of
from jaxpar.ledger.predict import predict_steps
from jaxpar.ledger.rounds import loads_of
from jaxpar.ledger.steps import make_steps
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs


@dataclass(frozen=True)
class Cost:
    """What a phase costs on a rank by closed form: a decode step, or all steps of a prefill."""

    memory: Memory
    traffic: list[Traffic]
    flops: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends."""
        return sum(row.sent_bytes for row in self.traffic)

    @property
    def calls(self) -> int:
        """Collectives that it takes part in."""
        return sum(row.calls for row in self.traffic)

    @property
    def steps(self) -> int:
        """Messages that have to follow one another."""
        return sum(row.steps for row in self.traffic)


@dataclass(frozen=True)
class Answer:
    """One of the four: its name, the plan, and its cost or why it cannot run."""

    name: str
    plan: Plan
    cost: Cost | None
    refused: str

    def to_json(self) -> dict[str, Any]:
        """Every figure of one rank as plain data; `cost` is null where the plan cannot run."""
        cost = self.cost and {
            **self.cost.memory._asdict(),
            "copied_cache_bytes": self.cost.memory.copied_cache_bytes // self.plan.mesh.size,
            "sent_bytes": self.cost.sent_bytes,
            "calls": self.cost.calls,
            "steps": self.cost.steps,
            "flops": self.cost.flops,
            "traffic": [asdict(row) for row in self.cost.traffic],
        }
        mesh, split = self.plan.mesh.sizes, self.plan.kv_split
        return {"answer": self.name, "mesh": mesh, "kv_split": split, "refused": self.refused or None, "cost": cost}


def compare_answers(
    config: ModelConfig,
    plan: Plan,
    phase: Phase,
    batch: int,
    seq: int,
    sampled: bool = False,
    loads: ArrayLike | None = None,
) -> list[Answer]:
    """The four answers to `plan` having more ranks of tp than `config` has KV heads; the arguments of `make_ledger`.

    Raises:
        PlanError: tp does not exceed the KV heads, there are none, or no answer can run, for one reason.
    """
    heads, tp = config.num_key_value_heads, plan.mesh.tp
    if config.mla is not None:
        raise PlanError(
            f"a {config.model_type} caches latents that serve all heads: it has no KV heads to split or copy"
        )
    if tp <= heads:
        raise PlanError(
            f"tp={tp} does not exceed the {heads} KV heads: what to do with more ranks than heads is a question "
            f"from tp={heads + 1} on; ask for tp={2 * heads}"
        )
    layers = loads_of(config, loads)
    answers = []
    for name, candidate in candidates(config, plan):
        try:
            steps = make_steps(config, candidate, phase, batch, seq, sampled)
            programs = Programs(config, candidate, abstract_mesh(candidate.mesh))
            traffic, flops = predict_steps(steps, layers)
            cost = Cost(memory_of(programs, phase, batch, seq), traffic, sum(flops.values()))
        except PlanError as error:
            answers.append(Answer(name, candidate, None, str(error)))
        else:
            answers.append(Answer(name, candidate, cost, ""))
    if all(answer.refused == answers[0].refused != "" for answer in answers):
        raise PlanError(answers[0].refused)
    return answers


def candidates(config: ModelConfig, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plans of the four answers; in the last two tp is the most that divides the KV heads."""
    mesh = plan.mesh
    whole = math.gcd(mesh.tp, config.num_key_value_heads)
    rest = mesh.tp // whole
    yield "copies of heads", replace(plan, kv_split="replicate")
    yield "inside the head", replace(plan, kv_split="head_dim")
    requests = "ep" if config.has_experts and "ep" in plan.experts_over else "dp"
    for name, axis in (("rest to cp", "cp"), (f"rest to {requests}", requests)):
        smaller = replace(mesh, **{"tp": whole, axis: mesh.sizes[axis] * rest})
        yield name, replace(plan, mesh=smaller, kv_split="replicate")
