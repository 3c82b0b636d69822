"""Loads of experts: how many tokens chose each, per layer, counted over the latest steps or read from a file."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.errors import JaxparError, PlanError
from jaxpar.tables import counted
from jaxpar.values import shown

MAX_LAYERS, MAX_EXPERTS = 256, 2048
"""More than any model has."""

_MAX_BYTES = 16 << 20


class LoadWindow:
    """Loads of the latest `steps` steps, left on the devices that counted them until someone asks.

    An older step is forgotten when a new one comes.
    """

    def __init__(self, steps: int) -> None:
        self._steps: deque[Any] = deque(maxlen=steps)
        self._unread = 0

    def add(self, counts: Any) -> None:
        """Take in one step: tokens that chose each expert [ranks, layers, experts], without those of padding."""
        self._steps.append(counts)
        self._unread = min(self._unread + 1, len(self._steps))

    @property
    def loads(self) -> np.ndarray:
        """Of all ranks and steps together, int64 [layers, experts]; waits for the last step.

        Raises:
            PlanError: there was no step.
        """
        if not self._steps:
            raise PlanError("no step has counted loads yet: generate first, or give loads")
        for step in range(len(self._steps) - self._unread, len(self._steps)):
            self._steps[step] = np.asarray(self._steps[step]).sum(axis=0, dtype=np.int64)
        self._unread = 0
        return np.sum(self._steps, axis=0)


def check_loads(loads: ArrayLike) -> np.ndarray:
    """Loads as float64 [layers, experts], in any unit.

    Raises:
        PlanError: another shape, too many of them, or values that are no loads.
    """
    try:
        given = np.asarray(loads)
    except ValueError as error:
        raise PlanError("loads have layers of different lengths: every layer has as many experts") from error
    if given.ndim != 2 or 0 in given.shape or given.dtype.kind not in "iuf":
        raise PlanError(f"loads are {given.dtype} {list(given.shape)}: give numbers [layers, experts], one or more")
    layers, experts = given.shape
    if layers > MAX_LAYERS or experts > MAX_EXPERTS:
        raise PlanError(
            f"loads are of {counted(layers, 'layer')} and {counted(experts, 'expert')}: "
            f"give at most {MAX_LAYERS} layers and {MAX_EXPERTS} experts"
        )
    values = given.astype(np.float64)
    wrong = np.argwhere(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        layer, expert = wrong[0]
        raise PlanError(
            f"layer {layer}, expert {expert} has the load {values[layer, expert]}: it must be from 0, and finite"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(values.sum()):
            raise PlanError(f"loads up to {values.max():g} add up to infinity: give them in a larger unit")
    return values


def read_loads(path: Path) -> np.ndarray:
    """The loads in a JSON file, a list for each layer of a number for each expert: float64 [layers, experts].

    What `jaxpar generate --moe-stats --json` prints has them, too.

    Raises:
        JaxparError: a file that cannot be read, or holds anything else.
    """
    wanted = "give a list for each layer of a number for each expert, [[3, 1, 2], [0, 4, 2]]"
    try:
        if path.exists() and not path.is_file():
            raise JaxparError(f"{path} is not a file: {wanted}")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise JaxparError(f"{path} has {size} bytes: loads take at most {_MAX_BYTES}")
        layers = json.loads(path.read_bytes())
    except OSError as error:
        raise JaxparError(f"{path} cannot be read: {error.strerror or error}; name a file of loads") from error
    except (ValueError, RecursionError) as error:
        raise JaxparError(f"{path} is not JSON ({' '.join(str(error).split())}): {wanted}") from error
    if isinstance(layers, dict) and isinstance(stats := layers.get("moe_stats"), dict):
        layers = stats.get("loads")
    if not isinstance(layers, list) or not layers:
        raise JaxparError(f"{path} holds {shown(layers)}: {wanted}")
    for number, layer in enumerate(layers):
        if not isinstance(layer, list) or not layer:
            raise JaxparError(f"{path}: layer {number} is {shown(layer)}: {wanted}")
        if len(layer) != len(layers[0]):
            raise JaxparError(
                f"{path}: layer {number} has {counted(len(layer), 'expert')} and layer 0 has {len(layers[0])}: "
                "every layer has as many"
            )
        for expert, load in enumerate(layer):
            if isinstance(load, bool) or not isinstance(load, int | float):
                raise JaxparError(
                    f"{path}: layer {number}, expert {expert} is {shown(load)}: a load is a number from 0"
                )
    try:
        return check_loads(np.array(layers, np.float64))
    except OverflowError as error:
        raise JaxparError(f"{path} holds a load that no float64 can: give loads in a larger unit") from error
    except PlanError as error:
        raise JaxparError(f"{path}: {error}") from error
