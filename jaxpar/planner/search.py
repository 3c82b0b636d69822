"""The search: coarse first, then around the best meshes, then their options, then pools of two plans.

    1  every mesh of the cluster's devices where there are few, or those whose axes grow in large steps, with the
       defaults of all options, each at its best batch
    2  of the best meshes their neighbours, which have a factor of an axis on another one, until none is better
    3  of the best plans each option in turn, of which one that gains is kept
    4  pools of their own for prefill and decode, of the plans that do either best

It looks at hundreds of thousands of plans' worth of choices by counting some hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from jaxpar.errors import JaxparError
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.estimate import Estimate
from jaxpar.planner.evaluate import Evaluator, Question, ranked
from jaxpar.planner.pools import best_pools
from jaxpar.planner.space import base_plans, changed, neighbours, options, sparse

ALL = 320
"""Up to so many plans every one is looked at; of more those of a sparse grid, and neighbours of the best."""

_KEPT, _ROUNDS, _FRONT = 6, 6, 24


@dataclass(frozen=True)
class Found:
    """What a search found.

    `best` are the plans from the best on, one for each mesh; where the targets cannot be met those that miss them
    least. `seen` is all that was estimated, for the front. `space` are the meshes and expert axes that there are,
    `looked_at` those of them that were estimated, `steps` the steps of programs that were counted. `most` are the
    most requests that fit with the defaults of all options, and the mesh on which they do.
    """

    question: Question
    best: tuple[Estimate, ...]
    seen: tuple[Estimate, ...]
    space: int
    looked_at: int
    steps: int
    most: tuple[int, str] = (0, "")

    @property
    def met(self) -> bool:
        """Whether the best plan fits and meets every target."""
        return bool(self.best) and self._meets(self.best[0])

    @property
    def shown(self) -> tuple[Estimate, ...]:
        """Of the best those that fit and meet every target, or all where none does."""
        return tuple(one for one in self.best if self._meets(one)) or self.best

    def _meets(self, one: Estimate) -> bool:
        return one.fits and one.miss(self.question.targets) == 1


def search(evaluator: Evaluator, say: Callable[[str], None] = lambda text: None) -> Found:
    """Find the best plans for the evaluator's question; `say` hears what is being done."""
    question = evaluator.question
    config, cluster, workload = question.config, question.cluster, question.workload
    space = looked_at = 0
    estimates: list[Estimate] = []
    for devices in _device_counts(question):
        plans = base_plans(config, devices, workload.longest, cluster.devices_per_node, config.dtype, workload.fresh)
        space += len(plans)
        first = plans if len(plans) <= ALL else sparse(plans, cluster.devices_per_node)
        say(f"{len(first)} of {len(plans)} plans of {devices} devices")
        of_these = _estimate(evaluator, first)
        if len(first) < len(plans):
            of_these = _climb(evaluator, of_these, plans)
        looked_at += len(of_these)
        estimates += of_these
    best = ranked(estimates, evaluator.key)[:_KEPT]
    refined = []
    for number, one in enumerate(best):
        say(f"options of plan {number + 1} of {len(best)}: {one.plan.mesh}")
        refined.append(refine(evaluator, one))
    say("pools of their own for prefill and decode")
    pools = best_pools(evaluator, [*estimates, *refined])
    every = [*refined, *pools, *estimates]
    found = ranked(every, evaluator.key)
    seen = (*evaluator.estimates.values(), *pools)
    most = max(((evaluator.most(bare(one.plan)), str(one.plan.mesh)) for one in estimates), default=(0, ""))
    return Found(question, tuple(found), seen, space, looked_at, evaluator.steps, most)


def _device_counts(question: Question) -> list[int]:
    """All devices; where cost counts, also whole nodes or parts of one, as many as divide the cluster."""
    devices, node = question.cluster.devices, question.cluster.devices_per_node
    if question.objective != "cost":
        return [devices]
    return [n for n in range(1, devices + 1) if devices % n == 0 and (n <= node or n % node == 0)]


def _estimate(evaluator: Evaluator, plans: Iterable[Plan]) -> list[Estimate]:
    return [one for plan in plans if (one := evaluator.best(plan)) is not None]


def _climb(evaluator: Evaluator, found: list[Estimate], plans: Iterable[Plan]) -> list[Estimate]:
    """Add neighbours of the best until all of these were looked at."""
    by_mesh: dict[MeshSpec, list[Plan]] = {}
    for plan in plans:
        by_mesh.setdefault(plan.mesh, []).append(plan)
    of_plan = {bare(one.plan): one for one in found}
    for _ in range(_ROUNDS):
        best = sorted(of_plan.values(), key=evaluator.key, reverse=True)[:_KEPT]
        near = [plan for one in best for mesh in neighbours(one.plan.mesh) for plan in by_mesh.get(mesh, [])]
        fresh = [plan for plan in dict.fromkeys(near) if plan not in of_plan and plan not in evaluator.problems]
        if not fresh:
            break
        of_plan |= {bare(one.plan): one for one in _estimate(evaluator, fresh)}
    return list(of_plan.values())


def bare(plan: Plan) -> Plan:
    """The plan as the space has it: how many requests it is to have room for is a result."""
    return replace(plan, max_num_seqs=Plan.max_num_seqs)


def refine(evaluator: Evaluator, one: Estimate) -> Estimate:
    """Take over each option that makes a plan better, twice over all of them, since one may need another."""
    config = evaluator.question.config
    for _ in range(2):
        before = one
        for fields in [*options(config, one.plan)]:
            plan = changed(config, bare(one.plan), fields)
            other = None if plan is None else _promising(evaluator, plan, one)
            if other is not None and evaluator.gains(other, one):
                one = other
        if one is before:
            break
    return one


def _promising(evaluator: Evaluator, plan: Plan, one: Estimate) -> Estimate | None:
    """A plan with another option at its best batch, if it is better at the same one or leaves room for a larger one."""
    try:
        if evaluator.most(plan) > evaluator.most(bare(one.plan)) or evaluator.gains(evaluator.at(plan, one.batch), one):
            return evaluator.best(plan)
    except JaxparError as error:
        evaluator.problems[plan] = str(error)
    return None


def along_the_front(evaluator: Evaluator, found: Found) -> list[Estimate]:
    """What was seen, and the best plans of one pool at every batch that fits, for a front without gaps."""
    plans = dict.fromkeys(bare(one.plan) for one in found.best[:_FRONT] if not one.apart and one.fits)
    few = [evaluator.at(plan, batch) for plan in plans for batch in [1, *evaluator.ladder(plan)]]
    return [*found.seen, *few]
