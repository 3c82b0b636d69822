"""Sinks and latents under every strategy of attention, against a plain softmax over all keys in float64.

What a model gives is in test_context_parallel.py; here one attention runs alone, so that every strategy is tried.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.attention.bind import bound
from jaxpar.attention.inputs import Inputs, by_token
from jaxpar.attention.latent import Latent
from jaxpar.attention.partial import Partial
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.heads import PADDED, HeadLayout, split_heads
from jaxpar.mesh import MeshSpec
from jaxpar.nn.linear import share_of
from jaxpar.plan import Phase, Plan
from jaxpar.registry import STRATEGIES
from jaxpar.strategies import Strategy
from jaxpar.train.attention import attend_whole

LANES, KEYS, SCALE = 3, 13, 0.4
OVER_CP = [strategy for strategy in STRATEGIES if strategy.sublayer.endswith("_attention") and "cp" in strategy.axes]
NOPE, ROPE, VALUE, RANK = 6, 4, 8, 12
# Five heads of latents, or five to each of two KV heads: neither two nor three ranks share them evenly.
KINDS = ["heads", "latents"]
MESHES = ["cp=2", "cp=3", "cp=2,tp=2"]
WAYS = list(itertools.product(KINDS, MESHES, range(len(OVER_CP))))
ALWAYS = [way for way in WAYS if way[:2] in (("heads", "cp=3"), ("latents", "cp=2,tp=2"))]


class Case(NamedTuple):
    """One attention of all heads: `bag` [K or 1, B, S, size], float32; `up` where the bag is of latents."""

    q: np.ndarray
    bag: tuple[np.ndarray, np.ndarray]
    kv_heads: int
    window: int | None
    sinks: np.ndarray
    up: np.ndarray | None

    def keys_and_values(self) -> tuple[np.ndarray, np.ndarray]:
        """[K, B, S, size] in float64."""
        if self.up is None:
            return self.bag[0].astype(float), self.bag[1].astype(float)
        c, p = (plane[0].astype(float) for plane in self.bag)
        made = np.einsum("bsr,hor->hbso", c, self.up)
        shared = np.broadcast_to(p, (*made.shape[:3], p.shape[-1]))
        return np.concatenate([made[..., :NOPE], shared], axis=-1), made[..., NOPE:]


@lru_cache
def case(kind: str) -> Case:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    # One sink outweighs every key, one counts for nothing.
    sinks = np.float32([0.5, -1.0, 30.0, -30.0, 2.0])
    if kind == "heads":
        bag = normal(2, LANES, KEYS, 8), normal(2, LANES, KEYS, 8)
        return Case(normal(LANES, KEYS, 10, 8), bag, 2, 5, np.concatenate([sinks, sinks[::-1]]), None)
    bag = normal(1, LANES, KEYS, RANK), normal(1, LANES, KEYS, ROPE)
    up = normal(5, NOPE + VALUE, RANK) / np.float32(RANK**0.5)
    return Case(normal(LANES, KEYS, 5, NOPE + ROPE), bag, 5, None, sinks, up)


def expected(given: Case) -> np.ndarray:
    """[B, S, H, d]: each token over itself and those before it, by the definition."""
    k, v = given.keys_and_values()
    group = given.q.shape[2] // given.kv_heads
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = np.einsum("bthd,hbsd->bhts", given.q.astype(float), k) * SCALE
    distance = np.arange(KEYS)[:, None] - np.arange(KEYS)[None, :]
    scores = np.where((distance >= 0) & (distance < (given.window or KEYS)), scores, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(axis=-1) + np.exp(given.sinks.astype(float))[None, :, None]
    return np.einsum("bhts,hbsd->bthd", weights / total[..., None], v)


def on_heads(x: np.ndarray, heads: tuple[int, ...], axis: int) -> np.ndarray:
    """`x` with a rank's heads, zeros for padding."""
    picked = np.take(x, np.maximum(heads, 0), axis=axis)
    picked[(slice(None),) * axis + (np.asarray(heads) == PADDED,)] = 0
    return picked


