"""What a step holds besides weights and cache, in closed form: activations of a layer, and buffers of a dispatch.

An estimate, near what compilers report: of the sublayers only the one that holds most counts, as each frees its memory
for the next. Products come out in float32 before they are rounded.
"""

from __future__ import annotations

from jaxpar.attention.planes import planes_of
from jaxpar.presets import DeviceKind
from jaxpar.registry import chosen
from jaxpar.strategies import Step

_WIDE = 4
_TPU_ROW = 128


def buffers_of(step: Step, device: DeviceKind) -> tuple[int, int]:
    """Bytes of a rank on such a device: activations, and buffers of the dispatch to experts."""
    # Kernels of accelerators read pages where they lie (`kernels/attention.py`). Gathered are latents, heads that are
    # split inside, and what runs in tiles of one shape.
    gathers = step.config.mla is not None or step.heads.parts > 1 or step.plan.fixed_order
    in_place = step.phase == "decode" and device.kind != "cpu" and not gathers
    padded = narrow_bytes(step) if gathers and device.kind.startswith("TPU") else 0
    return activation_bytes(step, in_place) + padded, dispatch_bytes(step)


def narrow_bytes(step: Step) -> int:
    """What planes of less than a row of a TPU's memory take beside `activation_bytes`, such as halves of heads of 128.

    Gathered they are filled up to whole rows. Their pool lies across, where nothing is filled up, and is turned before
    a decode step writes into it, which copies it; a pool is taken to be as large as what the step's page tables list.
    """
    extra = 0
    for plane, size in zip(planes_of(step.config, step.plan), step.bag_bytes, strict=True):
        if plane.size < _TPU_ROW:
            rows = size * _TPU_ROW // plane.size
            extra += rows - size + (rows if step.phase == "decode" else 0)
    return extra


def activation_bytes(step: Step, in_place: bool = False) -> int:
    """Bytes of a rank: the residual rows twice, the sublayer that holds most, and the logits.

    `in_place`: attention reads pages where they lie, as kernels of decode do, and gathers none.
    """
    config, item, rows = step.config, step.itemsize, step.rows
    residual = 3 * step.passed_rows * step.row_bytes
    sizes = [_attention(step) - (sum(step.bag_bytes) if in_place else 0)]
    if step.dense_layers:
        sizes.append(rows * step.width_share("ffn", config.intermediate_size) * (2 * _WIDE + item))
    if config.moe is not None:
        shared = step.width_share("moe", config.moe.shared_intermediate_size)
        sizes.append(step.moe_rows * shared * (2 * _WIDE + item))
    tokens = rows if step.logits else step.lanes
    logits = 2 * tokens * _WIDE * -(-config.vocab_size // step.plan.mesh.tp)
    return residual + max(*sizes, logits)


def dispatch_bytes(step: Step) -> int:
    """Bytes of the rows that a rank's experts get and give in one round, with what they make between."""
    moe = step.config.moe
    if moe is None or not step.moe_layers:
        return 0
    dispatch = chosen(step)["moe_dispatch"]
    assert dispatch.expert_rows is not None
    rows = dispatch.expert_rows(step).rows
    width = step.width_share("moe", moe.intermediate_size)
    kept = rows * (step.config.hidden_size * (step.itemsize + _WIDE) + width * (2 * _WIDE + step.itemsize))
    sent = sum(row.message_bytes for row in dispatch.traffic(step))
    return int(kept + sent)


def _attention(step: Step) -> int:
    """Queries, keys and values in float32 and rounded, the pages of all lanes side by side, and the output."""
    config, heads, item = step.config, step.heads, step.itemsize
    columns = heads.slice_of(config.head_dim) * (heads.q_local + 2 * heads.kv_local)
    share = chosen(step)[f"{step.phase}_attention"].share(step, 0)
    bags = sum(step.bag_bytes) * max(1, len({tuple(keys) for _, keys in share.blocks if len(keys) > 1}))
    bags *= 2 if len(share.blocks) > 1 else 1
    if config.mla is not None and step.phase == "prefill":
        bags += step.lanes * step.keys * share.heads * (config.head_dim + config.v_head_dim) * item
    out = step.rows * heads.q_local * heads.slice_of(config.v_head_dim) * _WIDE
    return step.rows * columns * (_WIDE + item) + bags + out
