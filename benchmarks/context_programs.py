"""Causal prefill attention of one layer over cp: the strategies' own programs, and others to hold them against."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.attention import tiles
from jaxpar.attention.inputs import Inputs, by_token
from jaxpar.attention.tiles import attend
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.layout import deal
from jaxpar.ledger.hlo import parse_collectives
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.registry import find

QUERY_HEADS, SIZE = 8, 64
SCALE = SIZE**-0.5
TILES = ((256, 128), (128, 128), (256, 256), (512, 512))
"""Rows and keys of tiles that one device may choose from."""
CHUNK = 128
"""Queries and keys that the other programs take at a time: of 64 to 512 the fastest for `ringattention`, and as fast as
any for XLA's partitioner."""


@dataclass(frozen=True)
class Program:
    """A compiled program with its arguments; `order` is the position of each token of its result [1, S, H, d]."""

    compiled: Any
    arguments: tuple[jax.Array, ...]
    order: np.ndarray
    sizes: dict[str, int]

    def turn(self) -> float:
        """Seconds of one run."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return time.perf_counter() - start

    def result(self) -> np.ndarray:
        """The attention of each position."""
        return np.asarray(self.compiled(*self.arguments))[:, np.argsort(self.order)]

    @property
    def temporary_bytes(self) -> int:
        """Of a rank."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    @property
    def sent_bytes(self) -> int:
        """That a rank sends, as compiled."""
        return sum(row.sent_bytes for row in parse_collectives(self.compiled.as_text(), self.sizes) if row.axes != ())


@dataclass(frozen=True)
class Problem:
    """One layer's attention of `length` tokens to themselves, with 8 query heads of 64 and `kv_heads` of keys."""

    length: int
    kv_heads: int

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Random queries [1, S, H, d], keys and values [1, S, K, d]."""
        rng = np.random.default_rng(0)
        heads = (QUERY_HEADS, self.kv_heads, self.kv_heads)
        q, k, v = (rng.standard_normal((1, self.length, count, SIZE), np.float32) for count in heads)
        return q, k, v

    def strategy(self, name: str, layout: str, ranks: int) -> Program:
        """A strategy of prefill attention as the step program runs it."""
        spec = MeshSpec(cp=ranks)
        plan, strategy = Plan(mesh=spec, layout=layout), find("prefill_attention", name)
        group = QUERY_HEADS // self.kv_heads

        def local(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
            k, v = (x.transpose(2, 0, 1, 3) for x in (k, v))
            inputs = Inputs(q, (k, v), positions, positions, None, SCALE, group)
            assert strategy.prepare is not None
            return strategy.run(inputs, plan, strategy.prepare(positions, positions, plan))

        order = np.concatenate(deal(layout, 0, self.length, ranks))
        return self._sharded(local, spec, order, (*self.values(), np.arange(self.length, dtype=np.int32)[None]))

    def one_device(self, tile: tuple[int, int]) -> Program:
        """All of it on one device in tiles of so many rows and keys."""
        group = QUERY_HEADS // self.kv_heads

        def whole(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
            q = q.reshape(1, self.length, self.kv_heads, group, SIZE).transpose(2, 0, 1, 3, 4)
            k, v = (x.transpose(2, 0, 1, 3) for x in (k, v))
            return by_token(attend(q, k, v, positions, positions, None, SCALE).out)

        arrays = (*map(jnp.asarray, self.values()), jnp.arange(self.length, dtype=jnp.int32)[None])
        usual = tiles.TILE_ROWS, tiles.KEY_TILE
        tiles.TILE_ROWS, tiles.KEY_TILE = tile
        try:
            compiled = jax.jit(whole).lower(*arrays).compile()
        finally:
            tiles.TILE_ROWS, tiles.KEY_TILE = usual
        return Program(compiled, arrays, np.arange(self.length), MeshSpec().sizes)

    def blockwise(self, tile: tuple[int, int]) -> Program:
        """A plain blockwise online softmax on one device, all heads at once; tiles above the diagonal are left out."""
        rows, columns = tile

        def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * SCALE, k, v))
            q = q.reshape(1, self.kv_heads, -1, self.length, SIZE)

            def block(start: jax.Array) -> jax.Array:
                queries = lax.dynamic_slice_in_dim(q, start, rows, axis=3)
                positions = start + jnp.arange(rows)

                def add(column: jax.Array, carry: _Carry) -> _Carry:
                    return _with_keys(carry, queries, k, v, positions, column * columns, columns)

                out, _, total = lax.fori_loop(0, (start + rows + columns - 1) // columns, add, _nothing(queries))
                return out / total[..., None]

            out = lax.map(block, jnp.arange(0, self.length, rows))
            return out.transpose(1, 0, 4, 2, 3, 5).reshape(1, self.length, QUERY_HEADS, SIZE)

        arrays = tuple(map(jnp.asarray, self.values()))
        compiled = jax.jit(whole).lower(*arrays).compile()
        return Program(compiled, arrays, np.arange(self.length), MeshSpec().sizes)

    def automatic(self, fused: bool, ranks: int) -> Program:
        """Plain `jit` of `jax.nn.dot_product_attention` (`fused`), or of an online softmax; tokens sharded over cp."""
        spec = MeshSpec(cp=ranks)
        mesh = make_mesh(spec, ensure_devices(spec, "cpu"))
        sharding = NamedSharding(mesh, P(None, "cp"))
        arrays = tuple(jax.device_put(x, sharding) for x in self.values())

        def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        step = jax.jit(whole if fused else online_softmax, in_shardings=(sharding,) * 3, out_shardings=sharding)
        return Program(step.lower(*arrays).compile(), arrays, np.arange(self.length), spec.sizes)

    def ringattention(self, ranks: int) -> Program | None:
        """The package `ringattention` 0.1.2; None where it is not installed."""
        ring = _ringattention()
        if ring is None:
            return None
        spec = MeshSpec(cp=ranks)
        settings = {
            "causal_block_size": 1, "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0,
            "query_chunk_size": CHUNK, "key_chunk_size": CHUNK, "dtype": jnp.float32,
            "policy": jax.checkpoint_policies.nothing_saveable, "precision": None, "prevent_cse": False,
        }  # fmt: skip

        def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return ring(q, k, v, None, None, None, "cp", True, settings)

        q, k, v = self.values()
        # It has as many KV heads as query heads.
        k, v = (np.repeat(x, QUERY_HEADS // self.kv_heads, axis=2) for x in (k, v))
        # The package was written before JAX typed replication, and its loops do not pass the check.
        return self._sharded(local, spec, np.arange(self.length), (q, k, v), check_vma=False)

    def _sharded(
        self,
        local: Callable[..., jax.Array],
        spec: MeshSpec,
        order: np.ndarray,
        arrays: tuple[np.ndarray, ...],
        check_vma: bool = True,
    ) -> Program:
        """Compile a function in the local view for arrays [1, S, ...], whose tokens lie in `order`."""
        mesh: Mesh = make_mesh(spec, ensure_devices(spec, "cpu"))
        tokens = P(None, "cp")
        arguments = tuple(jax.device_put(x[:, order], NamedSharding(mesh, tokens)) for x in arrays)
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(tokens,) * len(arrays), out_specs=tokens, check_vma=check_vma
        )
        return Program(jax.jit(mapped).lower(*arguments).compile(), arguments, order, spec.sizes)


def online_softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [1, S, H, d] over [1, S, K, d], as one writes it who leaves sharding to XLA.

    It takes some keys at a time, so that no rank holds all scores. Which of them nobody sees cannot be said in a global
    view: of every chunk of keys the queries of some rank see some.
    """
    length, heads = q.shape[1], k.shape[2]
    # Heads first: XLA:CPU would otherwise transpose for every product.
    rows = (q * SCALE).reshape(1, length, heads, -1, SIZE).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))

    def chunk(carry: _Carry, start: jax.Array) -> tuple[_Carry, None]:
        return _with_keys(carry, rows, k, v, jnp.arange(length), start, CHUNK), None

    (out, _, total), _ = lax.scan(chunk, _nothing(rows), jnp.arange(0, length, CHUNK))
    return (out / total[..., None]).transpose(0, 3, 1, 2, 4).reshape(q.shape)


