"""The best plans compiled for the cluster's devices: the compiler's memory and bytes beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from jaxpar.aot.compile import CompiledStep, compile_step
from jaxpar.aot.targets import Target, require_compiler
from jaxpar.errors import PlanError
from jaxpar.ledger.predict import predict_traffic
from jaxpar.plan import Phase
from jaxpar.planner.buffers import buffers_of
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.estimate import Estimate, Pool
from jaxpar.planner.evaluate import Question
from jaxpar.planner.memory import cache_of, memory_of
from jaxpar.tables import human_bytes, table


@dataclass(frozen=True)
class Pair:
    """What was predicted, and what the compiler says."""

    predicted: int
    compiled: int


@dataclass(frozen=True)
class Checked:
    """The largest step of a phase of plan number `plan`; figures are bytes of one device, "flops" its FLOPs.

    "weights", "cache", "temporaries" (activations, buffers, and what the compiler adds) and "sent", an iteration of a
    loop whose trips are not known counted once.
    """

    plan: int
    phase: Phase
    mesh: str
    fits: bool
    seconds: float
    pairs: dict[str, Pair]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def target_of(cluster: Cluster) -> Target:
    """What the cluster's devices are to a compiler, which is installed.

    Raises:
        PlanError: no compiler knows them.
        MeshError: its package is not installed.
    """
    if cluster.target is None:
        raise PlanError(f"--check compiles for kinds of devices, and {cluster.name} is a preset: write h200-8x4 or so")
    target = Target.parse(cluster.target)
    require_compiler(target)
    return target


def check(
    question: Question, target: Target, best: Sequence[Estimate], say: Callable[[str], None] = lambda text: None
) -> Iterator[Checked]:
    """Compile each of the plans, for prefill and for decode.

    Raises:
        MeshError: the target has no such devices.
    """
    for number, one in enumerate(best, 1):
        for pool, phase in _phases(one):
            say(f"compiling plan {number}, {phase}: {pool.plan.mesh}")
            yield _checked(question, target, number, pool, phase)


def _phases(one: Estimate) -> list[tuple[Pool, Phase]]:
    return [(one.pools[0], "prefill"), (one.pools[-1], "decode")]


def _checked(question: Question, target: Target, number: int, pool: Pool, phase: Phase) -> Checked:
    config, plan, workload = question.config, pool.plan, question.workload
    batch, context = (pool.replicas, workload.input) if phase == "prefill" else (pool.batch, workload.longest)
    found = compile_step(config, plan, target, phase, batch, context)
    # What is compiled is of the plan's dtype throughout.
    assumed, memory = replace(question.assumed, weight_dtype=None, kv_dtype=None), found.memory
    weights = memory_of(config, plan, question.cluster.device, workload, assumed, batch).weight_bytes
    left = memory.total - memory.weights - memory.cache - memory.inputs
    step = found.step.batches[0]
    pairs = {
        "weights": Pair(weights, memory.weights),
        "cache": Pair(cache_of(config, plan, context, assumed, batch), memory.cache),
        "temporaries": Pair(sum(buffers_of(step, question.cluster.device)), left),
        **_sent(found),
    }
    return Checked(number, phase, str(plan.mesh), found.fits, found.compile_seconds, pairs)


def _sent(found: CompiledStep) -> dict[str, Pair]:
    if not found.compiled:
        return {}
    predicted = sum(row.sent_bytes for row in predict_traffic(found.step))
    return {
        "sent": Pair(predicted, sum(row.sent_bytes for row in found.sent)),
        "flops": Pair(sum(found.predicted_flops.values()), sum(found.flops.values())),
    }


def check_table(rows: Sequence[Checked], target: Target) -> Table:
    """Predicted / compiled, of each plan and phase."""
    names = ("weights", "cache", "temporaries", "sent", "flops")
    shown = [
        [
            row.plan, row.phase, row.mesh,
            *(_shown(name, row.pairs[name]) if name in row.pairs else "" for name in names),
            "yes" if row.fits else "no", f"{row.seconds:.0f} s",
        ]
        for row in rows
    ]  # fmt: skip
    title = f"Compiled for {target}: predicted / the compiler's own, of one device and the largest step"
    return table(title, ["#", "phase", "mesh", *names, "fits", "took"], shown, left=3)


def _shown(name: str, pair: Pair) -> str:
    if name == "flops":
        return f"{pair.predicted / 1e9:.4g} / {pair.compiled / 1e9:.4g} G"
    return f"{human_bytes(pair.predicted)} / {human_bytes(pair.compiled)}"
