"""Moves the experts of one layer to other slots: one program, whatever the placements and however many move.

    rank 0: experts 0 1 -+                         +-> 0 1
    rank 1: experts 2 3 -+-- ragged all-to-all, ---+-> 2 0       a rank sends another up to one slot a round
    rank 2: experts 0 1 -+   round by round        +-> 0 3

Slots are sent straight out of the old weights into the new ones, which begin as a copy. The old ones are donated: a
layer's experts exist twice while it moves, and no other layer's do (the transfer of vLLM's and SGLang's EPLB).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import Pieces, ragged_all_to_all_into
from jaxpar.moe.dispatch.rounds import ROUNDS
from jaxpar.moe.moves import Moves

Arrays = dict[str, jax.Array]


def relocation(mesh: Mesh | AbstractMesh, specs: Mapping[str, P], over: tuple[str, ...]) -> Any:
    """(arrays, donated; Moves) -> the arrays after them: those of experts in one layer, [stages, slots, ...] by name.

    Args:
        mesh: the devices.
        specs: of the arrays.
        over: the axes that slots are split over.
    """
    ranks = P(over or None)
    moves = Moves(ranks, Pieces(ranks, ranks, ranks, ranks), P())
    program = jax.shard_map(
        lambda arrays, moves: _relocate(arrays, moves, over),
        mesh=mesh,
        in_specs=(dict(specs), moves),
        out_specs=dict(specs),
    )
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (dict(specs), moves), is_leaf=lambda x: isinstance(x, P)
    )
    return jax.jit(program, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=0)


def _relocate(arrays: Arrays, moves: Moves, over: tuple[str, ...]) -> Arrays:
    """In the local view: arrays [1, S, ...], Moves of one rank."""
    old = {name: array[0] for name, array in arrays.items()}
    new = {name: array[moves.local[0]] for name, array in old.items()}

    def one_round(index: jax.Array, new: Arrays) -> Arrays:
        pieces = Pieces(*(part[0, index] for part in moves.pieces))
        return {name: ragged_all_to_all_into(new[name], old[name], pieces, over, largest=1) for name in old}

    if over:
        with jax.named_scope("moe_rebalance:ragged"), jax.named_scope(f"loop={ROUNDS}"):
            new = lax.fori_loop(0, moves.rounds, one_round, new)
    return {name: array[None] for name, array in new.items()}
