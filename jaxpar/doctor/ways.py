"""Which ways to run a model prove a machine, and what their results are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from jaxpar.applicable import WHOLE, Way, every_way
from jaxpar.checkpoint import Checkpoint, ModelConfig
from jaxpar.mesh import MeshSpec
from jaxpar.runner import load, make_plan
from jaxpar.verify_all import Outcome, verify_all


def ways_of(config: ModelConfig, platform: str, devices: int) -> list[Way]:
    """Every way to run the model on so many devices, on an accelerator after that on one alone."""
    alone = Way(WHOLE, "one device", make_plan(MeshSpec(), {}))
    several = every_way(config, devices, {}) if devices > 1 else []
    return several if platform == "cpu" and several else [alone, *several]


def prove(
    checkpoint: Checkpoint,
    ways: Sequence[Way],
    platform: str,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    **options: Any,
) -> Iterator[Outcome]:
    """Run each way on devices of `platform`, and hold every logit and token against one device of the CPU.

    `options` are those of `jaxpar.verify_all.verify_all`.
    """
    single = load(checkpoint, "tp=1", "cpu", dtype=dtype)
    with _exact(dtype, platform):
        yield from verify_all(checkpoint, single, ways, prompts, new_tokens, platform, **options)


def _exact(dtype: str, platform: str) -> AbstractContextManager[Any]:
    """Accelerators multiply float32 in parts of fewer bits unless they are told otherwise."""
    exact = dtype == "float32" and platform != "cpu"
    return jax.default_matmul_precision("highest") if exact else nullcontext()
