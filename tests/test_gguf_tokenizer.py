"""A GGUF file's tokenizer gives the ids of the tokenizer.json that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_file import VOCABULARY, stored, weights, write
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpar.checkpoint import Tokenizer, open_checkpoint
from jaxpar.errors import CheckpointError

TEXT = "the cat sat on the mat, then the 12 cats sat: naïve 日本 🙂 it's 1234!"
SMOLLM = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]


@pytest.fixture(scope="module")
def original() -> tokenizers.Tokenizer:
    """A byte-level BPE as SmolLM2's tokenizer.json has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SMOLLM)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 8, trainer)
    return tokenizer


def tokenizer_metadata(original: tokenizers.Tokenizer, **changes: Any) -> dict[str, Any]:
    model = json.loads(original.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    } | {f"tokenizer.{key}": value for key, value in changes.items()}


def opened(directory: Path, metadata: dict[str, Any]) -> Tokenizer:
    return open_checkpoint(write(directory / "m.gguf", stored(weights()), **metadata)).require_tokenizer()


def test_text_gets_the_ids_of_the_original_tokenizer(tmp_path: Path, original: tokenizers.Tokenizer):
    tokenizer = opened(tmp_path, tokenizer_metadata(original))
    for text in [TEXT, "cats 1234", "<|im_start|>user\n12<|im_end|>", "", " \n\n  x"]:
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode([1, *tokenizer.encode("the cat"), 2]) == "the cat"


def test_digits_are_split_as_the_pre_tokenizer_says(tmp_path: Path, original: tokenizers.Tokenizer):
    metadata = tokenizer_metadata(original)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "12"]
    metadata["tokenizer.ggml.merges"] = ["1 2"]
    pieces = {}
    for pre in ["smollm", "gpt-2", "llama-bpe"]:
        tokenizer = opened(tmp_path, metadata | {"tokenizer.ggml.pre": pre})
        ids = tokenizer.encode("121212", add_special_tokens=False)
        pieces[pre] = [tokenizer.decode([token]) for token in ids]
    # llama-bpe splits 121|212, so that the second 12 lies over a border
    assert pieces == {"smollm": list("121212"), "gpt-2": ["12"] * 3, "llama-bpe": ["12", "1", "2", "12"]}


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"ggml.pre": "llama-bpe"}, [1], []),
        ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, [], []),
        ({"ggml.add_bos_token": True}, [1], []),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [1], [2]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(
    tmp_path: Path, original: tokenizers.Tokenizer, flags: dict[str, Any], before: list[int], after: list[int]
):
    tokenizer = opened(tmp_path, tokenizer_metadata(original, **flags))
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == before + plain + after
    assert tokenizer.decode(plain) == "the cat"


def test_the_chat_template_is_the_file_s(tmp_path: Path, original: tokenizers.Tokenizer):
    template = "{% for m in messages %}{{ bos_token + m['role'] + '\n' + m['content'] + eos_token }}{% endfor %}"
    tokenizer = opened(tmp_path, tokenizer_metadata(original, chat_template=template))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert chat == "<|im_start|>user\nhello<|im_end|>"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ggml.model": "llama"}, "tokenizer.ggml.model is 'llama', expected gpt2"),
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', expected one of gpt-2, smollm, llama-bpe"),
        ({"ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"ggml.merges": ["zz top"]}, "; give token ids, or convert the model again"),
        ({"ggml.token_type": [1]}, "tokenizer.ggml.token_type is [1], expected one entry for each"),
        ({"ggml.bos_token_id": None, "ggml.add_bos_token": True}, "tokenizer.ggml.bos_token_id is missing"),
        ({"chat_template": "{% if %}"}, "; correct it, or give token ids"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused_only_when_text_is_used(
    tmp_path: Path, original: tokenizers.Tokenizer, change: dict[str, Any], expected: str
):
    metadata = tokenizer_metadata(original, **change)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", stored(weights()), **metadata))
    assert checkpoint.tokenizer is None
    with pytest.raises(CheckpointError) as raised:
        checkpoint.require_tokenizer()
    assert expected in str(raised.value)


def test_a_file_without_a_tokenizer_still_takes_token_ids(tmp_path: Path):
    assert open_checkpoint(write(tmp_path / "m.gguf", stored(weights()))).tokenizer is None
