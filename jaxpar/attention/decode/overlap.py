"""`decode_overlap`: the requests of a decode step in parts, one part's exchange beside the next part's attention.

    attend 0 | attend 1 | attend 2
             | send 0   | send 1   | send 2        HOP-B of Helix (arXiv:2507.07120)

No part depends on another, so that a backend may run an exchange while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpar.attention.inputs import Inputs
from jaxpar.overlap import even_parts
from jaxpar.strategies import Step


def parts_of(step: Step) -> list[Step]:
    """The parts of a decode step as steps of their own, for closed forms."""
    return [replace(step, lanes=lanes) for lanes in even_parts(step.lanes, step.plan.decode_overlap)]


def in_parts(run: Callable[[Inputs], jax.Array], x: Inputs, parts: int) -> jax.Array:
    """What `run` gives for all lanes, computed part by part."""
    if parts == 1:
        return run(x)
    start, done = 0, []
    for count in even_parts(x.q.shape[0], parts):
        lanes = slice(start, start + count)
        queries = x._replace(q=x.q[lanes], q_positions=x.q_positions[lanes])
        bag = x.bag[0][:, lanes], x.bag[1][:, lanes]
        pages = x.pages and x.pages._replace(table=x.pages.table[lanes])
        done.append(run(queries._replace(bag=bag, pages=pages, k_positions=x.k_positions[lanes])))
        start += count
    return jnp.concatenate(done)
