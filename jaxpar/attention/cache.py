"""The paged KV cache: named planes of pages, and the positions of what they hold (PagedAttention, arXiv:2309.06180).

    plane  [stages, heads, pages, page_size, size]     one for each name and slot of layers, heads over tp
    positions     [pages, page_size]                   shared by all layers of a stage; -1: holds no key
    page table    [lanes, width]                       page ids of each request, local to its replica; -1: no page

The stages of a pipeline have pages of the same numbers, and fill them at different times: each has its own positions.

A request's tokens fill its pages in the order in which they arrive; masks come from the positions, so the order does
not matter. Heads come first: the pages gathered for a request are then contiguous keys of one head, as the attention
product wants them, with no transposition on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.plan import Plan

Planes = dict[str, jax.Array]


@dataclass(frozen=True)
class Plane:
    """What an attention keeps for each token: `heads` (of all ranks, split over `split`) vectors of `size` values."""

    name: str
    heads: int
    size: int
    split: tuple[str, ...]


class Cache(NamedTuple):
    """`planes[slot][name]` and the positions, as arrays, abstract arrays or PartitionSpecs.

    Between the ticks of a pipeline it also keeps `flow`, the residual rows that each stage passes on; None without one.
    """

    planes: list[dict[str, Any]]
    positions: Any
    flow: Any = None


def cache_shapes(planes: list[list[Plane]], pages: int, plan: Plan) -> Cache:
    """Global shapes of a cache with `pages` pages on every rank of `plan.pages`, as ShapeDtypeStructs."""
    total = pages * plan.mesh.dp * plan.mesh.ep * plan.mesh.cp
    return Cache(
        planes=[
            {
                plane.name: jax.ShapeDtypeStruct(
                    (plan.mesh.pp, plane.heads, total, plan.page_size, plane.size), jnp.dtype(plan.dtype)
                )
                for plane in slot
            }
            for slot in planes
        ],
        positions=jax.ShapeDtypeStruct((plan.mesh.pp * total, plan.page_size), jnp.int32),
    )


def cache_specs(planes: list[list[Plane]], plan: Plan) -> Cache:
    """The PartitionSpecs of `cache_shapes`."""
    pages = plan.pages or None
    return Cache(
        planes=[
            {plane.name: P(plan.pipeline or None, plane.split or None, pages, None, None) for plane in slot}
            for slot in planes
        ],
        positions=P(plan.active(("pp", *plan.pages)) or None, None),
    )
