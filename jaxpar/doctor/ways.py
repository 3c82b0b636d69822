"""Which ways to run a model prove a machine, and what their results are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from jaxpar.applicable import WHOLE, Way, every_way
from jaxpar.checkpoint import Checkpoint, ModelConfig
from jaxpar.devices import ensure_devices
from jaxpar.errors import MeshError
from jaxpar.mesh import MeshSpec
from jaxpar.runner import load, make_plan
from jaxpar.verify_all import Outcome, verify_all

FAKED = 8
"""Devices where there is no accelerator."""


def devices_at_hand(platform: str | None, count: int | None) -> list[jax.Device]:
    """`count` devices of the platform (None: JAX's default), or all; of a CPU as many are faked, or FAKED.

    Raises:
        MeshError: there are none of the platform, or fewer than `count`; or `count` is below 1.
    """
    if count is not None and count < 1:
        raise MeshError(f"devices={count}: give 1 or more")
    # A CPU's devices are faked before anything else starts JAX.
    ensure_devices(MeshSpec(dp=count or FAKED), "cpu")
    found = ensure_devices(MeshSpec(), platform)
    if found[0].platform == "cpu":
        return ensure_devices(MeshSpec(dp=count or FAKED), "cpu")
    return ensure_devices(MeshSpec(dp=count or len(jax.devices(found[0].platform))), found[0].platform)


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
