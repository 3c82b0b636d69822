"""Make the oracles: tiny random checkpoints, and the logits and greedy tokens that transformers gives for them.

Usage (needs `torch==2.13.0 transformers==5.24`, and `gguf` for the GGUF ones; running the tests needs none of them):

    python tests/oracles/make_oracles.py              # all of them, in a few minutes
    python tests/oracles/make_oracles.py qwen3 llama  # these only

Every checkpoint is written first and read back by transformers, so that an oracle is what the committed files give,
whatever was lost in storing them. Each prompt is computed alone, without padding and without a cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle_specs import SPECS
from routing_margin import routing_margins
from spec import Spec
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging
from write_gguf import write_gguf

ROOT = Path(__file__).parent
PROMPT_LENGTHS = (1, 7, 19, 12)
NEW_TOKENS = 16
MIN_MARGIN = 1e-2  # between the best two logits of every greedy step: far above any float32 implementation's error
MIN_ROUTING_MARGIN = 1e-4  # between the scores of experts, or groups, that are just chosen and just not: far above it
MAX_FLOAT32_ERROR = 2e-5  # float32 logits against float64 ones
MIN_EFFECT = 1e-2  # on some logit, of every variation that the spec says must show
MIN_DISTINCT = 6  # tokens among a prompt's greedy ones: a model that repeats itself would hide faults in decoding


class Float64(TorchFunctionMode):
    """Within it, what transformers pins to float32 (norms, softmax, rotary angles) is computed in float64 too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{name: widen(value) for name, value in (kwargs or {}).items()})


def build(config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A model of this config.json, on the only implementation of attention and experts that hides nothing."""
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Weights ~ N(0, (1.2/sqrt(fan_in))^2), norms ~ 1 + 0.3 N, other vectors ~ 0.3 N: defaults (1, 0) hide faults."""
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
    with torch.no_grad():
        for name, values in itertools.chain(model.named_parameters(), biases):
            noise = torch.randn(values.shape, generator=generator)
            if values.ndim == 1 or name.endswith("bias"):
                values.copy_(noise * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
            else:  # fused experts are output-major, [E, out, in], except in gpt_oss
                is_input_major = values.ndim == 3 and model.config.model_type == "gpt_oss"
                values.copy_(noise * 1.2 / values.shape[-2 if is_input_major else -1] ** 0.5)


def hub_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json as files on the hub mostly are: `torch_dtype`, `rope_theta`, `rope_scaling`, no `layer_types`."""
    old = {name: value for name, value in config.items() if name not in ("layer_types", "dtype", "rope_parameters")}
    rope = dict(config["rope_parameters"])
    old["torch_dtype"] = config["dtype"]
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if old.get("head_dim") == old["hidden_size"] // old["num_attention_heads"]:
        del old["head_dim"]
    return dict(sorted(old.items()))


def write_checkpoint(directory: Path, spec: Spec, seed: int) -> None:
    """Write the spec's random checkpoint: a Hugging Face directory, or a single GGUF file."""
    shutil.rmtree(directory, ignore_errors=True)
    model = build(spec.config, torch.float32)
    randomize(model, seed)
    if spec.gguf is not None:
        directory.mkdir()
        write_gguf(directory / "model.gguf", model, spec.gguf)
        return
    model.to(spec.dtype).save_pretrained(directory, max_shard_size=spec.max_shard_size)
    (directory / "generation_config.json").unlink()
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if spec.hub_dialect:
        config = hub_dialect(config)
    path.write_text(json.dumps(config | spec.config_edits, indent=2) + "\n")


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], PreTrainedModel]:
    """The config.json (as a dict), the float32 weights and the model that transformers reads from `directory`."""
    source = {"gguf_file": "model.gguf"} if (directory / "model.gguf").exists() else {}
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        **source,
    ).eval()
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.exists() else model.config.to_dict()
    return config, model.state_dict(), model


