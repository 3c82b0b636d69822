"""A step by parts: FLOPs, bytes and collectives of each from the ledger's closed forms, and the seconds they take.

    seconds = max(FLOPs / rate of its products, bytes / rate of memory) + kernels + collectives - what is hidden

A collective takes the latency and the bandwidth of the links that its axes cross (`network.py`). The fullest rank
counts: the most rows of experts, the last rank of a contiguous chunk, the stage with most to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jaxpar.ledger.bytes import Moved, predict_moved
from jaxpar.ledger.needed import Attended, Context, Routed, attended, gated_flops, routed
from jaxpar.ledger.predict import predict_flops, predict_traffic
from jaxpar.ledger.rounds import Rounds, all_rounds
from jaxpar.ledger.traffic import Traffic
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.network import seconds
from jaxpar.planner.rates import Rates, rates_of
from jaxpar.presets import DeviceKind
from jaxpar.registry import chosen
from jaxpar.strategies import Step

Sending = tuple[tuple[tuple[str, ...], float], ...]
"""Seconds of collectives by the axes that they run over."""

KERNELS = {
    "embedding": 1,
    "elementwise": 2,
    "attention": 3,  # queries, keys and values; rotation and the cache's store; the output projection
    "prefill_attention": 1,
    "decode_attention": 6,  # many short pieces of keys, and their merge: that long where there is little to read
    "ffn": 3,  # gate and up, the gate's product, down
    "moe": 2,  # the router and the choice of experts
    "experts": 6,  # sort, rows to experts, gate and up, the gate's product, down, and the weighted sum
    "head": 1,
}
"""Kernels of a part in each layer, or in a step, as engines launch them; each has an overhead besides its work."""

_PRODUCTS = {"attention": 2, "ffn": 2, "experts": 2}
_LATENT_KERNELS, _SHARED_KERNELS = 3, 3


@dataclass(frozen=True)
class Part:
    """Seconds of one part of a step, on the fullest rank, all layers of a stage together.

    `compute` are those that its FLOPs take and `memory` those that its bytes take: the longer one counts. `kernels` are
    what launching takes. `sending` are (axes, seconds) of its collectives, of which `hidden` seconds run beside
    something that computes.
    """

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    sending: Sending = ()
    hidden: float = 0.0

    def scaled(self, factor: float) -> Part:
        """With so many times the work; what it sends is as it was."""
        names = ("flops", "bytes", "compute", "memory", "kernels")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    @property
    def working(self) -> float:
        """Seconds of the device itself."""
        return max(self.compute, self.memory) + self.kernels

    @property
    def sent(self) -> float:
        """Seconds of all its collectives, one after another."""
        return sum(time for _, time in self.sending)

    @property
    def seconds(self) -> float:
        """What it adds to the step."""
        return self.working + self.sent - self.hidden

    @property
    def bound(self) -> str:
        """What takes the most of it: "compute", "memory", "latency" of kernels, or the axes that it sends over."""
        exposed = self.sent - self.hidden
        times = {"compute": self.compute, "memory": self.memory, "latency": self.kernels}
        if self.sending:
            times["+".join(max(self.sending, key=lambda item: item[1])[0])] = exposed
        return max(times, key=lambda name: times[name])


def parts_of(
    step: Step, context: Context, rows: Iterable[Traffic], device: DeviceKind, assumed: Assumptions
) -> list[Part]:
    """The parts of one batch of a step in the order of the forward pass; nothing overlaps yet.

    Args:
        step: of one batch.
        context: what each of its requests has.
        rows: what it sends, as `predicted` has it.
        device: of each rank.
        assumed: efficiencies.

    Raises:
        PlanError: a strategy that refuses the step's shapes.
    """
    rates = rates_of(device, assumed, step.plan.dtype)
    of_attention = attended(step, context, assumed.skip_masked)
    of_experts = routed(step, assumed.imbalance) if step.moe_layers else None
    moved = predict_moved(step, of_attention, of_experts)
    flops, compute = _computed(step, of_attention, of_experts, rates, assumed)
    sending = sent_over(rows, step, device)
    names = dict.fromkeys([*_ORDER, *sending])
    return [
        _part(
            step,
            name,
            flops.get(name, 0.0),
            compute.get(name, 0.0),
            moved.get(name),
            sending.get(name, ()),
            rates,
            assumed,
        )
        for name in names
        if name in moved or name in sending
    ]


_ORDER = (
    "embedding",
    "elementwise",
    "attention",
    "prefill_attention",
    "decode_attention",
    "ffn",
    "moe",
    "moe_dispatch",
    "experts",
    "head",
    "sampling",
    "pipeline",
)


def _part(
    step: Step,
    name: str,
    flops: float,
    compute: float,
    moved: Moved | None,
    sending: Sending,
    rates: Rates,
    assumed: Assumptions,
) -> Part:
    if moved is None:
        return Part(name, sending=sending)
    rows = moved.rows + (0.0 if assumed.fused else moved.copies)
    rounds = not assumed.fused and rates.weight_bytes < rates.row_bytes
    plain = moved.matrices * rates.weight_bytes + (moved.tables + rows) * rates.row_bytes
    plain += moved.inputs * (rates.row_bytes + rates.weight_bytes) if rounds else 0.0
    cached = moved.cache * rates.kv_bytes
    # Prefill reads its keys in order, as products read weights; decode gathers pages with few queries for each.
    of_cache = rates.cache if step.phase == "decode" else rates.memory
    return Part(
        name,
        flops=flops,
        bytes=plain + cached,
        compute=compute,
        memory=plain / rates.memory + cached / of_cache,
        kernels=_kernels(step, name, rounds) * rates.kernel,
        sending=sending,
    )


def _computed(
    step: Step, of_attention: Attended, of_experts: Routed | None, rates: Rates, assumed: Assumptions
) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs of each part, and the seconds that they take."""
    counted = predict_flops(step)
    attend = f"{step.phase}_attention"
    flops = {name: float(count) for name, count in counted.items() if not name.startswith("experts")}
    flops[attend] = of_attention.flops + of_attention.expanding
    rate = {"attention": rates.matrices, "ffn": rates.matrices, "head": rates.wide}
    times = {name: flops[name] / rate[name] for name in rate if name in flops}
    times[attend] = of_attention.flops / rates.attention + of_attention.expanding / rates.matrices
    moe = step.config.moe
    if of_experts is not None and moe is not None:
        routers = 2.0 * step.moe_layers * step.moe_rows * step.config.hidden_size * moe.num_experts
        times["moe"] = routers / rates.wide + max(flops["moe"] - routers, 0.0) / rates.matrices
        flops["experts"] = step.moe_layers * gated_flops(step, moe, of_experts.rows)
        filled = gated_flops(step, moe, filled_rows(of_experts, assumed.expert_tile))
        times["experts"] = step.moe_layers * filled / rates.experts
    return flops, times


