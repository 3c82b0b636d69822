"""The experts of a `config.json`, architecture by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxpar.checkpoint.architectures import MAX_EXPERTS, MAX_WIDTH
from jaxpar.checkpoint.config import ClampedSwiGLU, MoEConfig, MoETensors, RouterConfig
from jaxpar.checkpoint.fields import Fields

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_MIXTRAL = MoETensors(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{expert}.w1.weight",
    up="block_sparse_moe.experts.{expert}.w3.weight",
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
QWEN3_TENSORS = MoETensors(
    router="mlp.gate.weight",
    gate="mlp.experts.{expert}.gate_proj.weight",
    up="mlp.experts.{expert}.up_proj.weight",
    down="mlp.experts.{expert}.down_proj.weight",
)
_DEEPSEEK_V2 = replace(QWEN3_TENSORS, shared="mlp.shared_experts.")
_DEEPSEEK_V3 = replace(_DEEPSEEK_V2, router_bias="mlp.gate.e_score_correction_bias")
_GPT_OSS = MoETensors(
    router="mlp.router.weight",
    router_bias="mlp.router.bias",
    gate="mlp.experts.gate_up_proj",
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    fused=True,
)


def read_moe(fields: Fields, model_type: str, layers: int) -> MoEConfig | None:
    """The experts of a model of `layers` layers, or None if it is dense.

    Raises:
        CheckpointError: numbers that cannot be, or an option that is not computed here.
    """
    read = _READERS.get(model_type)
    moe = read(fields, layers) if read else None
    return moe if moe and any(moe.layers) else None


def _mixtral(fields: Fields, layers: int) -> MoEConfig:
    experts = _num_experts(fields, 8)
    return MoEConfig(
        num_experts=experts,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        layers=(True,) * layers,
        router=RouterConfig(_top_k(fields, experts, 2), norm_topk_prob=True),
        tensors=_MIXTRAL,
    )


def _qwen3_moe(fields: Fields, layers: int) -> MoEConfig:
    experts = _num_experts(fields, 128)
    dense, every = fields.items("mlp_only_layers", int) or [], fields.integer("decoder_sparse_step", 1)
    return MoEConfig(
        num_experts=experts,
        intermediate_size=fields.integer("moe_intermediate_size", 768, maximum=MAX_WIDTH),
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
        router=RouterConfig(_top_k(fields, experts, 8), norm_topk_prob=fields.boolean("norm_topk_prob", False)),
        tensors=QWEN3_TENSORS,
    )


def _deepseek_v2(fields: Fields, layers: int) -> MoEConfig:
    experts = _num_experts(fields, 64)
    fields.choice("scoring_func", ("softmax",), None)
    if fields.boolean("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "false: implementations of deepseek_v2 disagree on what true means")
    router = RouterConfig(
        _top_k(fields, experts), routed_scaling_factor=fields.number("routed_scaling_factor", 1.0, above=0)
    )
    if fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "group_limited_greedy":
        router = replace(router, group_score="max", n_group=fields.integer("n_group"))
        router = _with_topk_group(fields, router, experts, fields.integer("topk_group"))
    width = fields.integer("moe_intermediate_size", 1407, maximum=MAX_WIDTH)
    return MoEConfig(
        num_experts=experts,
        intermediate_size=width,
        layers=_after_dense(fields, layers, 0),
        router=router,
        tensors=_DEEPSEEK_V2,
        shared_intermediate_size=_shared_width(fields, width, 2),
    )


def _deepseek_v3(fields: Fields, layers: int) -> MoEConfig:
    experts = _num_experts(fields, 256)
    fields.choice("scoring_func", ("sigmoid",), None)
    fields.choice("topk_method", ("noaux_tc",), None)
    router = RouterConfig(
        _top_k(fields, experts, 8),
        scoring="sigmoid",
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5, above=0),
        n_group=fields.integer("n_group", 8),
        group_score="top2_sum",
        bias="choice",
    )
    width = fields.integer("moe_intermediate_size", 2048, maximum=MAX_WIDTH)
    return MoEConfig(
        num_experts=experts,
        intermediate_size=width,
        layers=_after_dense(fields, layers, 3),
        router=_with_topk_group(fields, router, experts, fields.integer("topk_group", 4)),
        tensors=_DEEPSEEK_V3,
        shared_intermediate_size=_shared_width(fields, width, 1),
    )


def _gpt_oss(fields: Fields, layers: int) -> MoEConfig:
    experts = _num_experts(fields, 128)
    return MoEConfig(
        num_experts=experts,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        layers=(True,) * layers,
        router=RouterConfig(_top_k(fields, experts, 4), norm_topk_prob=True, bias="logits"),
        tensors=_GPT_OSS,
        clamped_swiglu=ClampedSwiGLU(
            alpha=fields.number("swiglu_alpha", 1.702, above=0), limit=fields.number("swiglu_limit", 7.0, above=0)
        ),
        expert_bias=True,
    )


_READERS: Mapping[str, Callable[[Fields, int], MoEConfig]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}


def _num_experts(fields: Fields, default: int) -> int:
    """How many experts there are, under any of the names that files have for it."""
    counts = {key: fields.integer(key, maximum=MAX_EXPERTS) for key in _COUNTS if key in fields}
    for key, count in counts.items():
        if count != next(iter(counts.values())):
            raise fields.error(key, f"{next(iter(counts.values()))}, as {next(iter(counts))} says")
    return next(iter(counts.values()), default)


def _top_k(fields: Fields, experts: int, default: int | None = None) -> int:
    """Experts a token; `default` None: the key has to be there."""
    key = "num_experts_per_tok"
    top_k = fields.integer(key) if default is None else fields.integer(key, default)
    if top_k > experts:
        raise fields.error(key, f"at most the {experts} experts that there are")
    return top_k


def _with_topk_group(fields: Fields, router: RouterConfig, experts: int, topk_group: int) -> RouterConfig:
    """The router with its choice limited to `topk_group` groups, if these and the experts fit each other."""
    groups = router.n_group
    if experts % groups:
        raise fields.error("n_group", f"a divisor of the {experts} experts")
    size = experts // groups
    if groups > 1 and router.group_score == "top2_sum" and size < 2:
        raise fields.error("n_group", f"groups of at least 2 of the {experts} experts")
    if topk_group > groups:
        raise fields.error("topk_group", f"at most the {groups} groups that there are")
    if router.top_k > topk_group * size:
        raise fields.error("num_experts_per_tok", f"at most the {topk_group * size} experts of {topk_group} groups")
    return replace(router, topk_group=topk_group)


def _after_dense(fields: Fields, layers: int, default: int) -> tuple[bool, ...]:
    """DeepSeek's MoE layers: after the first dense ones, each whose number `moe_layer_freq` divides."""
    first = fields.integer("first_k_dense_replace", default, minimum=0)
    every = fields.integer("moe_layer_freq", 1)
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))


def _shared_width(fields: Fields, width: int, default: int) -> int:
    """The width of all shared experts side by side; null means none, and absent the usual number."""
    if "n_shared_experts" in fields.values and "n_shared_experts" not in fields:
        return 0
    return width * fields.integer("n_shared_experts", default, minimum=0, maximum=MAX_WIDTH // width)
