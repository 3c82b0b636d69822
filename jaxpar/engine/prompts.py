"""From prompts as users give them to token ids that the model can take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpar.checkpoint.checkpoint import Checkpoint
from jaxpar.errors import CheckpointError, RequestError
from jaxpar.values import shown, whole_number

Prompt = str | Sequence[int]


def prompt_list(prompts: Iterable[Prompt] | str) -> list[Prompt]:
    """One text or several prompts as a list; RequestError where it is neither."""
    items = [prompts] if isinstance(prompts, str) else _items(prompts)
    if items is None:
        raise RequestError(f"prompts={shown(prompts)}: give a text, or a list of texts and lists of token ids")
    return items


def encode_prompts(
    checkpoint: Checkpoint, prompts: Iterable[Prompt] | str, max_new_tokens: int = 0, places: Sequence[str] = ()
) -> list[list[int]]:
    """Prompts, each text or token ids -> token ids, checked against the vocabulary and the context.

    `places` are what messages call the prompts; by default "prompt 0" and so on.

    Raises:
        RequestError: no prompt, an empty one, one that is neither text nor ids, an id outside the vocabulary, or more
            tokens than the context holds.
        CheckpointError: text for a model that has no tokenizer.
    """
    encoded = []
    for index, prompt in enumerate(prompt_list(prompts)):
        place = places[index] if places else f"prompt {index}"
        if isinstance(prompt, str):
            check_text(place, prompt)
            ids = checkpoint.require_tokenizer().encode(prompt)
        else:
            ids = _token_ids(place, prompt)
        _check(place, ids, checkpoint, max_new_tokens)
        encoded.append(ids)
    if not encoded:
        raise RequestError("no prompt was given: pass at least one")
    return encoded


def check_text(place: str, text: str) -> None:
    """Refuse, with RequestError, a text that has nothing in it or that no tokenizer takes."""
    if not text:
        raise RequestError(f"{place} is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{place} is not Unicode text at character {error.start}: give it as UTF-8") from error


def check_stop(checkpoint: Checkpoint, stop: Sequence[str]) -> None:
    """Refuse, with RequestError, stop texts for a model that generates no text."""
    if not stop:
        return
    try:
        checkpoint.require_tokenizer()
    except CheckpointError as error:
        raise RequestError(f"stop: there is no text to look for {stop[0]!r} in: {error}") from error


def _items(value: Any) -> list[Any] | None:
    """What a list, an array or another iterable holds; None where it is none, or bytes."""
    try:
        items = iter(value)
    except TypeError:
        return None
    return None if isinstance(value, bytes | bytearray) else list(items)


def _token_ids(place: str, prompt: Any) -> list[int]:
    items = _items(prompt)
    ids = []
    for item in [prompt] if items is None else items:
        token = None if items is None else whole_number(item)
        if token is None:
            raise RequestError(
                f"{place} is neither text nor a list of token ids ({shown(item)}): give a text or whole numbers"
            )
        ids.append(token)
    return ids


def _check(place: str, ids: Sequence[int], checkpoint: Checkpoint, max_new_tokens: int) -> None:
    config = checkpoint.config
    context = config.max_position_embeddings
    if not ids:
        raise RequestError(f"{place} is empty: give at least one token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            last = config.vocab_size - 1
            raise RequestError(f"{place}: token id {token} is outside the vocabulary; use ids from 0 to {last}")
    total = len(ids) + max_new_tokens
    if total > context:
        generated = f"; with max_new_tokens={max_new_tokens} that is {total}" if max_new_tokens else ""
        fewer = f", or use max_new_tokens={context - len(ids)}" if max_new_tokens and len(ids) < context else ""
        raise RequestError(
            f"{place} has {len(ids)} tokens{generated}, and the model's context is {context}: "
            f"shorten the prompt by {total - context}{fewer}"
        )
