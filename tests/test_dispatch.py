"""Every dispatch gives the weighted sum over a token's experts, whatever the routing, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.moe.dispatch.routes import routes
from jaxpar.moe.inputs import Dispatched, Experts, Inputs
from jaxpar.plan import Plan
from jaxpar.registry import find

WIDTH = 3
DISPATCHES: dict[str, dict[str, Any]] = {
    "standard": {"moe_dispatch": "standard"},
    "all_to_all": {"moe_dispatch": "all_to_all"},
    "all_to_all, per rank": {"moe_dispatch": "all_to_all", "moe_deduplicate": True},
    "ragged": {"moe_dispatch": "ragged"},
    "ragged, per rank": {"moe_dispatch": "ragged", "moe_deduplicate": True},
    "two_level": {"moe_dispatch": "two_level"},
}


class Layer(NamedTuple):
    """Which ranks dispatch what: R tokens a rank with k choices, E experts in slots of the ranks of `over`."""

    mesh: str
    over: str
    rows: int
    choices: int
    experts: int
    devices_per_node: int

    @property
    def spec(self) -> MeshSpec:
        return MeshSpec.parse(self.mesh)

    @property
    def ranks(self) -> int:
        return self.spec.extent(self.over.split(","))

    @property
    def slots_per_rank(self) -> int:
        return -(-self.experts // self.ranks)

    @property
    def none(self) -> int:
        return self.ranks * self.slots_per_rank


TWO = Layer("ep=2", "ep", rows=5, choices=2, experts=4, devices_per_node=1)
FOUR = Layer("dp=2,tp=2", "dp,tp", rows=6, choices=3, experts=10, devices_per_node=2)
EIGHT = Layer("dp=2,ep=2,tp=2", "dp,ep,tp", rows=4, choices=2, experts=12, devices_per_node=4)
REPLICAS = Layer("dp=2,ep=2,tp=2", "ep,tp", rows=3, choices=2, experts=5, devices_per_node=2)
LAYERS = [TWO, FOUR, EIGHT, REPLICAS]


class Tokens(NamedTuple):
    """Tokens of all ranks: x [N, D], slots and weights [N, k]."""

    x: np.ndarray
    slots: np.ndarray
    weights: np.ndarray


def scale(slots: Any) -> Any:
    return 1.0 + slots % 7


def expected(tokens: Tokens, none: int) -> np.ndarray:
    """Expert e makes x * (1 + e mod 7) + e of a row x: the weighted sum over each token's choices."""
    slots = tokens.slots[:, :, None]
    made = tokens.x[:, None, :] * scale(slots) + slots
    return np.where(slots < none, made * tokens.weights[:, :, None], 0.0).sum(axis=1)


def own_experts(first: jax.Array, like: jax.Array) -> Experts:
    def run(rows: jax.Array, counts: jax.Array) -> jax.Array:
        local = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(len(rows)), side="right")[:, None]
        slots = (first + local).astype(jnp.float32)
        made = rows.astype(jnp.float32) * scale(slots) + slots
        return jnp.where(local < len(counts), made, 0.0)

    return Experts(run, like)


@cache
def program(
    layer: Layer, dispatch: str, dtype: Any = jnp.float32, room: int = 0, **more: Any
) -> Callable[..., Dispatched]:
    spec, over = layer.spec, tuple(layer.over.split(","))
    fields = DISPATCHES[dispatch] | {"devices_per_node": layer.devices_per_node} | more
    plan = Plan(spec, experts_over=over, **fields)
    strategy = find("moe_dispatch", plan.moe_dispatch)
    everywhere = P(spec.active(AXES))

    def local(x: jax.Array, slots: jax.Array, weights: jax.Array) -> Dispatched:
        first = jax.lax.axis_index(over) * layer.slots_per_rank
        inputs = Inputs(x.astype(dtype), slots, weights, own_experts(first, first), layer.slots_per_rank, room)
        rows, dropped = strategy.run(inputs, plan)
        return Dispatched(rows.astype(jnp.float32), None if dropped is None else dropped[None])

    out = Dispatched(everywhere, everywhere if plan.moe_capacity else None)
    mesh = make_mesh(spec, ensure_devices(spec))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=everywhere, out_specs=out))


def run(layer: Layer, dispatch: str, tokens: Tokens, **more: Any) -> np.ndarray:
    return np.asarray(program(layer, dispatch, **more)(*tokens).rows)


