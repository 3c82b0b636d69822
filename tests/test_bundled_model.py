"""The bundled models: small, whole, trained, and fit for every mesh that the demo and the documents show."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import jaxpar
from jaxpar.assets import model_dir
from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader

# A mesh for each, on which heads are copied and experts lie on many ranks.
MODELS = {"tiny": "tp=8", "tiny-moe": "dp=2,ep=2,tp=2"}
# In the manner of its books, and in none of them.
TEXT = (
    "Mr. Elliot was announced, and Emma, who had been hoping for nothing but an evening of quiet, was obliged to "
    "receive him with all the civility that her mother would have wished. He was very sorry to have come so late; but "
    "the roads were bad, and he had been detained by a letter from his sister. "
)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.mark.parametrize("model", MODELS)
def test_it_is_small(model: str) -> None:
    assert sum(sizes(model_dir(model)).values()) <= 7_000_000


@pytest.mark.parametrize("model", MODELS)
def test_it_is_saved_in_bfloat16_with_a_tokenizer_of_its_vocabulary(model: str) -> None:
    checkpoint = open_checkpoint(model_dir(model))
    reader = SafetensorsReader(model_dir(model))
    assert {reader.info(name).dtype.name for name in reader.names()} == {"bfloat16"}
    assert checkpoint.require_tokenizer().vocab_size == checkpoint.config.vocab_size
    assert checkpoint.config.eos_token_ids == (1,)


@pytest.mark.parametrize(("model", "mesh"), MODELS.items())
def test_its_loss_on_new_text_is_that_of_a_trained_model(model: str, mesh: str) -> None:
    runner = jaxpar.load(model, mesh=mesh)
    ids = runner.checkpoint.require_tokenizer().encode(TEXT)
    logits = np.asarray(runner.logits([ids]))[0, :-1]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    assert losses.sum() / math.log(2) / len(TEXT) < 1.9


def test_every_expert_of_every_layer_is_alive_and_they_are_not_all_alike() -> None:
    runner = jaxpar.load("tiny-moe")
    ids = runner.checkpoint.require_tokenizer().encode(TEXT)
    with runner.record_experts() as record:
        runner.generate([ids], max_new_tokens=1)
    loads = record.stats().loads
    assert (loads > 0).all()
    assert (loads.max(axis=1) > 1.2 * loads.mean(axis=1)).all()


@pytest.mark.parametrize("model", MODELS)
def test_its_readme_gives_the_figures_of_its_run(model: str) -> None:
    readme = (model_dir(model) / "README.md").read_text()
    run = json.loads((model_dir(model) / "loss.json").read_text())
    options = dict(re.findall(r"--([a-z-]+) ([0-9.]+)", readme))
    names = {"lr": "learning_rate"}
    needed = {"steps", "batch", "length", "lr", "vocab", "hidden", "layers", "heads", "kv-heads"}
    assert options.keys() >= needed | ({"experts", "expert-ffn"} if "moe" in model else {"ffn"})
    assert {name: float(value) for name, value in options.items()} == {
        name: run[names.get(name, name.replace("-", "_"))] for name in options
    }
    for figure in (run["validation"][-1]["loss"], run["training"][-1], run["bits_per_character"]):
        assert f"{figure:.3f}" in readme
    assert f"{run['parameters']:,}" in readme
    assert run["text_sha256"] in readme
