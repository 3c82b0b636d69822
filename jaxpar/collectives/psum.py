"""`psum`: the tensor-parallel sum by the backend's own all-reduce.

rank 0: p0 -+                +-> p0 + p1 + p2 + p3
rank 1: p1 -+-- all-reduce --+-> p0 + p1 + p2 + p3        twice a layer: after attention, after the FFN
rank 2: p2 -+                +-> ...                      (Megatron-LM, arXiv:1909.08053)
rank 3: p3 -+
"""

from __future__ import annotations

from jaxpar.collectives.reduce import all_sum
from jaxpar.ledger.traffic import Traffic, all_reduce_bytes
from jaxpar.strategies import Step, Strategy


def traffic(step: Step) -> list[Traffic]:
    """Two all-reduces of the residual's [T, D] a layer; ring: each rank sends 2(P-1)/P of it."""
    axes = step.plan.sublayer(step.phase).sum
    if not axes:
        return []
    layers, message = step.config.num_hidden_layers, step.rows * step.config.hidden_size * step.itemsize
    sent = layers * all_reduce_bytes(message, step.ranks(axes))
    return [Traffic(name, "psum", "all_reduce", axes, layers, message, sent) for name in ("attention", "ffn")]


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes: any message, any number of ranks."""
    return None


STRATEGY = Strategy(
    name="psum",
    sublayer="all_reduce",
    axes=("tp",),
    collectives=("all_reduce",),
    needs="any shape",
    run=all_sum,
    traffic=traffic,
    check=check,
)
