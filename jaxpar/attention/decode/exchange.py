"""What the decode strategies over cp share: exchanging partial results for heads, and their closed forms.

After it the heads of a rank's width lie over (tp, cp): rank c of cp has the c-th slice of them, finished.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.attention.decode.overlap import parts_of
from jaxpar.attention.inputs import Inputs, by_token, pad_heads
from jaxpar.attention.packed import pack, packed_bytes, unpack
from jaxpar.attention.partial import Partial, merge_all
from jaxpar.collectives import all_gather, all_to_all, rank_index
from jaxpar.fixed import by_row
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step


def exchange(x: Inputs, plan: Plan) -> jax.Array:
    """Attention over the rank's own keys, and one all-to-all of outputs and LSE together; the receiver merges.

    rank 0 of cp   o0[h0 h1]  ->  o0[h0] o1[h0] merged        keys of rank r give the partial results o_r
    rank 1         o1[h0 h1]  ->  o0[h1] o1[h1] merged

    Args:
        x: all query heads of the rank, and its own keys. Outputs are sent in the dtype of the queries, LSE in float32.
        plan: of the step.

    Returns:
        [B, T, H / cp, d] float32, rounded up; the last ranks may have heads of zeros at the end.
    """
    dtype, ranks = x.q.dtype, plan.mesh.cp
    packed = pad_heads(by_token(pack(x.attend(), dtype)), ranks)
    parts = unpack(all_to_all(packed[None], plan.sequence, split=3, concat=0), dtype)
    return x.weighed(_merged(parts, x.fixed is not None), None if x.sinks is None else _slice_of(x.sinks, plan))


def _merged(parts: Partial, fixed: bool) -> Partial:
    """Partials of N ranks [N, B, T, ...] -> of all their keys [B, T, ...]."""
    _, lanes, tokens, *_ = parts.lse.shape
    rows = (jnp.moveaxis(x, 0, 2).reshape(lanes * tokens, x.shape[0], *x.shape[3:]) for x in parts)

    def merge(out: jax.Array, lse: jax.Array) -> Partial:
        return merge_all(Partial(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0)))

    merged = by_row(merge, *rows, fixed=fixed)
    return Partial(*(x.reshape(lanes, tokens, *x.shape[1:]) for x in merged))


def _slice_of(sinks: jax.Array, plan: Plan) -> jax.Array:
    """Those of the heads [H] that the exchange leaves this rank with, [H / cp] rounded up."""
    count = -(-sinks.shape[0] // plan.mesh.cp)
    padded = jnp.pad(sinks, (0, count * plan.mesh.cp - sinks.shape[0]))
    return lax.dynamic_slice_in_dim(padded, rank_index(plan.sequence) * count, count)


def gather_queries(x: Inputs, plan: Plan) -> Inputs:
    """The query heads of all ranks of cp, each of which projected a share, in order."""
    heads, count = x.kv_heads * x.group, x.q.shape[2]
    # The last shares begin earlier where heads do not divide (`nn.linear.share_of`).
    where = [head // count * count + head - min(head // count * count, heads - count) for head in range(heads)]
    gathered = all_gather(x.q, plan.sequence, dimension=2)
    return x._replace(q=gathered if heads == gathered.shape[2] else gathered[:, :, np.asarray(where)])


def exchange_traffic(step: Step, strategy: str) -> list[Traffic]:
    """One all-to-all a layer and part."""
    heads = step.plan.mesh.cp * step.heads_over_cp * packed_bytes(step.config.v_head_dim, step.itemsize)
    return [_in_layers(step, strategy, "all_to_all", part.rows * heads) for part in parts_of(step)]


def query_traffic(step: Step, strategy: str) -> list[Traffic]:
    """One all-gather a layer and part, of a rank's slice of the queries."""
    slice_bytes = step.heads_over_cp * step.config.head_dim * step.itemsize
    return [_in_layers(step, strategy, "all_gather", part.rows * slice_bytes) for part in parts_of(step)]


def rescale_traffic(step: Step, strategy: str) -> list[Traffic]:
    """One all-gather of LSE and one reduce-scatter of outputs, a layer and part."""
    out = step.plan.mesh.cp * step.heads_over_cp * step.config.v_head_dim * step.itemsize
    return [
        row
        for part in parts_of(step)
        for row in (
            _in_layers(step, strategy, "all_gather", part.rows * step.heads.q_local * 4),
            _in_layers(step, strategy, "reduce_scatter", part.rows * out),
        )
    ]


def _in_layers(step: Step, strategy: str, collective: str, message: int) -> Traffic:
    """A collective over cp in every layer."""
    scope, layers = ("decode_attention", strategy), step.layers
    return step.sends(scope, collective, step.plan.sequence, layers, message)
