"""What the ledger and profiles read from a path of named scopes: a jaxpr's name stacks, and `op_name` in HLO.

Two kinds of names carry meaning. "<sublayer>:<strategy>" says whose work it is. "loop=<symbol>" around a loop whose
trip count is known only when it runs says what its iterations are called. Transformations wrap the names in
parentheses, as in "transpose(jvp(ffn:psum))", and leave them readable.
"""

from __future__ import annotations

import re

UNSCOPED = "unscoped"
"""Sublayer and strategy of what stands outside every scope."""

_STRATEGY = re.compile(r"([A-Za-z_][\w-]*):([A-Za-z_][\w-]*)")
_LOOP = re.compile(r"loop=([\w-]+)")


def scope_of(path: str) -> tuple[str, str]:
    """(sublayer, strategy) of the innermost scope that names them."""
    scopes: list[tuple[str, str]] = _STRATEGY.findall(path)
    return scopes[-1] if scopes else (UNSCOPED, UNSCOPED)


def loop_symbol(path: str, unnamed: str = "iterations") -> str:
    """What the iterations of a loop are called; `path` reaches from the body of the loop around it to the loop."""
    symbols: list[str] = _LOOP.findall(path)
    return symbols[-1] if symbols else unnamed


def nested(per: str, symbol: str) -> str:
    """What a loop's body counts per, given what the loop itself counts per."""
    return f"{per}*{symbol}" if per else symbol
