"""What an oracle is said to be, and what those of several architectures share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Spec:
    """One oracle.

    `config` is given to transformers, `config_edits` to the written config.json. The file is written as transformers 5
    does, or with the keys that most files on the hub have (`hub_dialect`). `must_show` lists changes of the written
    config that have to move the logits. `gguf`, if given, names the storage type of each tensor of a GGUF file.
    """

    summary: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    hub_dialect: bool = False
    config_edits: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"
    must_show: tuple[dict[str, Any], ...] = ()
    gguf: Callable[[str], str] | None = None


def decoder(
    model_type: str, hidden: int, ffn: int, layers: int, heads: tuple[int, int], vocab: int, theta: float, **more: Any
) -> dict[str, Any]:
    """A config.json of `heads` = (query, KV); `theta` is the rotary base, unless `more` has `rope_parameters`."""
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    } | more


YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