def filled_rows(of_experts: Routed, tile: int) -> float:
    """Rows that the products of experts compute, each expert's filled up to whole tiles: half a tile in the mean."""
    return max(of_experts.rows + of_experts.touched * (tile - 1) / 2, of_experts.touched * tile)


def _kernels(step: Step, name: str, rounds: bool) -> int:
    """Kernels that a step launches for a part; where each product `rounds` its input, that is one more."""
    kernels, latent = KERNELS[name] + rounds * _PRODUCTS.get(name, 0), step.config.mla is not None
    shared = step.config.moe is not None and step.config.moe.shared_intermediate_size > 0
    match name:
        case "embedding" | "head":
            return kernels
        case "ffn":
            return step.dense_layers * kernels
        case "moe":
            return step.moe_layers * (kernels + shared * _SHARED_KERNELS)
        case "experts":
            return step.moe_layers * kernels
        case "attention":
            return step.layers * (kernels + latent * _LATENT_KERNELS)
    return step.layers * kernels


def predicted(step: Step, imbalance: float) -> list[Traffic]:
    """Every collective of a step, with all rounds that the fullest rank of experts needs."""
    rounds = _rounds(step, imbalance)
    return [all_rounds(row, rounds) for row in predict_traffic(step)]


def sent_over(rows: Iterable[Traffic], step: Step, device: DeviceKind) -> dict[str, Sending]:
    """(axes, seconds) of the collectives of each part."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for row in rows:
        of_part = found.setdefault(row.sublayer, {})
        of_part[row.axes] = of_part.get(row.axes, 0.0) + seconds(row, step.plan.mesh, device)
    return {name: tuple(axes.items()) for name, axes in found.items()}


def _rounds(step: Step, imbalance: float) -> Rounds:
    """Iterations of a dispatch in which one rank has `imbalance` times the mean load."""
    dispatch = chosen(step).get("moe_dispatch")
    ranks = step.ranks(step.plan.experts)
    if dispatch is None or dispatch.rounds is None or ranks == 1:
        return {}
    fullest = min(imbalance, ranks) / ranks
    shares = np.full(ranks, (1 - fullest) / (ranks - 1))
    shares[0] = fullest
    return {symbol: [count] for symbol, count in dispatch.rounds(step, shares).items()}
