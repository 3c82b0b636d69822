"""Text to token ids and back, as a model directory's `tokenizer.json` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxpar.checkpoint.chat_template import ChatTemplate
from jaxpar.checkpoint.fields import Fields
from jaxpar.checkpoint.files import one_line, path_inside, read_json, read_text
from jaxpar.checkpoint.stream_decoder import StreamDecoder
from jaxpar.errors import CheckpointError, RequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` and the chat template that came with it, if any.

    `file` is where they come from, for error messages.
    """

    def __init__(self, core: tokenizers.Tokenizer, chat_template: ChatTemplate | None, file: Path) -> None:
        # A directory saved in training may truncate and pad: a prompt must be neither.
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.chat_template = chat_template
        self.file = file

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have text, added ones included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds those that the directory wants around a text, such as the one that begins it; a text
        from `apply_chat_template` has them already.
        """
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become replacement characters."""
        return self.core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder of one request's tokens as they come."""
        return StreamDecoder(self.core, skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation (see ChatTemplate.render).

        Raises:
            RequestError: if the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(f"{self.file} has no chat template; give the prompt as plain text")
        return self.chat_template.render(messages, add_generation_prompt)


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it has no `tokenizer.json`.

    The chat template is `chat_template.jinja`, or else the one in `tokenizer_config.json`.

    Raises:
        CheckpointError: if one of these files is broken.
    """
    file = path_inside(directory, "tokenizer.json")
    if not file.exists():
        return None
    try:
        core = tokenizers.Tokenizer.from_str(read_text(file))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file} is not a tokenizer ({one_line(error)}); fetch it again") from error
    return Tokenizer(core, _read_chat_template(directory), file)


def _read_chat_template(directory: Path) -> ChatTemplate | None:
    config_file = path_inside(directory, "tokenizer_config.json")
    template_file = path_inside(directory, "chat_template.jinja")
    config = Fields(read_json(config_file) if config_file.exists() else {}, config_file)
    special_tokens = {key: _token_text(config, key) for key in _SPECIAL_TOKENS if key in config}
    if template_file.exists():
        return ChatTemplate(read_text(template_file), special_tokens, template_file)
    template = config.values.get("chat_template")
    if type(template) is list:  # several, of which the one named default is for chats
        named = [entry for entry in config.items("chat_template", dict) or () if entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is None:
        return None
    if type(template) is not str:
        raise config.error("chat_template", "a template, or a list of named ones")
    return ChatTemplate(template, special_tokens, config_file)


def _token_text(config: Fields, key: str) -> str:
    """A special token is given as its text, or as an object that holds it."""
    value = config.values[key]
    text = value.get("content") if type(value) is dict else value
    if type(text) is not str:
        raise config.error(key, "a token's text")
    return text