def some_tokens(layer: Layer, slots: np.ndarray, seed: int = 0) -> Tokens:
    """Tokens with these choices [N, k]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((len(slots), WIDTH)).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, slots.shape).astype(np.float32)
    return Tokens(x, slots.astype(np.int32), np.where(slots < layer.none, weights, 0).astype(np.float32))


def routed(layer: Layer, skew: float, padding: float, seed: int) -> Tokens:
    """Each token to its k best experts: the more skewed, the more tokens agree on them; some are padding."""
    rng = np.random.default_rng(seed)
    tokens = layer.spec.size * layer.rows
    scores = rng.gumbel(size=(tokens, layer.experts)) + skew * rng.standard_normal(layer.experts)
    slots = np.argsort(-scores, axis=1)[:, : layer.choices]
    slots[rng.uniform(size=tokens) < padding] = layer.none
    return some_tokens(layer, slots, seed)


EVERY = [pytest.param(layer, name, id=f"{layer.mesh}-{layer.over}-{name}") for layer in LAYERS for name in DISPATCHES]


@pytest.mark.parametrize(("layer", "dispatch"), EVERY)
@settings(max_examples=15)
@given(skew=st.floats(0, 10), padding=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 2**32 - 1))
def test_every_token_gets_the_weighted_sum_of_its_experts(
    layer: Layer, dispatch: str, skew: float, padding: float, seed: int
) -> None:
    tokens = routed(layer, skew, padding, seed)
    np.testing.assert_allclose(run(layer, dispatch, tokens), expected(tokens, layer.none), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param([6, 7, 8], id="all to one rank"),
        pytest.param([2, 12, 12], id="all to one expert"),
        pytest.param([0, 3, 9], id="a rank without tokens, and the last expert"),
        pytest.param([12, 12, 12], id="nothing but padding"),
    ],
)
def test_however_skewed_the_routing_no_row_is_lost(dispatch: str, choices: list[int]) -> None:
    tokens = some_tokens(FOUR, np.tile(choices, (FOUR.spec.size * FOUR.rows, 1)))
    np.testing.assert_allclose(run(FOUR, dispatch, tokens), expected(tokens, FOUR.none), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_tokens_of_one_rank_alone_reach_all_others(dispatch: str) -> None:
    slots = np.full((FOUR.spec.size * FOUR.rows, FOUR.choices), FOUR.none)
    slots[2 * FOUR.rows : 3 * FOUR.rows] = [[0, 4, 8], [9, 1, 5], [2, 3, 6], [7, 8, 9], [5, 0, 1], [8, 2, 4]]
    tokens = some_tokens(FOUR, slots)
    np.testing.assert_allclose(run(FOUR, dispatch, tokens), expected(tokens, FOUR.none), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_rank_may_have_a_single_token_and_padding_may_stand_among_a_token_s_choices(dispatch: str) -> None:
    layer = FOUR._replace(rows=1)
    tokens = some_tokens(layer, np.array([[0, 12, 9], [12, 12, 12], [5, 4, 12], [12, 8, 2]]))
    np.testing.assert_allclose(run(layer, dispatch, tokens), expected(tokens, layer.none), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_16_bit_rows_come_back_rounded_no_more_than_once_a_level(dispatch: str) -> None:
    tokens = routed(FOUR, skew=1.0, padding=0.1, seed=3)
    tokens = tokens._replace(x=tokens.x.astype(jnp.bfloat16).astype(np.float32))
    found, right = run(FOUR, dispatch, tokens, dtype=jnp.bfloat16), expected(tokens, FOUR.none)
    # Each partial sum of one rank is rounded where it is sent, and once more by a node.
    parts = expected(tokens._replace(x=abs(tokens.x)), FOUR.none)
    assert (np.abs(found - right) <= 2**-8 * 2.1 * parts).all()


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_what_a_token_holds_stays_its_own(dispatch: str) -> None:
    tokens = routed(FOUR, skew=4.0, padding=0.2, seed=5)
    assert tokens.slots[7].max() < FOUR.none
    tokens.x[7] = np.nan
    found = run(FOUR, dispatch, tokens)
    assert np.isnan(found).all(axis=1).nonzero()[0].tolist() == [7]
    np.testing.assert_allclose(
        np.delete(found, 7, axis=0), np.delete(expected(tokens, FOUR.none), 7, axis=0), rtol=1e-5, atol=1e-5
    )


# Capacity


def without_what_does_not_fit(tokens: Tokens, per_rank: bool, room: int) -> tuple[Tokens, int]:
    """Tokens of FOUR without the choices for which a pair's buffer has no room, and how many rows these are."""
    kept, dropped = tokens.slots.copy(), 0
    for rank in range(FOUR.ranks):
        mine = kept[rank * FOUR.rows : (rank + 1) * FOUR.rows]
        for to in range(FOUR.ranks):
            hits = mine // FOUR.slots_per_rank == to
            if per_rank:
                late = np.flatnonzero(hits.any(axis=1))[room:]
                mine[late] = np.where(hits[late], FOUR.none, mine[late])
            else:
                late = np.flatnonzero(hits)
                late = late[np.argsort(mine.flat[late], kind="stable")][room:]
                mine.flat[late] = FOUR.none
            dropped += len(late)
    return tokens._replace(slots=kept), dropped


