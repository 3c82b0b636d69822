"""`head_dim`: each KV head lies over several ranks of tp, cut along its dimensions; scores are sums over them.

    two ranks of a KV head        q [T, G, d]     k [S, d]      v [S, d]
    rank 0                        q[.., :d/2] . k[:, :d/2] = s0 --+-- sum --> softmax . v[:, :d/2] = out[.., :d/2]
    rank 1                        q[.., d/2:] . k[:, d/2:] = s1 --+-- sum --> softmax . v[:, d/2:] = out[.., d/2:]

No key or value is stored twice where tp outgrows the KV heads. The price are the scores of every query and key, in
float32, and a softmax of all queries of the KV head on each of its ranks. The output stays cut, and so are the columns
of the output projection. Keys are taken in tiles, so that a rank has a bounded part of the scores; as many on every
rank, also where no query sees a key: no collective may stand where ranks part ways, and positions differ between
replicas. A norm over a head's dimensions sums its squares over the same ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.online import Cells, Sums, added, closed, opened
from jaxpar.attention.partial import no_keys
from jaxpar.collectives import sum_in_groups
from jaxpar.heads import HeadLayout
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Phase, Plan
from jaxpar.strategies import Share, Step, Strategy, own_share

SCORES = 1 << 22
"""Scores that a rank has at once, at most, unless the fewest keys of a tile make more: 16 MiB."""

FEWEST_KEYS = 128
"""Keys of a tile, where there are as many."""


class Tiles(NamedTuple):
    """So many tiles of `keys` keys each; the last is filled up."""

    number: int
    keys: int


def tiles_of(rows: int, keys: int) -> Tiles:
    """The tiles in which the `keys` of each request are taken, each key scored with `rows` query vectors in all."""
    most = max(FEWEST_KEYS, 1 << (max(SCORES // rows, 1).bit_length() - 1))
    count = -(-keys // most)
    return Tiles(count, -(-keys // count))


def run(x: Inputs, plan: Plan, prepared: None) -> jax.Array:
    """Attention of the rank's slices of queries, keys and values -> its slice [B, T, H, d / parts] float32."""
    assert x.groups is not None
    q, (k, v), groups = x.grouped, x.bag, x.groups
    tiles = tiles_of(q.size // q.shape[-1], k.shape[2])
    missing = tiles.number * tiles.keys - k.shape[2]
    k, v = (jnp.pad(plane, ((0, 0), (0, 0), (0, missing), (0, 0))) for plane in (k, v))
    at = jnp.pad(x.k_positions, ((0, 0), (0, missing)), constant_values=-1)

    def add(sums: Sums, tile: jax.Array) -> tuple[Sums, None]:
        keys, values = (lax.dynamic_slice_in_dim(plane, tile * tiles.keys, tiles.keys, axis=2) for plane in (k, v))
        here = lax.dynamic_slice_in_dim(at, tile * tiles.keys, tiles.keys, axis=1)
        cells = Cells(q, keys, values, x.q_positions, here)
        return added(sums, cells, x.window, x.scale, reduce=lambda s: sum_in_groups(s, plan.width, groups, 3)), None

    start = opened(no_keys(q, v.shape[3], k, v, at))
    sums, _ = lax.scan(add, start, jnp.arange(tiles.number, dtype=jnp.int32))
    return x.finish(closed(sums))


def mean_squares(
    q: jax.Array, k: jax.Array, plan: Plan, phase: Phase, heads: HeadLayout, size: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Of slices of queries [T, H, d / parts] and keys [T, K, d / parts] the mean squares [T, H or K, 1] of whole heads.

    None where heads are not split inside. `size` is d.
    """
    if heads.groups is None:
        return None, None
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) for x in (q, k)]
    with jax.named_scope(f"{phase}_attention:head_dim"):
        means = sum_in_groups(jnp.concatenate(squares, axis=1), plan.width, heads.groups, 0) / size
    return means[:, : q.shape[1]], means[:, q.shape[1] :]


def traffic(step: Step) -> list[Traffic]:
    """For each tile of keys a reduce-scatter and an all-gather of scores; for q/k norms both of a number a head."""
    tiles, heads, layers = tiles_of(_vectors(step), step.keys), step.heads, step.layers
    sums = [(layers * tiles.number, _vectors(step), tiles.keys)]
    if step.config.qk_norm:
        sums.append((layers, heads.q_local + heads.kv_local, step.rows))
    scope = (f"{step.phase}_attention", "head_dim")
    rows = []
    for calls, others, length in sums:
        part = 4 * others * -(-length // heads.parts)
        for collective, message in (("reduce_scatter", heads.parts * part), ("all_gather", part)):
            rows.append(step.sends(scope, collective, step.plan.width, calls, message, heads.parts))
    return rows


def flops(step: Step) -> int:
    """FLOPs of one layer's products on a rank: every tile is computed."""
    tiles, config, heads = tiles_of(_vectors(step), step.keys), step.config, step.heads
    sizes = heads.slice_of(config.head_dim) + heads.slice_of(config.v_head_dim)
    return 2 * _vectors(step) * tiles.number * tiles.keys * sizes


def check(step: Step) -> str | None:
    """Heads must be split inside, which the plan's `kv_split` says."""
    if step.heads.parts > 1:
        return None
    return (
        f"attention 'head_dim' is for KV heads that tp splits inside, and kv_split={step.plan.kv_split!r} with "
        f"tp={step.plan.mesh.tp} splits none: use auto"
    )


def share(step: Step, rank: int) -> Share:
    """All query heads of a KV head, over all keys; the ranks that share them compute a slice of each product."""
    return own_share(step, rank)._replace(all_tiles=True)


def _vectors(step: Step) -> int:
    """Query vectors of a rank, slices as they are."""
    return step.rows * step.heads.q_local


PREFILL, DECODE = (
    Strategy(
        name="head_dim",
        sublayer=sublayer,
        axes=("tp",),
        collectives=("reduce_scatter", "all_gather"),
        needs="kv_split='head_dim', cp = 1, tp a multiple of KV heads",
        run=run,
        traffic=traffic,
        check=check,
        share=share,
    )
    for sublayer in ("prefill_attention", "decode_attention")
)
