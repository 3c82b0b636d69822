"""For every axis, and for the batch and the chunk: what stops it from being larger, with numbers.

The next larger size takes its devices from another axis, from whichever leaves the best plan. That plan is estimated
like any other, and what it loses is named: the part whose contribution to the objective grows most, the memory that
it lacks, or the target that it misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import JaxparError
from jaxpar.heads import heads_of
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.estimate import Estimate
from jaxpar.planner.evaluate import GAIN, Evaluator, copies
from jaxpar.planner.pools import best_split, on_mesh
from jaxpar.planner.search import bare
from jaxpar.planner.shares import IDLE, contributions
from jaxpar.planner.space import CHUNKS, changed, neighbours
from jaxpar.tables import counted, human_bytes


@dataclass(frozen=True)
class Limit:
    """`name` (an axis, "batch" or "chunk") is `size`, and is not `larger` for a `reason`."""

    name: str
    size: int
    larger: int | None
    reason: str


def limits(evaluator: Evaluator, one: Estimate) -> list[Limit]:
    """What stops each axis of a deployment, its batch and its chunk; of pools those of each pool, "decode tp"."""
    if not one.apart:
        around = _Around(evaluator, one, bare(one.plan), lambda plan: evaluator.best(plan))
        return [*around.axes(AXES), _batch(evaluator, one), around.chunk()]
    first, second = (copies(pool.plan, 1) for pool in one.pools)
    # Of two copies one is what a larger replica takes.
    prefills = _Around(evaluator, one, copies(first, 2), lambda plan: best_split(evaluator, copies(plan, 1), second))
    decodes = _Around(evaluator, one, copies(second, 2), lambda plan: best_split(evaluator, first, copies(plan, 1)))
    inner = [axis for axis in AXES if axis != "dp"]
    return [
        *(replace(limit, name=f"prefill {limit.name}") for limit in [*prefills.axes(inner), prefills.chunk()]),
        *(replace(limit, name=f"decode {limit.name}") for limit in decodes.axes(inner)),
    ]


@dataclass(frozen=True)
class _Around:
    """A plan of a deployment `one`, and what the deployment would be with another plan in its place."""

    evaluator: Evaluator
    one: Estimate
    plan: Plan
    instead: Callable[[Plan], Estimate | None]

    def axes(self, axes: Iterable[str]) -> Iterator[Limit]:
        """Of each axis; ep says nothing of a model without experts."""
        has_experts = self.evaluator.question.config.has_experts
        return (self.axis(axis) for axis in axes if axis != "ep" or has_experts)

    def axis(self, axis: str) -> Limit:
        """What stops an axis."""
        plan, config = self.plan, self.evaluator.question.config
        size = plan.mesh.sizes[axis]
        meshes = [mesh for mesh in neighbours(plan.mesh) if mesh.sizes[axis] > size]
        if not meshes:
            return Limit(axis, size, None, f"all of {counted(plan.mesh.size, 'device')} are on it")
        end = nothing_to_split(config, meshes[0], axis)
        if end:
            return Limit(axis, size, meshes[0].sizes[axis], end)
        found = [(best, mesh) for mesh in meshes for best in self._on(mesh)]
        if not found:
            return Limit(axis, size, meshes[0].sizes[axis], self._why_none(meshes))
        best, mesh = max(found, key=lambda pair: self.evaluator.key(pair[0]))
        larger = _moved(plan, mesh) or best.plan
        facts = [fact for fact in (_fact(config, plan, larger, axis),) if fact]
        reason = "; ".join([compare(self.evaluator, self.one, best, self._shown(mesh)), *facts])
        return Limit(axis, size, mesh.sizes[axis], reason)

    def _on(self, mesh: MeshSpec) -> list[Estimate]:
        """The deployment with the plan on another mesh, and the best of those that the search has seen there."""
        moved = _moved(self.plan, mesh)
        best = None if moved is None else self.instead(moved)
        found = [] if best is None else [best]
        if not self.one.apart:
            seen = self.evaluator.estimates.items()
            found += [one for (plan, _), one in seen if plan.mesh == mesh]
        return found

    def _shown(self, mesh: MeshSpec) -> str:
        """The mesh, or that of one replica where those are what a pool has."""
        return str(replace(mesh, dp=1) if self.one.apart else mesh)

    def _why_none(self, meshes: Iterable[MeshSpec]) -> str:
        """Why the plan is on none of these meshes."""
        problems = []
        for mesh in meshes:
            moved = _moved(self.plan, mesh)
            alone = None if moved is None else self.evaluator.best(copies(moved, 1) if self.one.apart else moved)
            if alone is not None and not alone.fits:
                return compare(self.evaluator, self.one, alone, self._shown(mesh))
            problems += [self.evaluator.problems[plan] for plan in (moved,) if plan in self.evaluator.problems]
        none = "no division of the devices has such replicas" if self.one.apart else "no plan runs on such a mesh"
        return problems[0] if problems else none

    def chunk(self) -> Limit:
        """What stops the chunk."""
        config, plan = self.evaluator.question.config, self.plan
        if plan.chunk >= self.evaluator.question.workload.fresh:
            return Limit("chunk", plan.chunk, None, "a prompt is one chunk")
        larger = next((size for size in CHUNKS if size > plan.chunk), 2 * plan.chunk)
        other = changed(config, plan, {"chunk": larger})
        best = None if other is None else self.instead(other)
        why = "no plan runs with it" if best is None else compare(self.evaluator, self.one, best, f"chunk {larger}")
        return Limit("chunk", plan.chunk, larger, why)


def _moved(plan: Plan, mesh: MeshSpec) -> Plan | None:
    """The plan on another mesh, or None where its options cannot be there."""
    try:
        return on_mesh(plan, mesh)
    except JaxparError:
        return None


def nothing_to_split(config: ModelConfig, mesh: MeshSpec, axis: str) -> str:
    """Why an axis of this size has less to split than ranks; empty if it has enough."""
    size = mesh.sizes[axis]
    if axis == "pp" and size > config.num_hidden_layers:
        return f"a stage needs a layer, and the model has {config.num_hidden_layers}"
    if axis == "tp" and size > config.num_attention_heads:
        return f"a rank needs a query head, and the model has {config.num_attention_heads}"
    if axis == "ep" and config.moe is not None and size > config.moe.num_experts:
        return f"a rank needs an expert, and the model has {config.moe.num_experts}"
    return ""


def compare(evaluator: Evaluator, one: Estimate, other: Estimate, name: str) -> str:
    """What another deployment, called `name`, lacks, misses or loses, in words."""
    asked = evaluator.question
    memory = other.fullest
    if not other.fits:
        return (
            f"{name} needs {human_bytes(memory.total)} a device, {human_bytes(memory.over)} more than it has; most is "
            f"{memory.largest}, {human_bytes(memory.items[memory.largest])}"
        )
    for time, target in (("TTFT", asked.targets.ttft), ("TPOT", asked.targets.tpot)):
        value, had = (getattr(each, time.lower()) for each in (other, one))
        if target is not None and value > max(target, had):
            return f"{time} with {name} would be {1e3 * value:.4g} ms, and {1e3 * target:.4g} are allowed"
    unit, scale = ("ms a request", 1e3) if asked.objective == "latency" else ("device-ms a token", 1e3)
    mine, theirs = (contributions(each, asked.objective) for each in (one, other))
    whole, new_whole = sum(mine.values()), sum(theirs.values())
    if abs(new_whole / whole - 1) < GAIN:
        return f"{name} gives the same within {GAIN:.1%}"
    grows = {name: theirs.get(name, 0) - mine.get(name, 0) for name in {**mine, **theirs}}
    text = f"{name} takes {scale * new_whole:.4g} {unit} in place of {scale * whole:.4g}"
    if new_whole < whole:
        return f"nothing stops it: {text}"
    if grows.pop(IDLE, 0.0) > GAIN * whole:
        text += f", prefill works {other.served.prefilling:.0%} of the time in place of {one.served.prefilling:.0%}"
    most = max(grows, key=lambda name: grows[name])
    if grows[most] > GAIN * whole:
        text += f", {most} takes {scale * theirs[most]:.4g} in place of {scale * mine.get(most, 0):.4g}"
        text += _messages(other, most)
    return text


def _messages(one: Estimate, name: str) -> str:
    """Of what is sent in decode, how small its messages are: where they are, latency is what it costs."""
    phase, _, axes = name.partition(" over ")
    if not axes or phase != "decode":
        return ""
    from jaxpar.ledger.predict import predict_traffic

    rows = [row for row in predict_traffic(one.decode.step.step) if "+".join(row.axes) == axes and row.calls]
    calls = sum(row.calls for row in rows)
    if not calls:
        return ""
    mean = sum(row.calls * row.message_bytes for row in rows) / calls
    return f" ({counted(calls, 'call')} a step of {human_bytes(mean)} in the mean)"


def _fact(config: ModelConfig, plan: Plan, larger: Plan, axis: str) -> str:
    """What of the model an axis divides, before and after."""
    size, new = plan.mesh.sizes[axis], larger.mesh.sizes[axis]
    if axis == "tp":
        columns = " to ".join(str(-(-config.intermediate_size // ranks)) for ranks in (size, new))
        if config.mla is not None:
            return f"latents are copied to every rank of tp; FFN columns a rank {columns}"
        heads = heads_of(config, replace(larger, kv_split="replicate", max_num_seqs=1))
        stored = heads.tp * heads.kv_local
        if stored > config.num_key_value_heads:
            copied = f"{config.num_key_value_heads} KV heads are stored as {stored}, with copies"
            return f"{copied}; FFN columns a rank {columns}"
        return f"FFN columns a rank {columns}"
    if axis == "pp":
        return f"layers a stage {-(-config.num_hidden_layers // size)} to {-(-config.num_hidden_layers // new)}"
    if axis == "ep" and config.moe is not None:
        each = [-(-config.moe.num_experts // one.mesh.extent(one.experts_over)) for one in (plan, larger)]
        return f"experts a rank {each[0]} to {each[1]}"
    return ""


def _batch(evaluator: Evaluator, one: Estimate) -> Limit:
    asked, plan = evaluator.question, bare(one.plan)
    if asked.workload.concurrency is not None:
        return Limit("batch", one.batch, None, f"{counted(one.batch, 'request')} at once are asked for")
    if asked.objective == "latency":
        return Limit("batch", one.batch, None, "each request more makes others wait: give --concurrency for more")
    more = [batch for batch in evaluator.ladder(plan) if batch > one.batch]
    if more:
        return Limit(
            "batch", one.batch, more[0], compare(evaluator, one, evaluator.at(plan, more[0]), f"{more[0]} requests")
        )
    pool = one.pools[-1]
    lanes = pool.lanes // plan.groups
    larger = plan.mesh.dp * plan.mesh.ep * plan.groups * (2 * lanes if lanes < 8 else lanes + 8)
    memory = evaluator.memory(plan, larger)
    cache = human_bytes(memory.cache_bytes)
    return Limit(
        "batch",
        one.batch,
        larger,
        f"{cache} of KV cache a device make {human_bytes(memory.total)}, {human_bytes(memory.over)} more than it has",
    )
