"""Chat templates: messages to one prompt text, as Hugging Face renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpar.checkpoint.files import one_line
from jaxpar.errors import CheckpointError, RequestError


class ChatTemplate:
    """A Jinja template of a model directory, compiled in a sandbox: it sees the messages and special tokens alone.

    Args:
        source: the template's text.
        special_tokens: such as {"bos_token": "<s>"}, which templates name.
        file: where the template comes from, for error messages.

    Raises:
        CheckpointError: if the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], file: Path) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: the chat template is not valid Jinja ({one_line(error)}); correct it, or give token ids"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._file = file

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, [{"role": "user", "content": "..."}, ...].

        `add_generation_prompt` ends it with the opening of the assistant's answer.

        Raises:
            RequestError: if there is no message, one lacks its role or content, or the template refuses them.
        """
        if not messages:
            raise RequestError("a chat needs at least one message, got none")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise RequestError(f"message {number} of the chat is {message!r}, expected its role and content")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # what a model's template does with a request can fail in any way
            raise RequestError(
                f"the chat template of {self._file} refuses the messages ({one_line(error)}); "
                "change them, or give the prompt as plain text"
            ) from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's `tojson`: Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
