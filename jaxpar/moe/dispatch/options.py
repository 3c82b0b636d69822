"""Which dispatch has which options, and what is said of one that has not."""

from __future__ import annotations

from jaxpar.plan import Plan

_HAVE: dict[str, tuple[str, ...]] = {
    "moe_deduplicate": ("all_to_all", "ragged", "two_level"),
    "moe_capacity": ("all_to_all",),
    "single_batch_overlap": ("all_to_all",),
}
"""Fields of the plan that are off by default."""


def refused_option(plan: Plan, dispatch: str) -> str | None:
    """What is wrong with the plan's options under this dispatch."""
    for field, able in _HAVE.items():
        if (given := getattr(plan, field)) != getattr(Plan, field) and dispatch not in able:
            return (
                f"{field}={given} is for moe_dispatch={' or '.join(map(repr, able))}, not for {dispatch!r}: "
                "choose one of them, or leave it out"
            )
    return None
