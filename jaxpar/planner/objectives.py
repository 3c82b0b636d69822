"""What a search is for; more of each is better."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpar.errors import PlanError

if TYPE_CHECKING:
    from jaxpar.planner.estimate import Estimate

OBJECTIVES: dict[str, Callable[[Estimate], float]] = {
    "throughput": lambda one: one.tokens_per_device,
    "latency": lambda one: -one.latency,
    "cost": lambda one: -one.device_seconds,
}
"""Tokens a second of each device of the cluster, the seconds of a request, or the device-seconds of a token, for which
devices may also be left out."""


def find_objective(name: str) -> Callable[[Estimate], float]:
    """The objective of a name.

    Raises:
        PlanError: there is none.
    """
    if name not in OBJECTIVES:
        raise PlanError(f"objective={name!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
