"""`auto` dispatch: two levels for prefill across nodes, else what sends fewer bytes for this step, in one round.

Prefill moves many rows, and is bound by the links between nodes; decode moves few, and two exchanges one after the
other would take twice the time of one (the two modes of DeepEP). Of few ranks, gathering all tokens sends less.
"""

from __future__ import annotations

from jaxpar.moe.dispatch import all_to_all, standard, two_level
from jaxpar.nodes import levels
from jaxpar.strategies import Choice, Step, least_sent


def resolve(step: Step) -> Choice:
    """`two_level`, `standard` or `all_to_all`; not one that lacks an option that the plan asks for."""
    if step.plan.fixed_order:
        return Choice(standard.STRATEGY.name, "the order in which it adds does not depend on other requests")
    if step.phase == "prefill" and two_level.check(step) is None:
        nodes = step.ranks(levels(step.plan, step.plan.experts).across)
        return Choice("two_level", f"a prefill across {nodes} nodes of {step.plan.devices_per_node} devices")
    direct = (standard.STRATEGY, all_to_all.STRATEGY)
    return least_sent(step, [strategy for strategy in direct if strategy.check(step) is None])
