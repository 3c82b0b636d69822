"""The committed oracles (tests/oracles/README.md): what transformers computes for tiny checkpoints, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent / "oracles"
EXPERT_ORACLES = ("mixtral", "qwen3_moe", "qwen3_moe_dense", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""Those with mixtures of experts; they run on meshes of their own (test_experts.py)."""
ORACLES: list[str] = sorted(  # Hugging Face directories
    path.parent.name for path in ROOT.glob("*/config.json") if path.parent.name not in EXPERT_ORACLES
)
GGUF_ORACLES: list[str] = sorted(path.parent.name for path in ROOT.glob("*/model.gguf"))


@dataclass(frozen=True)
class Oracle:
    """One checkpoint and the right answers for it.

    `dir` is the model directory (with `config.json` or `model.gguf`). For each prompt, `logits` holds `[length, vocab]`
    float32 and `greedy` the tokens that follow, whatever the end of sequence says. `margin` is the smallest gap between
    the best two logits over all greedy steps: no tie explains a token that differs.
    """

    dir: Path
    prompts: list[list[int]]
    logits: list[np.ndarray]
    greedy: list[list[int]]
    margin: float


def load_oracle(name: str) -> Oracle:
    """Read `tests/oracles/<name>/oracle.npz`, cutting each prompt's padding off."""
    with np.load(ROOT / name / "oracle.npz", allow_pickle=False) as data:
        lengths = data["lengths"].tolist()
        return Oracle(
            dir=ROOT / name,
            prompts=[row[:length].tolist() for row, length in zip(data["prompts"], lengths, strict=True)],
            logits=[row[:length] for row, length in zip(data["logits"], lengths, strict=True)],
            greedy=data["greedy"].tolist(),
            margin=float(data["margin"]),
        )
