"""How much room `standard` dispatch gives the tokens of all ranks: for each rank's padded rows, or for the real ones.

    rank 0   a b . .        padded to the maximum     a b . . | c . . . | . . . . | . . . .    an all-gather
    rank 1   c . . .        padded to the sum         a b c .                                  an all-reduce
    ranks 2, 3  . . . .

The sum takes an all-reduce, which sends a row twice: it pays where less than half of all rows are real. (These are the
two paddings of SGLang's attention data parallelism.) Shapes are fixed when a program compiles, so the host, which knows
how many tokens there are, chooses: one of three rooms, so that few programs are made while requests end one by one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from jaxpar.engine.lanes import groups_in_turn, lanes_in_turn
from jaxpar.engine.prefill import PrefillStep
from jaxpar.engine.sizes import lanes_of
from jaxpar.layout import deal
from jaxpar.plan import Plan
from jaxpar.registry import chosen
from jaxpar.strategies import Step


def room_of(tokens: np.ndarray, step: Step) -> int:
    """The rows in which a step gathers its tokens, 0: each rank's rows with their padding.

    Args:
        tokens: real ones of each lane on each rank of cp [pp * dp * ep * lanes, cp]; [.., 1] in decode, where ranks of
            cp have the same.
        step: its sizes.
    """
    plan = step.plan
    if not step.moe_layers or plan.moe_dispatch not in ("standard", "auto"):
        return 0
    mesh, axes = plan.mesh, ("pp", "dp", "ep", "batch", "lane", "cp")
    by_lane = tokens.reshape(mesh.pp, mesh.dp, mesh.ep, len(step.batches), -1, tokens.shape[-1])
    # Ranks that share their experts gather together; of such groups, of stages and of two batches, the fullest counts.
    together = tuple(place for place, axis in enumerate(axes) if axis == "lane" or axis in plan.experts)
    return _room(step.batches[0], int(by_lane.sum(axis=together).max()))


def tokens_of_prefill(step: PrefillStep, plan: Plan) -> np.ndarray:
    """The tokens of each lane on each rank of cp in a step of a prefill: [dp * ep * lanes, cp]."""
    tokens = np.zeros((plan.mesh.dp * plan.mesh.ep * step.lanes, plan.mesh.cp), np.int64)
    for part in step.parts:
        dealt = deal(plan.layout, part.first, part.size, plan.mesh.cp, plan.cp_interleave)
        tokens[part.row] = [len(mine) for mine in dealt]
    return tokens


def tokens_of_decode(requests: int, group: int, plan: Plan) -> np.ndarray:
    """The tokens of each lane in a step that decodes one group of so many requests: [dp * ep * lanes, 1]."""
    tokens = np.zeros((plan.mesh.dp * plan.mesh.ep * lanes_of(requests, plan), 1), np.int64)
    for lane, of_group in zip(lanes_in_turn(requests, plan), groups_in_turn(requests, plan), strict=True):
        tokens[lane] += of_group == group
    return tokens


def padded_to_sum(tokens: int, padded: int) -> int:
    """The room for `tokens` real ones among `padded` rows of all ranks; 0 if it sends no less than all the rows.

    It is a half, an eighth or a thirty-second of them.
    """
    if 2 * tokens >= padded:
        return 0
    return min(room for part in (2, 8, 32) if (room := padded // part) >= max(1, tokens))


@lru_cache(maxsize=1024)
def _room(batch: Step, tokens: int) -> int:
    room = padded_to_sum(tokens, batch.ranks(batch.plan.experts) * batch.moe_rows)
    return room if room and chosen(replace(batch, room=room))["moe_dispatch"].name == "standard" else 0