def of_rank(given: Case, heads: HeadLayout, phase: Phase, plan: Plan, cp: int, tp: int) -> dict[str, np.ndarray]:
    """What a rank holds: every cp-th key, shuffled, and a slot that holds none; queries as many, in decode the last."""
    q_heads = heads.q_heads[tp * heads.q_local :][: heads.q_local]
    kv_heads = heads.kv_heads[tp * heads.kv_local :][: heads.kv_local]
    slots = -(-KEYS // plan.mesh.cp) + 1
    held = np.random.default_rng(cp).permutation(np.arange(cp, KEYS, plan.mesh.cp))
    k_positions = np.full(slots, -1, np.int32)
    k_positions[1 : 1 + len(held)] = held
    arrays = {}
    for name, plane in zip(("first", "second"), given.bag, strict=True):
        padded = np.where((k_positions >= 0)[None, None, :, None], plane[:, :, k_positions], np.nan)
        arrays[name] = padded if given.up is not None else on_heads(padded, kv_heads, 0)
    positions = np.array([KEYS - 1]) if phase == "decode" else k_positions[1:]
    arrays["q"] = on_heads(given.q[:, positions], q_heads, 2)
    arrays["q_positions"] = np.broadcast_to(positions, (LANES, len(positions))).astype(np.int32)
    arrays["k_positions"] = np.broadcast_to(k_positions, (LANES, slots))
    arrays["sinks"] = on_heads(given.sinks, q_heads, 0)
    if given.up is not None:
        arrays["up"] = on_heads(given.up, kv_heads, 0)
    return arrays


def run(given: Case, strategy: Strategy, mesh: str, **options: Any) -> tuple[Plan, HeadLayout, Any, np.ndarray]:
    """(plan, heads, what every rank held, its output), the latter two by [cp][tp]."""
    phase: Phase = "decode" if strategy.sublayer.startswith("decode") else "prefill"
    spec = MeshSpec.parse(mesh)
    plan = Plan(spec, **{strategy.sublayer: strategy.name}, **options)
    heads = split_heads(given.q.shape[2], given.kv_heads, spec.tp)
    held = [[of_rank(given, heads, phase, plan, cp, tp) for tp in range(spec.tp)] for cp in range(spec.cp)]
    axes = plan.active(("cp", "tp"))
    stacked = {name: np.stack([row[name] for ranks in held for row in ranks]) for name in held[0][0]}

    def local(arrays: dict[str, jax.Array]) -> jax.Array:
        x = {name: array[0] for name, array in arrays.items()}
        q = x["q"]
        if plan.active(strategy.query_axes):
            mine = share_of(q.shape[2], plan.active(strategy.query_axes))
            q = jax.lax.dynamic_slice_in_dim(q, mine.start, mine.count, axis=2)
        latent = Latent(x["up"], NOPE, absorbed=phase == "decode") if "up" in x else None
        inputs = Inputs(
            q, (x["first"], x["second"]), x["q_positions"], x["k_positions"], given.window, SCALE, heads.group,
            sinks=x["sinks"], latent=latent,
        )  # fmt: skip
        return bound(strategy, x["q_positions"], x["k_positions"], plan, phase)(inputs)[None]

    program = jax.shard_map(local, mesh=make_mesh(spec, ensure_devices(spec)), in_specs=P(axes), out_specs=P(axes))
    out = np.asarray(jax.jit(program)(stacked))
    return plan, heads, held, out.reshape(spec.cp, spec.tp, *out.shape[1:])


def assert_is_the_softmax(kind: str, mesh: str, strategy: Strategy) -> None:
    given = case(kind)
    plan, heads, held, out = run(given, strategy, mesh, **({"decode_overlap": 2} if strategy.name == "a2a" else {}))
    wanted = expected(given)
    for cp, tp in itertools.product(range(plan.mesh.cp), range(plan.mesh.tp)):
        mine = np.asarray(heads.q_heads[tp * heads.q_local :][: heads.q_local])
        if strategy.sublayer == "decode_attention":  # heads lie over (tp, cp) after it
            mine = mine[cp * out.shape[4] :][: out.shape[4]]
        real = np.flatnonzero(mine != PADDED)
        positions = held[cp][tp]["q_positions"][0]
        tokens = np.flatnonzero(positions >= 0)
        found = out[cp, tp][:, tokens][:, :, real]
        np.testing.assert_allclose(found, wanted[:, positions[tokens]][:, :, mine[real]], atol=2e-6)


def shown(value: object) -> str:
    return f"{OVER_CP[value].sublayer}:{OVER_CP[value].name}" if isinstance(value, int) else str(value)


@pytest.mark.parametrize(("kind", "mesh", "strategy"), ALWAYS, ids=shown)
def test_every_strategy_gives_the_softmax_over_all_keys_and_the_sink(kind: str, mesh: str, strategy: int) -> None:
    assert_is_the_softmax(kind, mesh, OVER_CP[strategy])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "mesh", "strategy"), sorted(set(WAYS) - set(ALWAYS)), ids=shown)
def test_every_strategy_gives_the_softmax_over_all_keys_and_the_sink_on_all_other_meshes(
    kind: str, mesh: str, strategy: int
) -> None:
    assert_is_the_softmax(kind, mesh, OVER_CP[strategy])


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_softmax_over_all_keys_and_the_sink(kind: str) -> None:
    given = case(kind)
    positions = jnp.broadcast_to(jnp.arange(KEYS), (LANES, KEYS))
    latent = None if given.up is None else Latent(jnp.asarray(given.up), NOPE, absorbed=False)
    bag = jnp.asarray(given.bag[0]), jnp.asarray(given.bag[1])
    group = given.q.shape[2] // given.kv_heads
    x = Inputs(
        jnp.asarray(given.q), bag, positions, positions, given.window, SCALE, group, jnp.asarray(given.sinks), latent
    )
    np.testing.assert_allclose(attend_whole(x), expected(given), atol=2e-6)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("float16", 2**-8), ("bfloat16", 2**-5)])
def test_absorbed_and_expanded_latents_are_one_function_also_where_a_request_has_no_keys(
    dtype: str, error: float
) -> None:
    given = case("latents")
    held = of_rank(given, split_heads(5, 5, 1), "decode", Plan(), 0, 0)
    arrays = [jnp.asarray(held[name], dtype) for name in ("q", "up", "first", "second")]
    positions = jnp.asarray(held["q_positions"]), jnp.asarray(held["k_positions"]).at[1].set(-1)

    def attended(absorbed: bool, q: jax.Array, up: jax.Array, *bag: jax.Array) -> Partial:
        latent = Latent(up, NOPE, absorbed)
        return Inputs(q, (bag[0], bag[1]), *positions, None, SCALE, 1, latent=latent).attend()

    parts = [jax.jit(attended, static_argnums=0)(absorbed, *arrays) for absorbed in (False, True)]
    expanded, absorbed = (jax.tree.map(by_token, part) for part in parts)
    np.testing.assert_allclose(absorbed.out, expanded.out, atol=error)
    np.testing.assert_allclose(absorbed.lse, expanded.lse, atol=error)
    assert np.isneginf(absorbed.lse[1]).all()
    assert (np.asarray(absorbed.out)[1] == 0).all()
