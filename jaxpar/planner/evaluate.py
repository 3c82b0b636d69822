"""What one plan gives at one batch, and at which batch it is best; nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.sizes import bucket
from jaxpar.errors import JaxparError
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.estimate import Estimate, Pool
from jaxpar.planner.imbalance import imbalance
from jaxpar.planner.memory import DeviceMemory, memory_of, most_requests
from jaxpar.planner.objectives import find_objective
from jaxpar.planner.serving import Served, together
from jaxpar.planner.timing import DecodeTime, PrefillTime, decode_time, prefill_time
from jaxpar.planner.workload import Targets, Workload

Key = tuple[bool, float, float, float]
"""What estimates are ordered by, larger being better: what fits, how little targets are missed, the objective, and of
equals in three digits of it the latency."""


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked: a model on a cluster, its requests, how fast they must be, and what is best."""

    config: ModelConfig
    cluster: Cluster
    workload: Workload
    targets: Targets
    assumed: Assumptions
    objective: str = "throughput"
    loads: np.ndarray | None = None

    def assumed_of(self, plan: Plan) -> Assumptions:
        """What is assumed of a plan: where `loads` of experts [MoE layers, experts] are known, its own imbalance."""
        if self.loads is None:
            return self.assumed
        ranks = plan.mesh.extent(plan.experts_over)
        return replace(self.assumed, imbalance=imbalance(self.loads, ranks, plan.expert_slots))


GAIN = 1e-3
"""Less of the objective is no reason to set an option."""


