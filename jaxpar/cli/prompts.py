"""Where prompts come from: options, files of them, and the few that stand in where none is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.errors import RequestError

if TYPE_CHECKING:
    from jaxpar.checkpoint import Checkpoint, ModelConfig
    from jaxpar.engine.prompts import Prompt


def read_prompts(
    texts: Sequence[str] | None, file: Path | None, token_ids: Sequence[str] | None
) -> tuple[list[Prompt], list[str]]:
    """Prompts of the command line: texts, then those of a file, then lists of token ids; and what to call each.

    Raises:
        RequestError: a file that cannot be read, or a line or a list in it that is no prompt.
    """
    given: list[Prompt] = list(texts or ())
    from_file = _read_file(file) if file is not None else []
    prompts = [*given, *(prompt for _, prompt in from_file), *map(_parse_ids, token_ids or ())]
    places = [f"prompt {index}" for index in range(len(prompts))]
    places[len(given) : len(given) + len(from_file)] = [place for place, _ in from_file]
    return prompts, places


def chat_prompts(checkpoint: Checkpoint, prompts: Sequence[Prompt], places: Sequence[str]) -> list[Prompt]:
    """Each text as what a user says to the model's chat template, encoded: the template has its special tokens already.

    Raises:
        RequestError: token ids, a text that is none, or a model without a chat template.
    """
    from jaxpar.engine.prompts import check_text

    tokenizer = checkpoint.require_tokenizer()
    encoded: list[Prompt] = []
    for place, prompt in zip(places, prompts, strict=True):
        if not isinstance(prompt, str):
            raise RequestError(f"{place} is token ids, and --chat takes text: give it as --prompt")
        check_text(place, prompt)
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        encoded.append(tokenizer.encode(text, add_special_tokens=False))
    return encoded


def builtin_prompts(config: ModelConfig, count: int, new_tokens: int) -> list[Prompt]:
    """Token ids all over the vocabulary, the same each time, of lengths that nothing divides: 1, 7, 19, 12, 1, ..."""
    room = max(config.max_position_embeddings - new_tokens, 1)
    lengths = [min((1, 7, 19, 12)[index % 4], room) for index in range(count)]
    return [
        [(7919 * at + 104729 * index + 17) % config.vocab_size for at in range(length)]
        for index, length in enumerate(lengths)
    ]


def _read_file(file: Path) -> list[tuple[str, Prompt]]:
    """Each prompt of a file after its place, `file:line`."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise RequestError(f"prompt file {file} cannot be read: {reason}; name a file of UTF-8 text") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise RequestError(f"prompt file {file} is empty: give one prompt a line")
    parse = _parse_json_line if file.suffix == ".jsonl" else _parse_line
    places = [f"{file}:{number}" for number in range(1, len(lines) + 1)]
    return [(place, parse(line.removesuffix("\r"), place)) for place, line in zip(places, lines, strict=True)]


def _parse_line(line: str, place: str) -> Prompt:
    if not line:
        raise RequestError(f"{place} is an empty prompt: give one prompt a line, or leave the line out")
    return line


def _parse_json_line(line: str, place: str) -> Prompt:
    wanted = 'give {"prompt": "..."} on each line, the prompt a text or a list of token ids'
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not JSON ({error}): {wanted}") from error
    if not isinstance(value, dict) or value.keys() != {"prompt"} or not isinstance(value["prompt"], str | list):
        raise RequestError(f"{place} is not a prompt: {wanted}")
    prompt: Prompt = value["prompt"]
    return prompt


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(piece) for piece in text.split(",")] if text.strip() else []
    except ValueError:
        raise RequestError(f'--token-ids {text!r} is not a list of whole numbers: write it as "1,2,3"') from None
