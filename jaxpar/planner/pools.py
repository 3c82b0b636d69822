"""Pools of their own for prefill and decode: which plans, and how many of the cluster's devices each gets.

Replicas of a plan are independent, so that what a plan does with its copies (dp) taken away is known of any number of
them: a replicas of one plan and b of another, a x p + b x q = devices. Prefill must keep up with decode and be busy for
a part of the time at most; the cache of each prompt goes from one to the other, over all links of its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from jaxpar.errors import JaxparError
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.estimate import Estimate
from jaxpar.planner.evaluate import Evaluator, copies
from jaxpar.planner.serving import apart
from jaxpar.planner.space import neighbours
from jaxpar.planner.timing import transfer_seconds

MOST_BUSY = 0.9
"""Part of the time for which a pool may prefill: at 1 requests would wait without end."""

_PREFILLS, _DECODES, _SPLITS, _CLIMBED = 4, 8, 3, 2


def best_pools(evaluator: Evaluator, estimates: Iterable[Estimate]) -> list[Estimate]:
    """The best deployment for each pair of the plans that prefill best and that decode best."""
    asked = evaluator.question
    if asked.cluster.devices < 2 or asked.workload.output < 2:
        return []
    fitting = [one for one in estimates if one.fits]
    firsts, seconds = _first(fitting, evaluator, _PREFILLS), _second(fitting, evaluator, _DECODES)
    pairs = {
        (first, second): one
        for first in firsts
        for second in seconds
        if (one := best_split(evaluator, first, second)) is not None
    }
    best = sorted(pairs, key=lambda pair: evaluator.key(pairs[pair]), reverse=True)[:_CLIMBED]
    return [*pairs.values(), *(_climbed(evaluator, *pair, pairs[pair]) for pair in best)]


def _climbed(evaluator: Evaluator, first: Plan, second: Plan, one: Estimate) -> Estimate:
    """What neighbours of either replica's mesh make of a deployment, one after the other until none is better."""
    tried: set[tuple[Plan, Plan]] = set()
    while True:
        near = [(other, second) for other in _near(first)] + [(first, other) for other in _near(second)]
        fresh = [pair for pair in near if pair not in tried]
        tried |= {*fresh}
        found = {pair: other for pair in fresh if (other := best_split(evaluator, *pair)) is not None}
        pair = max(found, key=lambda pair: evaluator.key(found[pair]), default=None)
        if pair is None or not evaluator.gains(found[pair], one):
            return one
        (first, second), one = pair, found[pair]


def _near(plan: Plan) -> list[Plan]:
    """Replicas of neighbouring meshes, half and twice as large among them."""
    found = []
    for mesh in neighbours(MeshSpec(**(plan.mesh.sizes | {"dp": 2}))):
        with suppress(JaxparError):
            found.append(copies(on_mesh(plan, mesh), 1))
    return found


def on_mesh(plan: Plan, mesh: MeshSpec) -> Plan:
    """The plan on another mesh, whose ep has experts if it is there.

    Raises:
        PlanError: options that cannot be there.
    """
    axes = ("ep", *plan.experts_over) if mesh.ep > 1 and "ep" not in plan.experts_over else plan.experts_over
    return replace(plan, mesh=mesh, experts_over=axes)


def best_split(evaluator: Evaluator, first: Plan, second: Plan) -> Estimate | None:
    """The best deployment of replicas of two plans, the first of which prefills; None where there is none."""
    try:
        return max(_splits(evaluator, first, second), key=evaluator.key, default=None)
    except JaxparError as error:
        evaluator.problems[first] = str(error)
        return None


def _first(estimates: Sequence[Estimate], evaluator: Evaluator, count: int) -> list[Plan]:
    """Single replicas that prefill most prompts a second for a device, or one prompt soonest."""
    target, by_latency = evaluator.question.targets.ttft, evaluator.question.objective == "latency"

    def key(one: Estimate) -> tuple[bool, float]:
        busy = one.prefill.prefill - one.prefill.bubble
        rate = one.pools[0].replicas / busy / one.devices
        return target is None or one.prefill.prefill <= target, -one.prefill.prefill if by_latency else rate

    return _single(sorted(estimates, key=key, reverse=True), count)


