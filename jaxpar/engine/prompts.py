"""From prompts as users give them to token ids that the model can take."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpar.checkpoint.checkpoint import Checkpoint
from jaxpar.errors import CheckpointError, RequestError

Prompt = str | Sequence[int]


def encode_prompts(checkpoint: Checkpoint, prompts: Iterable[Prompt] | str, max_new_tokens: int = 0) -> list[list[int]]:
    """Prompts, each text or token ids -> token ids, checked against the vocabulary and the context.

    Raises:
        RequestError: no prompt, an empty one, one that is neither text nor ids, an id outside the vocabulary, or more
            tokens than the context holds.
        CheckpointError: text for a model that has no tokenizer.
    """
    encoded = []
    for index, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        if isinstance(prompt, str):
            check_text(index, prompt)
            ids = checkpoint.require_tokenizer().encode(prompt)
        else:
            ids = _token_ids(index, prompt)
        _check(index, ids, checkpoint, max_new_tokens)
        encoded.append(ids)
    if not encoded:
        raise RequestError("no prompt was given: pass at least one")
    return encoded


def check_text(index: int, text: str) -> None:
    """Refuse, with RequestError, a text that has nothing in it or that no tokenizer takes."""
    if not text:
        raise RequestError(f"prompt {index} is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"prompt {index} is not Unicode text at character {error.start}: give it as UTF-8"
        ) from error


def check_stop(checkpoint: Checkpoint, stop: Sequence[str]) -> None:
    """Refuse, with RequestError, stop texts for a model that generates no text."""
    if not stop:
        return
    try:
        checkpoint.require_tokenizer()
    except CheckpointError as error:
        raise RequestError(f"stop: there is no text to look for {stop[0]!r} in: {error}") from error


def _token_ids(index: int, ids: Any) -> list[int]:
    try:
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise RequestError(f"prompt {index} is neither text nor a list of token ids: {error}") from error


def _check(index: int, ids: Sequence[int], checkpoint: Checkpoint, max_new_tokens: int) -> None:
    config = checkpoint.config
    context = config.max_position_embeddings
    if not ids:
        raise RequestError(f"prompt {index} is empty: give at least one token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            last = config.vocab_size - 1
            raise RequestError(f"prompt {index}: token id {token} is outside the vocabulary; use ids from 0 to {last}")
    if len(ids) + max_new_tokens > context:
        raise RequestError(
            f"prompt {index} has {len(ids)} tokens; with max_new_tokens={max_new_tokens} that is "
            f"{len(ids) + max_new_tokens}, and the model's context is {context}: shorten one of them"
        )
