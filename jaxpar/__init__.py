"""LLM inference under any combination of parallel strategies: explicit SPMD programs, proved and counted.

    import jaxpar
    runner = jaxpar.load("tiny", mesh="dp=2,tp=4")
    runner.generate(["It is a truth"], max_new_tokens=32)

Importing jaxpar starts no JAX backend: `load` does, with as many faked CPU devices as the mesh needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxpar.engine.requests import Completion, SamplingParams, Token
from jaxpar.errors import CheckpointError, JaxparError, MeshError, PlanError, RequestError
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan

if TYPE_CHECKING:
    from jaxpar.runner import Runner, load

__all__ = [
    "CheckpointError",
    "Completion",
    "JaxparError",
    "MeshError",
    "MeshSpec",
    "Plan",
    "PlanError",
    "RequestError",
    "Runner",
    "SamplingParams",
    "Token",
    "load",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what needs JAX when it is first asked for: the command line then starts, and refuses input, at once."""
    if name in ("Runner", "load"):
        return getattr(importlib.import_module("jaxpar.runner"), name)
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
