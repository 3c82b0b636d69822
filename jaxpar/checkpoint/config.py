"""What a model is: the one description that every dialect of `config.json` is read into."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters; fields that a `rope_type` does not use keep their defaults.

    `rope_type` is one of default, linear, llama3, yarn; angles use base `theta`. Pair i of a head is dimensions i and
    i + d/2, or 2i and 2i + 1 where pairs are `interleaved` (DeepSeek).
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    interleaved: bool = False

    def temperature(self, weight: float) -> float:
        """YaRN's scale for a context that is `factor` times as long (arXiv:2309.00071, eq. 22)."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads from one latent.

    A query head is [qk_nope_head_dim, qk_rope_head_dim]; only the latter is rotated, against one key for all heads.
    Queries come from a latent of `q_lora_rank` numbers, or straight from the hidden state (None). The softmax scale is
    `scale_factor` / sqrt(qk_nope_head_dim + qk_rope_head_dim): DeepSeek's yarn has a part of its temperature there.
    `norm_eps` is that of the latents' RMS norms, which does not follow `rms_norm_eps`.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale_factor: float = 1.0
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class RouterConfig:
    """How a token chooses `top_k` experts (num_experts_per_tok) and weighs them.

    Scores are the softmax or the sigmoid of the router's logits. Experts form `n_group` groups of neighbours, whose
    score is that of their best expert or the sum of their two best; only those of the best `topk_group` groups can be
    chosen (DeepSeek-V2, arXiv:2405.04434, and V3, arXiv:2412.19437). The weights are the chosen scores, summing to 1
    if `norm_topk_prob`, times `routed_scaling_factor`. Softmax scores that sum to 1 are the softmax of the chosen
    logits alone, as mixtral and gpt_oss have it.

    `bias` is what the router's bias is added to: the logits (gpt_oss), or the scores by which groups and experts are
    chosen and not the weights (V3's e_score_correction_bias).
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    bias: Literal["logits", "choice"] | None = None


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt_oss's gate: g = min(gate, limit), u = clip(up, -limit, limit) -> g * sigmoid(alpha * g) * (u + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoETensors:
    """How a checkpoint names the tensors of an MoE layer, after `model.layers.N.`.

    One by one, `gate` and `up` [I, D] and `down` [D, I] are those of expert `{expert}`. Where experts are `fused`
    (gpt_oss), `gate` and `up` are the even and the odd columns of one tensor [E, D, 2I], `down` is [E, I, D], and
    biases, [E, 2I] and [E, D], have the same names with `_bias` after them. The router is [E, D] and its bias [E];
    `shared` is the prefix of the MLP that every token passes.
    """

    router: str
    gate: str
    up: str
    down: str
    router_bias: str | None = None
    shared: str | None = None
    fused: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the FFN in those layers for which `layers[i]` is true.

    `intermediate_size` is the width of one expert, `shared_intermediate_size` that of the MLP which every token passes
    besides (all shared experts side by side; 0: none). Experts gate by SiLU if `clamped_swiglu` is None, and every
    projection has a bias if `expert_bias`.
    """

    num_experts: int
    intermediate_size: int
    layers: tuple[bool, ...]
    router: RouterConfig
    tensors: MoETensors
    shared_intermediate_size: int = 0
    clamped_swiglu: ClampedSwiGLU | None = None
    expert_bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shapes and options, in Hugging Face's words.

    `windows[i]` is the sliding window of layer i in tokens (a query sees the `window` latest positions, itself
    included), None where attention is full. `sinks`: each query head has a learned logit that takes part in its softmax
    and has no value (gpt_oss). `dtype` is the element type in which the weights are stored.

    `moe` has the experts of layers that have any, `intermediate_size` is the width of dense layers. With `mla` every
    head has its own keys and values, and `head_dim` is the size of a query head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def of_layers(self, kept: slice) -> ModelConfig:
        """The model with only these of its layers."""
        windows = self.windows[kept]
        moe = self.moe and replace(self.moe, layers=self.moe.layers[kept])
        return replace(self, num_hidden_layers=len(windows), windows=windows, moe=moe)

    @property
    def rope_head_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return self.moe is not None and any(self.moe.layers)

    @property
    def v_head_dim(self) -> int:
        """The size of a head's values, and of its output."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim
