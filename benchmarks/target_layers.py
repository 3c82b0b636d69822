"""Sublayers alone, as steps run them and as XLA's partitioner makes them of a program in the global view.

Each function gives a jitted function with the abstract arrays that it takes, sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.attention.bind import bound
from jaxpar.attention.inputs import Inputs as Attended
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.moe.bind import bound as dispatched
from jaxpar.moe.grouped import expert_ffn, sort_by_expert
from jaxpar.moe.inputs import Experts, Inputs
from jaxpar.nn.mlp import gated
from jaxpar.plan import Plan
from jaxpar.registry import chosen
from jaxpar.strategies import Step
from jaxpar.vocabulary.sampling import SamplingArrays, gumbel_noise, sample


class Jitted(NamedTuple):
    """A jitted function, and what it takes."""

    function: Any
    arguments: tuple[Any, ...]


def _array(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _mapped(local: Callable[..., Any], mesh: Mesh, specs: tuple[P, ...], out: P, arrays: tuple[Any, ...]) -> Jitted:
    return Jitted(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)), arrays)


def _automatic(program: Callable[..., Any], mesh: Mesh, out: P, arrays: tuple[Any, ...]) -> Jitted:
    return Jitted(jax.jit(program, out_shardings=NamedSharding(mesh, out)), arrays)


def experts(config: ModelConfig, plan: Plan, mesh: Mesh, tokens: int, kind: str) -> Jitted:
    """The experts of one MoE layer for `tokens` of all ranks, with the routing given.

    `kind` is "explicit", what the plan's dispatch is; of the partitioner's programs "ragged_dot" sorts rows by expert,
    "capacity" makes one-hot products with room for 1.25 times an even share at each expert and drops the others
    (GShard, arXiv:2006.16668), "all" runs all experts on all tokens.
    """
    moe, over = config.moe, plan.experts
    assert moe is not None
    count, hidden, width, choices = moe.num_experts, config.hidden_size, moe.intermediate_size, moe.router.top_k
    rows, whole = P(over, None), P(over, None, None)
    # `ragged_dot` takes weights as [E, I, O].
    swapped = kind == "ragged_dot"
    up = (count, hidden, 2 * width) if swapped else (count, 2 * width, hidden)
    down = (count, width, hidden) if swapped else (count, hidden, width)
    arrays = (
        _array(mesh, rows, (tokens, hidden), jnp.bfloat16),
        _array(mesh, rows, (tokens, choices), jnp.int32),
        _array(mesh, rows, (tokens, choices), jnp.float32),
        _array(mesh, whole, up, jnp.bfloat16),
        _array(mesh, whole, down, jnp.bfloat16),
    )
    if kind == "explicit":
        ranks = plan.mesh.extent(over)
        step = Step(replace(config, num_hidden_layers=1), plan, "prefill", 1, tokens // ranks, 16)
        run, slots_per_rank = dispatched(chosen(step)["moe_dispatch"], step), count // ranks

        def local(x: jax.Array, slots: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            own = Experts(lambda rows, counts: expert_ffn(rows, up, down, counts, gated), up)
            return run(Inputs(x, slots, weights, own, slots_per_rank)).rows.astype(x.dtype)

        return _mapped(local, mesh, (rows, rows, rows, whole, whole), rows, arrays)
    programs = {"ragged_dot": _sorted, "capacity": _capacity(plan.mesh.extent(over)), "all": _all}
    return _automatic(programs[kind], mesh, rows, arrays)


def _sorted(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    choices, width = slots.shape[1], down.shape[1]
    order, counts = sort_by_expert(slots.reshape(-1), gate_up.shape[0])
    both = lax.ragged_dot(x[order // choices], gate_up, counts)
    done = lax.ragged_dot(gated(both[:, :width], both[:, width:]).astype(x.dtype), down, counts)
    weighed = done * weights.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(x).at[order // choices].add(weighed)


def _all(x: jax.Array, slots: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    width = down.shape[2]
    by_expert = (jax.nn.one_hot(slots, gate_up.shape[0], dtype=x.dtype) * weights[:, :, None].astype(x.dtype)).sum(1)
    both = jnp.einsum("td,efd->etf", x, gate_up)
    done = jnp.einsum("etf,edf->etd", gated(both[..., :width], both[..., width:]), down)
    return jnp.einsum("etd,te->td", done, by_expert)


def _capacity(groups: int) -> Callable[..., jax.Array]:
    def program(x: jax.Array, slots: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        (tokens, hidden), (_, choices), count, width = x.shape, slots.shape, up.shape[0], down.shape[2]
        each = tokens // groups
        room = -(-5 * each * choices // (4 * count))
        chosen = jax.nn.one_hot(slots.reshape(groups, each * choices), count, dtype=jnp.float32)
        place = (jnp.cumsum(chosen, axis=1) * chosen - 1).astype(jnp.int32)
        there = jax.nn.one_hot(place, room, dtype=x.dtype).reshape(groups, each, choices, count, room)
        weighed = (there * weights.reshape(groups, each, choices, 1, 1).astype(x.dtype)).sum(axis=2)
        rows = jnp.einsum("gsd,gsec->egcd", x.reshape(groups, each, hidden), there.sum(axis=2))
        both = jnp.einsum("egcd,efd->egcf", rows, up)
        done = jnp.einsum("egcf,edf->egcd", gated(both[..., :width], both[..., width:]), down)
        return jnp.einsum("egcd,gsec->gsd", done, weighed).reshape(x.shape)

    return program


def sampling(config: ModelConfig, plan: Plan, mesh: Mesh, lanes: int, kind: str) -> Jitted:
    """Drawing a token of each of `lanes` by temperature, top-k and top-p, from logits that lie over tp.

    `kind` is "explicit"; or the partitioner's, of a program that sorts the vocabulary ("sort"), or of the explicit
    program's own search ("search").
    """
    vocabulary, split = config.vocab_size, P(None, plan.width)
    real, whole = (_array(mesh, P(), (lanes,), dtype) for dtype in (jnp.float32, jnp.int32))
    options = SamplingArrays(real, whole, real, _array(mesh, P(), (lanes,), jnp.uint32), whole)
    arrays = (_array(mesh, split, (lanes, vocabulary), jnp.float32), options)
    if kind == "explicit":

        def local(logits: jax.Array, options: SamplingArrays) -> jax.Array:
            return sample(logits, vocabulary, plan.width, options, sampled=True).token

        return _mapped(local, mesh, (split, P()), P(), arrays)

    def search(logits: jax.Array, options: SamplingArrays) -> jax.Array:
        return sample(logits, vocabulary, (), options, sampled=True).token

    def sort(logits: jax.Array, options: SamplingArrays) -> jax.Array:
        scaled = logits / jnp.maximum(options.temperature, 1e-6)[:, None]
        order = jnp.argsort(-scaled, axis=-1)
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        mass = jax.nn.softmax(ranked, axis=-1)
        kept = jnp.cumsum(mass, axis=-1) - mass < options.top_p[:, None]
        top_k = jnp.where(options.top_k > 0, options.top_k, vocabulary)
        kept = kept & (jnp.arange(vocabulary)[None, :] < top_k[:, None])
        noisy = ranked + gumbel_noise(options.seed, options.position, jnp.arange(vocabulary, dtype=jnp.int32))
        best = jnp.where(kept, noisy, -jnp.inf).argmax(axis=-1)
        return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0]

    return _automatic(sort if kind == "sort" else search, mesh, P(), arrays)


def decode_attention(config: ModelConfig, plan: Plan, mesh: Mesh, lanes: int, keys: int, kind: str) -> Jitted:
    """Attention of one new token of each of `lanes` over `keys` positions in all, which lie over cp.

    A rank is left with its slice of the heads. `kind` is "explicit" or "automatic".
    """
    heads, pairs, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    over, group, scale = plan.sequence, heads // pairs, size**-0.5
    whole, bag, at, out = P(), P(None, None, over, None), P(None, over), P(None, None, over, None)
    arrays = (
        _array(mesh, whole, (lanes, 1, heads, size), jnp.bfloat16),
        *[_array(mesh, bag, (pairs, lanes, keys, size), jnp.bfloat16)] * 2,
        _array(mesh, whole, (lanes, 1), jnp.int32),
        _array(mesh, at, (lanes, keys), jnp.int32),
    )
    if kind == "explicit":
        step = Step(replace(config, num_hidden_layers=1), plan, "decode", lanes, 1, keys // plan.mesh.cp)
        strategy = chosen(step)["decode_attention"]

        def local(q: jax.Array, k: jax.Array, v: jax.Array, q_at: jax.Array, k_at: jax.Array) -> jax.Array:
            attend = bound(strategy, q_at, k_at, plan, "decode")
            return attend(Attended(q, (k, v), q_at, k_at, None, scale, group)).astype(q.dtype)

        return _mapped(local, mesh, (whole, bag, bag, whole, at), out, arrays)

    def program(q: jax.Array, k: jax.Array, v: jax.Array, q_at: jax.Array, k_at: jax.Array) -> jax.Array:
        grouped = q.reshape(lanes, pairs, group, size)
        scores = jnp.einsum("bhgd,hbsd->bhgs", grouped, k, preferred_element_type=jnp.float32) * scale
        seen = (k_at >= 0) & (k_at <= q_at)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf), axis=-1).astype(q.dtype)
        return jnp.einsum("bhgs,hbsd->bhgd", weights, v).reshape(lanes, 1, heads, size)

    return _automatic(program, mesh, out, arrays)