def _second(estimates: Sequence[Estimate], evaluator: Evaluator, count: int) -> list[Plan]:
    """Single replicas that decode most tokens a second for a device, or one token soonest."""
    target, by_latency = evaluator.question.targets.tpot, evaluator.question.objective == "latency"

    def key(one: Estimate) -> tuple[bool, float]:
        rate = one.decode.tokens_per_second / one.devices
        return target is None or one.decode.tpot <= target, -one.decode.tpot if by_latency else rate

    return _single(sorted(estimates, key=key, reverse=True), count)


def _single(estimates: Iterable[Estimate], count: int) -> list[Plan]:
    """Of the first ones that differ in more than their copies, a replica each."""
    return list(dict.fromkeys(copies(one.plan, 1) for one in estimates))[:count]


def _splits(evaluator: Evaluator, first: Plan, second: Plan) -> Iterator[Estimate]:
    """Deployments of two plans: with the shares of devices at which prefill and decode keep up with one another."""
    asked = evaluator.question
    devices, node, steps = asked.cluster.devices, asked.cluster.devices_per_node, asked.workload.output - 1
    here, there = first.mesh.size, second.mesh.size
    # A replica that fits in a node must not lie across two of them.
    shares = [
        (count, (devices - count * here) // there)
        for count in range(1, (devices - there) // here + 1)
        if (devices - count * here) % there == 0 and count * here % min(there, node) == 0
    ]
    batches = _batches(evaluator, second)
    if not shares or not batches:
        return
    prefill = evaluator.prefill(first)
    a_prompt = (prefill.prefill - prefill.bubble) / (first.mesh.ep * MOST_BUSY)
    most = evaluator.decode(second, batches[-1])
    a_second = batches[-1] / (steps * most.tpot) * a_prompt  # replicas of the first plan for one of the second
    shares.sort(key=lambda share: abs(share[0] - a_second * share[1]))
    for ours, theirs in shares[:_SPLITS]:
        largest = None
        for batch in batches:
            one = _deployment(evaluator, first, ours, second, theirs, batch)
            if one is None or (largest is not None and evaluator.key(one) < evaluator.key(largest)):
                break
            largest = one
        if largest is not None:
            yield largest


def _batches(evaluator: Evaluator, plan: Plan) -> list[int]:
    """Requests of one replica; those that are asked for are dealt to all replicas, which are not known yet."""
    return evaluator.ladder(plan) if evaluator.most(plan) else []


def _deployment(evaluator: Evaluator, first: Plan, ours: int, second: Plan, theirs: int, batch: int) -> Estimate | None:
    """So many replicas of each plan, `batch` requests on each of the second; None where prefill cannot keep up."""
    asked = evaluator.question
    requests = batch * theirs
    if asked.workload.concurrency is not None:
        requests = asked.workload.concurrency
    elif asked.objective == "latency":
        requests = 1
    prefill, decode = evaluator.prefill(copies(first, ours)), evaluator.decode(copies(second, theirs), requests)
    transfer = transfer_seconds(asked.config, first, asked.cluster.device, asked.workload, asked.assumed)
    served = apart(
        prefill.prefill,
        prefill.prefill - prefill.bubble,
        ours * first.mesh.ep,
        transfer,
        decode.tpot,
        asked.workload.output,
        requests,
        MOST_BUSY,
    )
    if served is None:
        return None
    # Of each replica that prefills one prompt is worked on, and one is on its way.
    prefilling = evaluator.pool(copies(first, ours), 2 * ours * first.mesh.ep, replace(asked.workload, output=1))
    decoding = evaluator.pool(copies(second, theirs), requests)
    return Estimate((prefilling, decoding), prefill, decode, evaluator.served(served), asked.workload.output)
