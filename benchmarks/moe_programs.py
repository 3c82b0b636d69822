"""One MoE layer over 8 faked devices: the dispatches as a step runs them, and others to hold them against.

Everyone gets the same tokens with the same routing; what a router does is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.random_model import llama
from benchmarks.routing import drawn
from jaxpar.checkpoint.config import MoEConfig, MoETensors, RouterConfig
from jaxpar.collectives import all_gather, rank_index, scatter_sum
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.kernels.dense import matmul
from jaxpar.ledger.hlo import parse_collectives
from jaxpar.ledger.rounds import all_rounds, count_rounds
from jaxpar.mesh import MeshSpec
from jaxpar.moe.bind import bound
from jaxpar.moe.grouped import expert_ffn, sort_by_expert
from jaxpar.moe.inputs import Experts, Inputs, local_choices, pack_routing, unpack_routing
from jaxpar.nn.mlp import gated
from jaxpar.plan import Plan
from jaxpar.registry import find
from jaxpar.strategies import Step

HIDDEN, WIDTH, CHOICES = 256, 512, 2
SPEC = MeshSpec(dp=2, ep=4)
RANKS = SPEC.size
AXES = ("dp", "ep")
NODE = 4
"""Devices of a node, for `two_level`: `dp` goes across nodes."""
CAPACITY = 1.25
"""Rows that the program which drops tokens has room for, over an even share."""


@dataclass(frozen=True)
class Program:
    """A compiled program of `Problem.values` -> [T, D], its arguments, and the bytes that a rank sends."""

    compiled: Any
    arguments: tuple[jax.Array, ...]
    sent_bytes: int

    def turn(self) -> float:
        """Seconds of one run."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return time.perf_counter() - start

    def result(self) -> np.ndarray:
        """What it makes of the tokens."""
        return np.asarray(self.compiled(*self.arguments))

    @property
    def temporary_bytes(self) -> int:
        """Of a rank."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)


@dataclass(frozen=True)
class Problem:
    """`tokens` that each choose two of `experts`, all alike or by Zipf's law."""

    tokens: int
    experts: int
    routing: str

    def values(self) -> tuple[np.ndarray, ...]:
        """Tokens x [T, D], slots and weights [T, k], gate_up [E, 2F, D], down [E, D, F]."""
        slots = drawn(self.tokens, self.experts, CHOICES, self.routing)
        rng = np.random.default_rng(1)
        weights = rng.dirichlet(np.ones(CHOICES), self.tokens).astype(np.float32)
        sizes = (self.tokens, HIDDEN), (self.experts, 2 * WIDTH, HIDDEN), (self.experts, HIDDEN, WIDTH)
        x, gate_up, down = (rng.standard_normal(size, np.float32) * size[-1] ** -0.5 for size in sizes)
        return x, slots, weights, gate_up, down

    def dispatch(self, name: str, **fields: Any) -> Program:
        """A strategy of the registry, as MoE layers call it; bytes are those that the ledger counts for these loads."""
        plan = Plan(SPEC, experts_over=AXES, moe_dispatch=name, devices_per_node=NODE, **fields)
        strategy = find("moe_dispatch", name)
        step = Step(self._config(), plan, "prefill", lanes=1, tokens=self.tokens // RANKS, keys=16)
        run, slots_per_rank = bound(strategy, step), self.experts // RANKS

        def local(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            def through(rows: jax.Array, counts: jax.Array) -> jax.Array:
                return expert_ffn(rows, gate_up, down, counts, gated)

            return run(Inputs(x, slots, weights, Experts(through, gate_up), slots_per_rank)).rows

        rounds = count_rounds(step, np.bincount(self.values()[1].ravel(), minlength=self.experts)[None, :])
        return self._sharded(local, sum(all_rounds(row, rounds).sent_bytes for row in strategy.traffic(step)))

    def gathered_ragged_dot(self) -> Program:
        """`standard` as one writes it with `jax.lax.ragged_dot`; it gets weights as it wants them, [E, I, O]."""
        count = self.experts // RANKS

        def local(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            x, routing = all_gather(x, AXES), all_gather(pack_routing(slots, weights), AXES)
            mine, weights = local_choices(*unpack_routing(routing), rank_index(AXES) * count, count)
            order, counts = sort_by_expert(mine.reshape(-1), count)
            both = lax.ragged_dot(x[order // CHOICES], gate_up, counts)
            done = lax.ragged_dot(gated(both[:, :WIDTH], both[:, WIDTH:]), down, counts)
            sums = jnp.zeros_like(x).at[order // CHOICES].add(done * weights.reshape(-1)[order][:, None])
            return scatter_sum(sums, AXES)

        return self._sharded(local, None, swapped=True)

    def automatic(self, kind: str) -> Program:
        """Plain `jit` with sharded tokens and experts: "capacity" drops tokens, "dense" and "ragged_dot" do not."""
        programs = {"capacity": self._capacity, "dense": _dense, "ragged_dot": _sorted}
        mesh = make_mesh(SPEC, ensure_devices(SPEC, "cpu"))
        sharding = NamedSharding(mesh, P(AXES))
        arrays = tuple(jax.device_put(x, sharding) for x in self._arrays(kind == "ragged_dot"))
        compiled = jax.jit(programs[kind], out_shardings=sharding).lower(*arrays).compile()
        return Program(compiled, arrays, _sent(compiled))

    def one_device(self, plain: bool) -> Program:
        """All of it on one device: rows in tiles of their experts, or (`plain`) all rows through the first expert.

        The latter is a bound: the same FLOPs in two large products.
        """

        def whole(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            order, counts = sort_by_expert(slots.reshape(-1), self.experts)
            rows = x[order // CHOICES]
            if plain:
                both = matmul(rows, gate_up[0])
                done = matmul(gated(both[:, :WIDTH], both[:, WIDTH:]), down[0])
            else:
                done = expert_ffn(rows, gate_up, down, counts, gated)
            by_choice = jnp.zeros_like(done).at[order].set(done, unique_indices=True)
            return (by_choice.reshape(*slots.shape, HIDDEN) * weights[:, :, None]).sum(axis=1)

        arrays = tuple(map(jnp.asarray, self.values()))
        return Program(jax.jit(whole).lower(*arrays).compile(), arrays, 0)

    def _arrays(self, swapped: bool) -> tuple[np.ndarray, ...]:
        x, slots, weights, gate_up, down = self.values()
        return (x, slots, weights, *((gate_up.swapaxes(1, 2), down.swapaxes(1, 2)) if swapped else (gate_up, down)))

    def _sharded(self, local: Callable[..., jax.Array], sent: int | None, swapped: bool = False) -> Program:
        """Compile a function in the local view; tokens and experts lie over all ranks."""
        mesh = make_mesh(SPEC, ensure_devices(SPEC, "cpu"))
        arrays = tuple(jax.device_put(x, NamedSharding(mesh, P(AXES))) for x in self._arrays(swapped))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES))
        compiled = jax.jit(mapped).lower(*arrays).compile()
        return Program(compiled, arrays, _sent(compiled) if sent is None else sent)

    def _config(self) -> Any:
        router = RouterConfig(top_k=CHOICES, scoring="softmax", norm_topk_prob=True)
        tensors = MoETensors(router="", gate="", up="", down="")
        return replace(llama(1, HIDDEN, WIDTH, 4, 4, 64), moe=MoEConfig(self.experts, WIDTH, (True,), router, tensors))

    def _capacity(
        self, x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """GShard's layer (arXiv:2006.16668): one-hot products, for each rank's tokens bounded room at each expert."""
        each = self.tokens // RANKS
        room = math.ceil(CAPACITY * each * CHOICES / self.experts)
        chosen = jax.nn.one_hot(slots.reshape(RANKS, each * CHOICES), self.experts)
        place = (jnp.cumsum(chosen, axis=1) * chosen - 1).astype(jnp.int32)
        # [G, S, k, E, C] summed over k: a place beyond the room is all zeros.
        there = jax.nn.one_hot(place, room).reshape(RANKS, each, CHOICES, self.experts, room)
        weighed = (there * weights.reshape(RANKS, each, CHOICES, 1, 1)).sum(axis=2)
        tokens = x.reshape(RANKS, each, HIDDEN)
        rows = jnp.einsum("gsd,gsec->egcd", tokens, there.sum(axis=2))
        both = jnp.einsum("egcd,efd->egcf", rows, gate_up)
        done = jnp.einsum("egcf,edf->egcd", gated(both[..., :WIDTH], both[..., WIDTH:]), down)
        return jnp.einsum("egcd,gsec->gsd", done, weighed).reshape(x.shape)


def _dense(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """All experts on all tokens."""
    by_expert = (jax.nn.one_hot(slots, gate_up.shape[0]) * weights[:, :, None]).sum(axis=1)
    both = jnp.einsum("td,efd->etf", x, gate_up)
    done = jnp.einsum("etf,edf->etd", gated(both[..., :WIDTH], both[..., WIDTH:]), down)
    return jnp.einsum("etd,te->td", done, by_expert)


def _sorted(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Rows sorted by expert through `jax.lax.ragged_dot`."""
    order, counts = sort_by_expert(slots.reshape(-1), gate_up.shape[0])
    both = lax.ragged_dot(x[order // CHOICES], gate_up, counts)
    done = lax.ragged_dot(gated(both[:, :WIDTH], both[:, WIDTH:]), down, counts)
    return jnp.zeros_like(x).at[order // CHOICES].add(done * weights.reshape(-1)[order][:, None])


def _sent(compiled: Any) -> int:
    """Bytes that a rank sends, as compiled."""
    return sum(row.sent_bytes for row in parse_collectives(compiled.as_text(), SPEC.sizes) if row.axes != ())
