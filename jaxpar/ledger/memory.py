"""The bytes that a rank holds for a phase: its weights, and the pool of its KV cache."""

from __future__ import annotations

from typing import NamedTuple

from jaxpar.attention.cache import cache_shapes
from jaxpar.attention.planes import values_a_token
from jaxpar.engine.sizes import eighths, pages_of
from jaxpar.ledger.held import Held
from jaxpar.ledger.predict import local_bytes
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs


class Memory(NamedTuple):
    """Bytes of one rank, of weights and of a pool of `pages` pages.

    `needed_cache_bytes` is the part of `cache_bytes` that the tokens asked for need, `copied_cache_bytes` what of all
    ranks' pools other ranks of tp hold, too, or is padding of heads.
    """

    pages: int
    weight_bytes: int
    cache_bytes: int
    needed_cache_bytes: int
    copied_cache_bytes: int


def memory_of(programs: Programs, phase: Phase, batch: int, seq: int) -> Memory:
    """What `batch` requests of `seq` tokens take; the pool is rounded up as the engine has it."""
    config, plan = programs.config, programs.plan
    held, replicas = Held(phase, batch, seq, plan).each(seq), plan.mesh.dp * plan.mesh.ep
    of_replicas = [held[replica::replicas] for replica in range(replicas)]
    pages = eighths(max(sum(pages_of(tokens, plan) for tokens in replica) for replica in of_replicas))
    weights = {name: weight.abstract for name, weight in programs.weights.items()}
    planes = cache_shapes(programs.planes, pages, plan).planes
    cache_bytes = local_bytes(planes, programs.cache_specs(phase).planes, plan.mesh.sizes)
    stored, once = values_a_token(config, plan), values_a_token(config, Plan())
    return Memory(
        pages=pages,
        weight_bytes=local_bytes(weights, programs.weight_specs, plan.mesh.sizes),
        cache_bytes=cache_bytes,
        needed_cache_bytes=cache_bytes // (pages * plan.page_size) * max(map(sum, of_replicas)),
        copied_cache_bytes=cache_bytes * plan.mesh.size // stored * (stored - once),
    )
