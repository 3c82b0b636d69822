"""The weights that a rank holds, in closed form: as many values as `nn/` declares, without declaring any.

`ledger.memory.memory_of` counts the declarations themselves, one by one, which takes a fifth of a second for a large
model; here a search counts thousands of plans. Padding, copies of KV heads, both kinds of a mixed slot and absent
layers are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.checkpoint.config import ModelConfig, MoEConfig
from jaxpar.heads import heads_of
from jaxpar.moe.slots import slots_per_rank
from jaxpar.pipeline.stages import kinds_of
from jaxpar.plan import Plan
from jaxpar.plan_checks import DTYPES


@dataclass(frozen=True)
class Weights:
    """Values on a rank: of matrices, whose type the assumptions give, and `wide` ones, which keep the plan's; by item.

    `correcting` are routers' biases that are kept in float32.
    """

    matrices: dict[str, int]
    wide: dict[str, int]
    correcting: int = 0

    def bytes(self, matrix_bytes: float, wide_bytes: float) -> dict[str, int]:
        """Bytes of each item, given those of a value."""
        items = {name: round(count * matrix_bytes) for name, count in self.matrices.items()}
        for name, count in self.wide.items():
            items[name] = items.get(name, 0) + round(count * wide_bytes)
        items["norms"] = items.get("norms", 0) + self.correcting * DTYPES["float32"]
        return items


def weights_of(config: ModelConfig, plan: Plan) -> Weights:
    """What every rank holds of a model.

    Raises:
        PlanError: more stages than layers, expert slots that do not divide, or heads that cannot be split so.
    """
    kinds = kinds_of(config, plan)
    slots, hidden, moe = len(kinds), config.hidden_size, config.moe
    dense, experts = (sum(kind[i] is not None for kind in kinds) for i in (0, 1))
    attention, small = _attention(config, plan)
    vocabulary = hidden * -(-config.vocab_size // plan.mesh.tp)
    tables = 1 if plan.mesh.pp > 1 or config.tie_word_embeddings else 2
    width = -(-config.intermediate_size // plan.mesh.extent(plan.width_of("ffn", "prefill")))
    bias = 2 * width + hidden if config.mlp_bias else 0
    matrices = {"attention weights": slots * attention, "FFN weights": dense * 3 * hidden * width}
    wide = {"norms": slots * (2 * hidden + small) + hidden + dense * bias, "vocabulary": tables * vocabulary}
    if moe is None or not experts:
        return Weights(matrices, wide)
    routed, shared, others = _experts(config, moe, plan)
    matrices["expert weights"] = experts * routed
    matrices["FFN weights"] += experts * shared
    wide["norms"] += experts * others
    wide["routers"] = experts * moe.num_experts * hidden
    corrects = moe.num_experts if moe.tensors.router_bias else 0
    return Weights(matrices, wide, experts * corrects)


def _attention(config: ModelConfig, plan: Plan) -> tuple[int, int]:
    """Values of a slot's projections, and of its biases, sinks and head norms."""
    heads, hidden, mla = heads_of(config, plan), config.hidden_size, config.mla
    size, local = heads.slice_of(config.head_dim), heads.q_local
    out, small = hidden * heads.slice_of(config.v_head_dim) * local, hidden if config.o_bias else 0
    if mla is not None:
        rank = mla.q_lora_rank or 0
        latents = hidden * (rank + mla.kv_lora_rank + mla.qk_rope_head_dim)
        queries = (rank or hidden) * config.head_dim * local
        up = local * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        return latents + queries + up + out, small + rank + mla.kv_lora_rank
    columns = size * (local + 2 * heads.kv_local)
    small += columns if config.qkv_bias else 0
    small += 2 * size if config.qk_norm else 0
    small += local if config.sinks else 0
    return hidden * columns + out, small


def _experts(config: ModelConfig, moe: MoEConfig, plan: Plan) -> tuple[int, int, int]:
    """Values of a slot's routed experts, of its shared ones, and of the biases of both."""
    hidden, over = config.hidden_size, plan.mesh.extent(plan.width_of("moe", "prefill"))
    held = slots_per_rank(moe.num_experts, plan.mesh.extent(plan.experts), plan.expert_slots)
    width = -(-moe.intermediate_size // over)
    shared = -(-moe.shared_intermediate_size // over) if moe.tensors.shared else 0
    biases = held * (2 * width + hidden) if moe.expert_bias else 0
    if config.mlp_bias and shared:
        biases += 2 * shared + hidden
    return held * 3 * hidden * width, 3 * hidden * shared, biases
