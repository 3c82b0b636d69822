"""The bundled model: small, whole, trained, and fit for every mesh that the demo and the documents show."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np

import jaxpar
from jaxpar.assets import model_dir
from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader

DIRECTORY = model_dir("tiny")
# In the manner of its books, and in none of them.
TEXT = (
    "Mr. Elliot was announced, and Emma, who had been hoping for nothing but an evening of quiet, was obliged to "
    "receive him with all the civility that her mother would have wished. He was very sorry to have come so late; but "
    "the roads were bad, and he had been detained by a letter from his sister. "
)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_it_is_small() -> None:
    assert sum(sizes(DIRECTORY).values()) <= 6_000_000


def test_it_is_saved_in_bfloat16_with_a_tokenizer_of_its_vocabulary() -> None:
    checkpoint = open_checkpoint(DIRECTORY)
    reader = SafetensorsReader(DIRECTORY)
    assert {reader.info(name).dtype.name for name in reader.names()} == {"bfloat16"}
    assert checkpoint.require_tokenizer().vocab_size == checkpoint.config.vocab_size
    assert checkpoint.config.eos_token_ids == (1,)


def test_its_loss_on_new_text_is_that_of_a_trained_model_also_with_copied_heads() -> None:
    runner = jaxpar.load("tiny", mesh="tp=8")
    ids = runner.checkpoint.require_tokenizer().encode(TEXT)
    logits = np.asarray(runner.logits([ids]))[0, :-1]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    assert losses.sum() / math.log(2) / len(TEXT) < 1.9


def test_its_readme_gives_the_figures_of_its_run() -> None:
    readme = (DIRECTORY / "README.md").read_text()
    run = json.loads((DIRECTORY / "loss.json").read_text())
    options = dict(re.findall(r"--([a-z-]+) ([0-9.]+)", readme))
    names = {"lr": "learning_rate", "kv-heads": "kv_heads", "checkpoint-every": "checkpoint_every"}
    assert options.keys() >= {"steps", "batch", "length", "lr", "vocab", "hidden", "layers", "heads", "kv-heads", "ffn"}
    assert {name: float(value) for name, value in options.items()} == {
        name: run[names.get(name, name)] for name in options
    }
    for figure in (run["validation"][-1]["loss"], run["training"][-1], run["bits_per_character"]):
        assert f"{figure:.3f}" in readme
    assert f"{run['parameters']:,}" in readme
    assert run["text_sha256"] in readme