def make_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts of `PROMPT_LENGTHS`; the vocabulary's first and last id, at the edges of its shards, are in it."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(vocab_size, size=length).tolist() for length in PROMPT_LENGTHS]
    prompts[1][0], prompts[2][0] = vocab_size - 1, 0
    return prompts


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """`[len(tokens), vocab_size]`, in the model's dtype."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], float]:
    """`NEW_TOKENS` greedy tokens, ignoring the end of sequence, and the smallest gap between the best two logits."""
    tokens, margin = list(prompt), np.inf
    for _ in range(NEW_TOKENS):
        last = logits_of(model, tokens)[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :], margin


def float32_error(
    config: dict[str, Any], weights: dict[str, torch.Tensor], prompts: list[list[int]], logits: list[np.ndarray]
) -> float:
    """The largest difference of `logits` from those of the same weights in float64 throughout."""
    with Float64():
        model = build(config, torch.float64)
        model.load_state_dict(weights)
        exact = [logits_of(model, prompt) for prompt in prompts]
    assert all(reference.dtype == np.float64 for reference in exact)
    return max(float(np.abs(x - y).max()) for x, y in zip(logits, exact, strict=True))


def check_variations(
    name: str,
    spec: Spec,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    prompts: list[list[int]],
    logits: list[np.ndarray],
) -> None:
    """Raise unless each variation of the config moves some logit: otherwise the oracle could not see it ignored."""
    for variation in spec.must_show:
        model = build(config | variation, torch.float32)
        model.load_state_dict(weights)
        effect = max(
            float(np.abs(logits_of(model, p) - reference).max()) for p, reference in zip(prompts, logits, strict=True)
        )
        if effect < MIN_EFFECT:
            raise SystemExit(f"{name}: {variation} moves no logit by more than {effect:.1e}")


def save(
    path: Path, prompts: list[list[int]], logits: list[np.ndarray], tokens: list[list[int]], margin: float
) -> None:
    """Write oracle.npz. Padding is loud: -1 among the prompts, NaN among the logits."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded_prompts = np.full((len(prompts), lengths.max()), -1, np.int32)
    padded_logits = np.full((*padded_prompts.shape, logits[0].shape[1]), np.nan, np.float32)
    for i, length in enumerate(lengths):
        padded_prompts[i, :length] = prompts[i]
        padded_logits[i, :length] = logits[i]
    np.savez_compressed(
        path,
        prompts=padded_prompts,
        lengths=lengths,
        logits=padded_logits,
        greedy=np.array(tokens, np.int32),
        margin=np.float32(margin),
    )


def make(name: str, spec: Spec) -> str:
    """Write the oracle from the first seed whose tokens are clear, varied and clearly routed; return a row about it."""
    directory = ROOT / name
    for seed in itertools.count():
        write_checkpoint(directory, spec, seed)
        config, weights, model = read_checkpoint(directory)
        prompts = make_prompts(model.config.vocab_size, seed)
        with routing_margins(model) as routing:
            tokens, margins = map(list, zip(*(greedy(model, prompt) for prompt in prompts), strict=True))
        is_clear = min(margins) >= MIN_MARGIN and min(routing, default=np.inf) >= MIN_ROUTING_MARGIN
        if is_clear and min(len(set(row)) for row in tokens) >= MIN_DISTINCT:
            break
    logits = [logits_of(model, prompt) for prompt in prompts]
    error = float32_error(config, weights, prompts, logits)
    if error >= MAX_FLOAT32_ERROR:
        raise SystemExit(f"{name}: float32 logits differ from float64 ones by {error:.1e}")
    check_variations(name, spec, config, weights, prompts, logits)
    save(directory / "oracle.npz", prompts, logits, tokens, min(margins))
    size = sum(path.stat().st_size for path in directory.iterdir())
    routed = f"{min(routing):.1e}" if routing else ""
    return f"| {name} | {spec.summary} | {seed} | {min(margins):.3f} | {routed} | {error:.1e} | {size / 1000:.0f} |"


if __name__ == "__main__":
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description="Make the oracles; print the table of README.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which, by default all: {', '.join(SPECS)}")
    names = parser.parse_args().names or list(SPECS)
    if unknown := set(names) - set(SPECS):
        parser.error(f"no such oracle: {', '.join(sorted(unknown))}")
    for name in names:
        print(make(name, SPECS[name]), flush=True)