_Carry = tuple[jax.Array, jax.Array, jax.Array]


def _nothing(rows: jax.Array) -> _Carry:
    # The first keys have one for every query, so that no maximum stays -inf.
    return jnp.zeros(rows.shape), jnp.full(rows.shape[:-1], -jnp.inf), jnp.zeros(rows.shape[:-1])


def _with_keys(
    carry: _Carry, rows: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, start: jax.Array, count: int
) -> _Carry:
    """The online softmax of queries [1, K, G, T, d] with `count` keys of [1, K, S, d] from `start` on in it."""
    out, top, total = carry
    keys, values = (lax.dynamic_slice_in_dim(x, start, count, axis=2) for x in (k, v))
    scores = jnp.einsum("bkgtd,bksd->bkgts", rows, keys)
    scores = jnp.where(start + jnp.arange(count)[None, :] <= positions[:, None], scores, -jnp.inf)
    higher = jnp.maximum(top, scores.max(axis=-1))
    weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
    out = out * kept[..., None] + jnp.einsum("bkgts,bksd->bkgtd", weights, values)
    return out, higher, total * kept + weights.sum(axis=-1)


def _ringattention() -> Callable[..., jax.Array] | None:
    """Its module for JAX; the package itself fails on JAX 0.12, which has no `jax.lib.xla_bridge`."""
    package = importlib.util.find_spec("ringattention")
    if package is None or not package.submodule_search_locations:
        return None
    path = f"{package.submodule_search_locations[0]}/ringattention_jax.py"
    found = importlib.util.spec_from_file_location("ringattention_jax", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.ring_attention  # type: ignore[no-any-return]
