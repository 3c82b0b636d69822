"""Rebalancing: experts get new slots by the loads of the latest steps, while the model serves.

    step       ...  N |         | N+1 |         | N+2 | ...
    moves               layer 0         layer 1                one between two steps

A layer's weights and its map change together, so that the steps in between run with some layers new and others old, and
compute the same up to rounding (the asynchronous EPLB of vLLM). A layer whose new placement would load its fullest rank
no less stays as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import ArrayLike

from jaxpar.batch import StepOutput
from jaxpar.checkpoint.config import MoEConfig
from jaxpar.ledger.predict import local_bytes
from jaxpar.ledger.rounds import loads_of
from jaxpar.moe.balance import device_loads, over_mean
from jaxpar.moe.loads import LoadWindow
from jaxpar.moe.moves import keep_in_place, plan_moves
from jaxpar.moe.placement import first_slots, groups_and_nodes, place_experts, slot_map
from jaxpar.moe.relocate import relocation
from jaxpar.nn.moe import EXPERT_ARRAYS
from jaxpar.program import Programs, Weights

WINDOW = 128
"""The most steps whose loads decide."""

_REMEMBERED = 1024


@dataclass(frozen=True)
class LayerMove:
    """What rebalancing does to an MoE layer: the fullest rank's load over the mean, before and after.

    `slots` of all ranks get other weights, and `sent_bytes` are what each of the ranks sends that share the experts. A
    layer that stays as it is has none.
    """

    layer: int
    before: float
    after: float
    slots: int
    sent_bytes: tuple[int, ...]


class _Wanted(NamedTuple):
    """The expert of each slot of a layer, and what `LayerMove` says of it."""

    slots: np.ndarray
    before: float
    after: float


class Rebalancer:
    """Keeps the experts of a model with `expert_slots` where the loads want them.

    It changes the dictionary of weights in place: whoever runs steps with it has the new placement in the next one.
    """

    def __init__(self, programs: Programs, moe: MoEConfig, weights: Weights) -> None:
        """Add the maps of the first placement to weights that were loaded into it, and watch the steps."""
        self._programs, self._moe, self._weights = programs, moe, weights
        plan, mesh = programs.plan, programs.mesh
        self._ranks, self._every = plan.mesh.extent(plan.experts), plan.rebalance_every
        self._layers = [name.removesuffix("map.copies") for name in programs.arrays if name.endswith("map.copies")]
        arrays = {
            name: programs.weights[self._layers[0] + name]
            for name in EXPERT_ARRAYS
            if self._layers[0] + name in programs.weights
        }
        specs = {name: array.spec for name, array in arrays.items()}
        held = local_bytes({name: array.abstract for name, array in arrays.items()}, specs, plan.mesh.sizes)
        self._slot_bytes = held // (plan.expert_slots // self._ranks)
        self._relocate = relocation(mesh, specs, plan.experts)
        self._names = tuple(arrays)
        self._window, self._steps = LoadWindow(WINDOW), 0
        self._waiting: dict[int, _Wanted] = {}
        self.moved: deque[LayerMove] = deque(maxlen=_REMEMBERED)
        """Layers that have been moved so far, in time: the latest 1024 moves."""
        self.slots = np.tile(first_slots(moe, plan), (len(self._layers), 1))
        """The expert of each slot now [layers, slots]; another array after every move."""
        for layer in range(len(self._layers)):
            self._put_map(layer)
        programs.watchers.append(self._after_step)

    def rebalance(self, loads: ArrayLike | None = None) -> list[LayerMove]:
        """Move every layer that gains by it, now; a row for each MoE layer, in order.

        Args:
            loads: of the experts [MoE layers, experts], in any unit; None: those of the latest steps, 128 at most.

        Raises:
            PlanError: loads of another model, or None before the first step.
        """
        given = self._window.loads if loads is None else loads
        present = self._over_mean(given)
        self._waiting = self._wanted(given)
        moved = {layer: self._move(layer) for layer in [*self._waiting]}
        return [
            moved.get(layer, LayerMove(layer, load, load, 0, (0,) * self._ranks)) for layer, load in enumerate(present)
        ]

    def _after_step(self, output: StepOutput) -> None:
        self._window.add(output.loads)
        self._steps += 1
        if self._every and self._steps % self._every == 0 and not self._waiting:
            self._waiting = self._wanted(self._window.loads)
        if self._waiting:
            self._move(min(self._waiting))

    def _over_mean(self, loads: ArrayLike) -> list[float]:
        """The fullest rank's load over the mean, of each layer as it is."""
        given = loads_of(self._programs.config, loads)
        assert given is not None
        fullest: list[float] = over_mean(device_loads(given, self.slots, self._ranks)).max(axis=1).tolist()
        return fullest

    def _wanted(self, loads: ArrayLike) -> dict[int, _Wanted]:
        """New placements for those layers of which the fullest rank gets less to do."""
        present = self._over_mean(loads)
        placed = place_experts(self._moe, self._programs.plan, np.asarray(loads))
        fullest = over_mean(placed.device_loads).max(axis=1).tolist()
        return {
            layer: _Wanted(placed.slots[layer], before, after)
            for layer, (before, after) in enumerate(zip(present, fullest, strict=True))
            # Sums of the same loads in another order are no gain.
            if after < before * (1 - 1e-9)
        }

    def _move(self, layer: int) -> LayerMove:
        wanted, prefix, old = self._waiting.pop(layer), self._layers[layer], self.slots[layer]
        new = keep_in_place(old, wanted.slots, self._ranks, groups_and_nodes(self._moe, self._programs.plan)[1])
        moves = plan_moves(old, new, self._ranks)
        arrays = self._relocate({name: self._weights[prefix + name] for name in self._names}, moves)
        self._weights.update({prefix + name: array for name, array in arrays.items()})
        self.slots = self.slots.copy()
        self.slots[layer] = new
        self._put_map(layer)
        sent = tuple(int(slots) * self._slot_bytes for slots in moves.sent)
        self.moved.append(LayerMove(layer, wanted.before, wanted.after, int((old != new).sum()), sent))
        return self.moved[-1]

    def _put_map(self, layer: int) -> None:
        prefix, tables = self._layers[layer] + "map.", slot_map(self.slots[layer], self._moe.num_experts)
        for name, table in tables._asdict().items():
            sharding = NamedSharding(self._programs.mesh, self._programs.array_specs[prefix + name])
            self._weights[prefix + name] = jax.device_put(table[None], sharding)
