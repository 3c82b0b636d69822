"""Training data: the tokenizer gives every text back, and a step's batch depends on nothing but the step."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import error_of
from tokenizers import Tokenizer

from jaxpar.errors import RequestError
from jaxpar.train.data import batches, encode, read_documents, split
from jaxpar.train.tokenizer import BOS, BOS_ID, EOS, EOS_ID, MIN_VOCAB_SIZE, save_tokenizer, train_bpe

TEXTS = ["It is a truth universally acknowledged, that a single man in possession of a good fortune,", "is a want."]
VOCAB = MIN_VOCAB_SIZE + 12
TOKENIZER = train_bpe(TEXTS, VOCAB)


# --- tokenizer ---


@given(st.text())
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\r\n\t  two  spaces ", "日本語 naïve 🙂", "\x00\x7f", f"a{EOS}b {BOS}", "it's 1813"])
def test_awkward_text_comes_back_from_its_ids(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary_has_the_size_asked_for_and_special_tokens_first() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB
    assert (TOKENIZER.token_to_id(BOS), TOKENIZER.token_to_id(EOS)) == (BOS_ID, EOS_ID) == (0, 1)


def test_encoding_adds_no_special_tokens_and_merges_what_the_text_repeats() -> None:
    ids = TOKENIZER.encode(TEXTS[1]).ids
    assert not {BOS_ID, EOS_ID} & set(ids)
    assert len(ids) < len(TEXTS[1])


def test_the_same_texts_give_the_same_tokenizer() -> None:
    assert train_bpe(TEXTS, VOCAB).to_str() == TOKENIZER.to_str()


def test_a_saved_tokenizer_reads_back_and_names_its_special_tokens(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path / "model")
    read = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert read.encode(TEXTS[0]).ids == TOKENIZER.encode(TEXTS[0]).ids
    assert (config["bos_token"], config["eos_token"]) == (BOS, EOS)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("size", [MIN_VOCAB_SIZE - 1, 5000])
def test_a_vocabulary_that_the_text_cannot_give_is_refused_with_its_size(size: int) -> None:
    with pytest.raises(RequestError, match=f"vocabulary size {size}: .* ask for (at least )?[0-9]{{3}}"):
        train_bpe(TEXTS, size)


# --- text files ---


def test_form_feeds_separate_documents_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("one\r\ntwo\n\f \n\f日本\n".encode())
    assert read_documents(path) == ["one\r\ntwo\n", "日本\n"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "no text"), (b" \n\f\n", "no text"), (b"caf\xe9", "not UTF-8 at byte 3"), (None, "No such file")],
)
def test_a_file_without_text_is_refused_by_name(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    message = error_of(lambda: read_documents(path), RequestError)
    assert complaint in message
    assert str(path) in message


def test_a_directory_is_not_a_text_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="directory"):
        read_documents(tmp_path)


def test_documents_lie_between_bos_and_eos() -> None:
    ids = encode(TEXTS, TOKENIZER)
    assert ids.dtype == np.int32
    assert np.flatnonzero(ids == BOS_ID).tolist() == [0, len(TOKENIZER.encode(TEXTS[0]).ids) + 2]
    assert TOKENIZER.decode(ids.tolist(), skip_special_tokens=False) == "".join(f"{BOS}{text}{EOS}" for text in TEXTS)


@given(st.integers(200, 5000))
def test_validation_is_the_last_twentieth(tokens: int) -> None:
    ids = np.arange(tokens, dtype=np.int32)
    training, validation = split(ids, length=4)
    assert np.array_equal(np.concatenate([training, validation]), ids)
    assert abs(len(validation) - tokens / 20) <= 0.5


def test_a_text_too_short_for_one_validation_sequence_is_refused_with_the_numbers() -> None:
    ids = np.arange(100, dtype=np.int32)
    assert len(split(ids, length=4)[1]) == 5
    with pytest.raises(RequestError, match=r"100 tokens .* leave 5 .* sequence of 5 needs 6"):
        split(ids, length=5)


# --- batches; the text is 0, 1, 2, ..., so that a token is its own position ---


@st.composite
def texts(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    length = draw(st.integers(1, 9))
    tokens = draw(st.integers(length + 1, 30 * length + 2))
    return np.arange(tokens, dtype=np.int32), draw(st.integers(1, 5)), length, draw(st.integers(0, 99))


@given(texts(), st.integers(0, 20))
def test_a_resumed_run_sees_the_batches_of_an_unbroken_one(text: tuple[np.ndarray, int, int, int], step: int) -> None:
    unbroken = list(itertools.islice(batches(*text), step + 4))[step:]
    resumed = list(itertools.islice(batches(*text, start_step=step), 4))
    assert np.array_equal(unbroken, resumed)


@given(texts())
def test_sequences_are_consecutive_tokens_with_one_more_for_the_last_target(
    text: tuple[np.ndarray, int, int, int],
) -> None:
    _, batch, length, _ = text
    first = next(batches(*text))
    assert first.shape == (batch, length + 1)
    assert first.dtype == np.int32
    assert (np.diff(first, axis=1) == 1).all()


@given(texts())
def test_an_epoch_visits_every_window_once_and_leaves_out_less_than_two(text: tuple[np.ndarray, int, int, int]) -> None:
    ids, _, length, seed = text
    count = max(1, len(ids) // length - 1)
    epochs = np.concatenate(list(itertools.islice(batches(ids, 1, length, seed), 2 * count)))
    for epoch in (epochs[:count], epochs[count:]):
        visits = Counter(epoch[:, 1:].ravel().tolist())
        assert set(visits.values()) == {1}
        assert len(ids) - 1 - len(visits) < 2 * length


@given(texts())
def test_the_order_of_sequences_does_not_depend_on_the_batch_size(text: tuple[np.ndarray, int, int, int]) -> None:
    ids, batch, length, seed = text
    batched = np.concatenate(list(itertools.islice(batches(ids, batch, length, seed), 4)))
    single = np.concatenate(list(itertools.islice(batches(ids, 1, length, seed), 4 * batch)))
    assert np.array_equal(batched, single)


def test_epochs_and_seeds_have_orders_and_offsets_of_their_own() -> None:
    ids = np.arange(1000, dtype=np.int32)
    count = 1000 // 10 - 1
    starts = np.concatenate(list(itertools.islice(batches(ids, 1, 10, seed=3), 2 * count)))[:, 0]
    other = np.concatenate(list(itertools.islice(batches(ids, 1, 10, seed=4), count)))[:, 0]
    assert not np.array_equal(starts[:count], starts[count:])
    assert not np.array_equal(starts[:count], other)
    assert starts[0] % 10 != starts[count] % 10
