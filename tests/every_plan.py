"""The plans that tests walk: one for every registered value of every choice, so that a new one is tested at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from jaxpar.plan import Plan
from jaxpar.registry import STRATEGIES

_CHOICES = {field.name: field.default for field in fields(Plan)}
DEFAULT: Mapping[str, Any] = MappingProxyType({})


def every_choice() -> list[Mapping[str, Any]]:
    """Keyword arguments of plans: the default one, one for every strategy, and one for sequence parallelism."""
    named = [
        {strategy.sublayer: strategy.name}
        for strategy in STRATEGIES
        if _CHOICES.get(strategy.sublayer, strategy.name) != strategy.name
    ]
    return [DEFAULT, *named, {"sequence_parallel": True}]


def label(choice: Mapping[str, Any]) -> str:
    """As tests show it."""
    return ",".join(f"{name}={value}" for name, value in choice.items()) or "default"
