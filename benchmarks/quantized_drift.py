"""What sums in codes of one byte do to a real model: logits, and greedy tokens over a long generation.

python -m benchmarks.quantized_drift GGUF

The exact sum's 256 greedy tokens of each prompt are the text. Every sum then reads the same text, through keys and
values that it has made itself, so that one early difference does not make all later ones; and it generates on its own,
which shows after how many tokens it goes its own way. Short prompts hide both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import jaxpar
from benchmarks.common import Spread, arguments, draw_lines, show, write
from benchmarks.smollm2 import CHAT, KNOWN
from jaxpar.runner import Runner

BASELINE, CODES = "psum", ("int8", "fp8")
TOKENS = 256
PROMPTS = (
    *(prompt for prompt, _ in KNOWN if prompt != CHAT),
    "Once upon a time, in a small village by the sea, there lived",
    "The three most important inventions of the nineteenth century were",
)


def continued(runner: Runner) -> list[list[int]]:
    """The greedy tokens after each prompt."""
    return [list(one.token_ids) for one in runner.generate(list(PROMPTS), max_new_tokens=TOKENS, ignore_eos=True)]


def read(runner: Runner, text: list[int], prompt: int) -> np.ndarray:
    """Logits [TOKENS, V] of the positions whose next tokens `text` has after `prompt` tokens."""
    return runner.logits([text])[0, prompt - 1 : -1]


def agreed(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def compare(name: str, exact: list[np.ndarray], found: list[np.ndarray], own: list[int]) -> dict[str, Any]:
    """What one sum does, over all prompts and positions."""
    rows = []
    for true, ours in zip(exact, found, strict=True):
        probability = np.exp(true - np.logaddexp.reduce(true, axis=1, keepdims=True))
        surprise = np.logaddexp.reduce(ours, axis=1) - np.logaddexp.reduce(true, axis=1)
        rows.append((np.abs(ours - true).max(axis=1), (probability * (true - ours)).sum(axis=1) + surprise,
                     true.argmax(axis=1) == ours.argmax(axis=1)))  # fmt: skip
    difference, divergence, same = (np.concatenate(part) for part in zip(*rows, strict=True))
    return {
        "reduction": name,
        "logits": Spread.of(difference.tolist()).to_json(),
        "kl_nats": float(divergence.mean()),
        "same_tokens": float(same.mean()),
        "alike_before_first_difference": own,
        "by_position": [float(value) for value in np.mean([row[0] for row in rows], axis=0)],
    }


def main() -> None:
    """Read and generate with every sum, report."""
    parser = arguments("Drift of sums in codes on SmolLM2-135M-Instruct.", rounds=1)
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct as fetch_smollm2 fetches it")
    parser.add_argument("--mesh", default="tp=3", help="tp=3 has one of the model's three KV heads on each rank")
    options = parser.parse_args()
    runner = jaxpar.load(options.gguf, options.mesh)
    prompts, texts = runner.encode(PROMPTS), continued(runner)
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    exact = [read(runner, text, len(prompt)) for text, prompt in zip(whole, prompts, strict=True)]
    largest = max(float(np.abs(logits).max()) for logits in exact)
    rows = []
    for name in CODES:
        runner = jaxpar.load(options.gguf, options.mesh, all_reduce=name)
        found = [read(runner, text, len(prompt)) for text, prompt in zip(whole, prompts, strict=True)]
        own = [agreed(ours, theirs) for ours, theirs in zip(continued(runner), texts, strict=True)]
        rows.append(compare(name, exact, found, own))
        print(f"{name}: read and generated", file=sys.stderr)
    show(
        f"SmolLM2-135M-Instruct, float32, {options.mesh}: {len(PROMPTS)} prompts, {TOKENS} tokens, against {BASELINE}; "
        f"largest logit {largest:.3g}",
        [
            "reduction",
            "largest logit difference a token",
            "KL, nats",
            "same greedy token",
            "alike before first difference",
        ],
        [
            (
                row["reduction"],
                Spread(**row["logits"]),
                f"{row['kl_nats']:.2e}",
                f"{row['same_tokens']:.1%}",
                ", ".join(map(str, row["alike_before_first_difference"])),
            )
            for row in rows
        ],
    )
    write(
        options.out,
        "quantized_drift",
        {"mesh": options.mesh, "tokens": TOKENS, "prompts": list(PROMPTS), "largest_logit": largest, "rows": rows},
    )
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        means = np.array(row["by_position"])
        windows = [(start, means[start : 2 * start]) for start in (1, 2, 4, 8, 16, 32, 64, 128)]
        lines[row["reduction"]] = [(start, Spread.of(part.tolist())) for start, part in windows]
    draw_lines(
        options.out / "quantized_drift.png",
        f"SmolLM2-135M, {options.mesh}: difference of logits to exact sums",
        "generated tokens",
        "largest difference of a logit",
        lines,
    )


if __name__ == "__main__":
    main()