class Evaluator:
    """Estimates of plans for one question, each part kept for when it is asked for again."""

    def __init__(self, question: Question) -> None:
        """Nothing is counted yet.

        Raises:
            PlanError: an objective that there is none of.
        """
        self.question = question
        self._score = find_objective(question.objective)
        self._prefill: dict[Plan, PrefillTime] = {}
        self._decode: dict[tuple[Plan, int], DecodeTime] = {}
        self._most: dict[Plan, int] = {}
        self.estimates: dict[tuple[Plan, int], Estimate] = {}
        """Every one of a single pool so far, by plan and batch."""
        self.problems: dict[Plan, str] = {}
        """Plans that cannot run, and why."""

    @property
    def steps(self) -> int:
        """Steps of a program whose time was counted: what a search costs."""
        return sum(len(time.steps) for time in self._prefill.values()) + len(self._decode)

    def key(self, one: Estimate) -> Key:
        """Larger is better; of what does not fit, what needs least memory."""
        if not one.fits:
            return False, -one.fullest.total / one.fullest.device_bytes, self._score(one), 0.0
        return one.fits, -one.miss(self.question.targets), float(f"{self._score(one):.3g}"), -one.latency

    def gains(self, one: Estimate, than: Estimate) -> bool:
        """Whether it is better by more than a choice between two options is worth."""
        targets = self.question.targets
        missed, score = than.miss(targets), self._score(than)
        if one.fits != than.fits or one.miss(targets) < missed * (1 - GAIN):
            return one.fits >= than.fits
        return one.miss(targets) <= missed and self._score(one) > score + GAIN * abs(score)

    def prefill(self, plan: Plan) -> PrefillTime:
        """A prompt on each replica, all at once."""
        plan = self._one_of(plan)
        if plan not in self._prefill:
            asked = self.question
            replicas = plan.mesh.dp * plan.mesh.ep
            self._prefill[plan] = prefill_time(
                asked.config, plan, asked.cluster.device, asked.workload, asked.assumed_of(plan), replicas
            )
        return self._prefill[plan]

    def decode(self, plan: Plan, batch: int) -> DecodeTime:
        """A token of `batch` requests."""
        one = self._one_of(plan)
        each = -(-batch * one.mesh.dp // plan.mesh.dp)
        if (one, each) not in self._decode:
            asked = self.question
            self._decode[one, each] = decode_time(
                asked.config, one, asked.cluster.device, asked.workload, asked.assumed_of(one), each
            )
        return replace(self._decode[one, each], batch=batch)

    def _one_of(self, plan: Plan) -> Plan:
        """A single one of dp copies, which takes as long as all of them where they are nothing to one another.

        Stages of a pipeline are farther apart with copies between them; experts may be split over dp.
        """
        node, size = self.question.cluster.devices_per_node, plan.mesh.size // plan.mesh.dp
        if plan.mesh.pp > 1 or "dp" in plan.experts or (node % size and size % node):
            return plan
        return copies(plan, 1)

    def memory(self, plan: Plan, batch: int, workload: Workload | None = None) -> DeviceMemory:
        """Of the fullest device, with requests of the question or of another `workload`."""
        asked = self.question
        return memory_of(asked.config, plan, asked.cluster.device, workload or asked.workload, asked.assumed, batch)

    def most(self, plan: Plan) -> int:
        """The most requests that fit, in all; 0 where the weights do not."""
        if plan not in self._most:
            asked = self.question
            self._most[plan] = most_requests(asked.config, plan, asked.cluster.device, asked.workload, asked.assumed)
        return self._most[plan]

    def at(self, plan: Plan, batch: int) -> Estimate:
        """One pool for both phases, with `batch` requests in all.

        Raises:
            PlanError: a plan that the model cannot have.
        """
        if (plan, batch) not in self.estimates:
            prefill, decode = self.prefill(plan), self.decode(plan, batch)
            pool = self.pool(plan, batch)
            served = self.served(
                together(
                    prefill.prefill,
                    prefill.prefill - prefill.bubble,
                    decode.tpot,
                    self.question.workload.output,
                    pool.lanes,
                    batch,
                )
            )
            self.estimates[plan, batch] = Estimate((pool,), prefill, decode, served, self.question.workload.output)
        return self.estimates[plan, batch]

    def pool(self, plan: Plan, batch: int, workload: Workload | None = None) -> Pool:
        """The plan with room for as many requests on each replica, and its memory."""
        lanes = -(-batch // (plan.mesh.dp * plan.mesh.ep))
        return Pool(replace(plan, max_num_seqs=lanes), batch, self.memory(plan, batch, workload))

    def served(self, served: Served) -> Served:
        """Without waiting, where none is assumed."""
        if self.question.assumed.queue == "none":
            return replace(served, first=replace(served.first, queue=0.0))
        return served

    def batches(self, plan: Plan) -> list[int]:
        """Batches to choose from, ascending: lanes as the engine has them, of all groups and replicas, that fit."""
        concurrency = self.question.workload.concurrency
        if concurrency is not None:
            return [concurrency]
        if self.question.objective == "latency":
            return [1]
        return self.ladder(plan)

    def ladder(self, plan: Plan) -> list[int]:
        """Powers of two lanes, from 16 on with steps of half between, and as many as fit; one request if no more do."""
        each = plan.mesh.dp * plan.mesh.ep * plan.groups
        most = self.most(plan) // each
        if not most:
            return [max(1, self.most(plan))]
        largest = most // 8 * 8 if most >= 8 else bucket(most + 1) // 2
        powers = {1 << power for power in range(most.bit_length())}
        lanes = powers | {power * 3 // 2 for power in powers if power >= 16} | {largest}
        return [each * count for count in sorted(lanes) if count <= largest]

    def best(self, plan: Plan) -> Estimate | None:
        """The plan at its best batch: the largest that meets the targets; None where jaxpar cannot run it."""
        try:
            return self._largest(plan, self.batches(plan))
        except JaxparError as error:
            self.problems[plan] = str(error)
            return None

    def _largest(self, plan: Plan, batches: list[int]) -> Estimate:
        """The largest batch within the targets, by halving: with more requests all times are longer."""
        targets = self.question.targets
        one = self.at(plan, batches[-1])
        low, high = 0, len(batches) - 1
        if one.miss(targets) == 1 or not high:
            return one
        best = self.at(plan, batches[0])
        while best.miss(targets) == 1 and high - low > 1:
            middle = (low + high) // 2
            one = self.at(plan, batches[middle])
            low, high, best = (middle, high, one) if one.miss(targets) == 1 else (low, middle, best)
        return best


def copies(plan: Plan, count: int) -> Plan:
    """`count` independent replicas of what a plan has dp copies of."""
    return replace(plan, mesh=replace(plan.mesh, dp=count), max_num_seqs=Plan.max_num_seqs)


def ranked(estimates: list[Estimate], key: Callable[[Estimate], Key]) -> list[Estimate]:
    """From the best, one for each mesh and choice of expert axes that decodes, by itself or apart from prefill."""
    best: dict[object, Estimate] = {}
    for one in sorted(estimates, key=key, reverse=True):
        replica = one.plan.mesh.sizes | ({"dp": 0} if one.apart else {})
        best.setdefault((one.apart, *replica.values(), one.plan.experts), one)
    return list(best.values())