# A buffer for 18 choices of a rank over four; or for those of its 6 tokens that have one of 3 out of 12 slots among
# their 3, 1 - 84 / 220 of them.
@pytest.mark.parametrize(("dispatch", "room"), [("all_to_all", 5), ("all_to_all, per rank", 4)])
@settings(max_examples=15)
@given(skew=st.floats(0, 10), seed=st.integers(0, 2**32 - 1))
def test_with_a_capacity_what_does_not_fit_is_dropped_and_counted_and_the_rest_comes_back_in_blocks(
    dispatch: str, room: int, skew: float, seed: int
) -> None:
    tokens = routed(FOUR, skew, padding=0.1, seed=seed)
    kept, dropped = without_what_does_not_fit(tokens, "per rank" in dispatch, room)
    found, counted = program(FOUR, dispatch, moe_capacity=1.0, single_batch_overlap=2)(*tokens)
    assert int(np.asarray(counted).sum()) == dropped
    np.testing.assert_allclose(np.asarray(found), expected(kept, FOUR.none), rtol=1e-5, atol=1e-5)


# Offsets

RANKS, SLOTS, ROWS = 4, 3, 7


@cache
def routes_of_every_rank() -> Callable[[np.ndarray], Any]:
    spec = MeshSpec(dp=2, tp=2)

    def local(slots: jax.Array) -> Any:
        path = routes(slots, SLOTS, ("dp", "tp"))
        parts = path.sent(2, 3), path.received(2, 3)
        return path.order, path.pieces(("dp", "tp")), path.arrived(RANKS * ROWS), parts

    everywhere = P(("dp", "tp"))
    program = jax.shard_map(
        local, mesh=make_mesh(spec, ensure_devices(spec)), in_specs=everywhere, out_specs=everywhere
    )
    return jax.jit(program)


@settings(max_examples=30)
@given(st.lists(st.integers(0, RANKS * SLOTS), min_size=RANKS * ROWS, max_size=RANKS * ROWS))
def test_offsets_are_those_of_rows_sorted_by_rank_and_slot_and_every_row_comes_back_to_its_place(
    chosen: list[int],
) -> None:
    slots = np.array(chosen, np.int32).reshape(RANKS, ROWS)
    order, (there, back), arrived, (sent, received) = jax.tree.map(
        lambda x: np.asarray(x).reshape(RANKS, -1, *x.shape[1:]), routes_of_every_rank()(slots.reshape(-1))
    )
    np.testing.assert_array_equal(order, np.argsort(slots, axis=1, kind="stable"))
    sizes = (slots[:, None, :] // SLOTS == np.arange(RANKS)[None, :, None]).sum(axis=2)  # from, to
    for pieces, count in ((there, sizes), (back, sizes.T)):
        np.testing.assert_array_equal(pieces.sizes, count)
        np.testing.assert_array_equal(pieces.arriving, count.T)
        np.testing.assert_array_equal(pieces.starts, np.cumsum(count, axis=1) - count)
        np.testing.assert_array_equal(pieces.targets, np.cumsum(count, axis=0) - count)

    # Rows are named by the place of their choice among all; they travel as the pieces say.
    rows = order + ROWS * np.arange(RANKS)[:, None]
    outward = moved(rows, there, RANKS * ROWS)
    home = moved(outward, back, ROWS)
    for rank in range(RANKS):
        pieces = [[row for row in rows[source] if slots.flat[row] // SLOTS == rank] for source in range(RANKS)]
        gone = [row for piece in pieces for row in piece]
        assert outward[rank].tolist() == filled(gone, RANKS * ROWS, -1)
        assert arrived[rank].tolist() == filled([slots.flat[row] % SLOTS for row in gone], RANKS * ROWS, SLOTS)
        own = [row for row in rows[rank] if slots.flat[row] < RANKS * SLOTS]
        assert home[rank].tolist() == filled(own, ROWS, -1)
        # The same in parts: the rows from the third to the fifth of each piece.
        for source, piece in enumerate(pieces):
            assert received[rank, source].tolist() == filled([slots.flat[row] % SLOTS for row in piece[2:5]], 3, SLOTS)
            choice, is_there = (part[source, rank] for part in sent)
            assert filled((choice + ROWS * source)[is_there].tolist(), 3, -1) == filled(piece[2:5], 3, -1)


def filled(values: list[int], size: int, value: int) -> list[int]:
    return values + [value] * (size - len(values))


def moved(rows: np.ndarray, pieces: Any, room: int) -> np.ndarray:
    """What a ragged all-to-all of rows [ranks, N] makes of them, [ranks, room]; -1: nothing."""
    out = np.full((RANKS, room), -1)
    for source in range(RANKS):
        for to in range(RANKS):
            start, size, target = (part[source, to] for part in (pieces.starts, pieces.sizes, pieces.targets))
            assert pieces.arriving[to, source] == size
            out[to, target : target + size] = rows[source, start : start + size]
    return out
