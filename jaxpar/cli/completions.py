"""How generated text is shown: as it comes, whole, token by token, or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxpar.cli.output import OUT, Progress, table

if TYPE_CHECKING:
    from jaxpar.checkpoint import Tokenizer
    from jaxpar.engine.prompts import Prompt
    from jaxpar.engine.requests import Completion, Token
    from jaxpar.runner import Runner


class Timer:
    """Counts the tokens of a stream and the seconds that they take; as text, a line of figures."""

    def __init__(self) -> None:
        self._begin = self._first = self._last = time.perf_counter()
        self._tokens = 0

    def watch(self, tokens: Iterator[Token]) -> Iterator[Token]:
        """The same tokens."""
        for token in tokens:
            self._last = time.perf_counter()
            if not self._tokens:
                self._first = self._last
            self._tokens += 1
            yield token

    def __str__(self) -> str:
        seconds, first = self._last - self._begin, self._first - self._begin
        plural = "s" * (self._tokens > 1)
        rate = self._tokens / seconds
        return f"{self._tokens} token{plural} in {seconds:.2f} s, {rate:.1f} tokens/s, the first after {first:.2f} s"


def echo(tokens: Iterator[Token], prompt: Prompt, chat: bool, status: Progress) -> Iterator[Token]:
    """The same tokens, their text written after the prompt as they come."""
    for number, token in enumerate(tokens):
        if number == 0:
            status.stop()
            _print_prompt(prompt, chat)
        sys.stdout.write(token.text)
        sys.stdout.flush()
        yield token
    sys.stdout.write("\n")


def print_completions(
    prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: Tokenizer | None, chat: bool
) -> None:
    """Each completion whole; on a terminal after its prompt. Without a tokenizer, the token ids."""
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if sys.stdout.isatty():
            sys.stdout.write("\n" * (number > 0))
            _print_prompt(prompt, chat)
        text = completion.text if tokenizer is not None else join_ids(completion.token_ids)
        sys.stdout.write(text + "\n")


def token_table(prompt: Prompt, completion: Completion, tokenizer: Tokenizer | None) -> Table:
    """A completion's tokens with their natural log-probabilities."""
    rows = [
        (token, f"{logprob:.4f}", "" if tokenizer is None else repr(tokenizer.decode([token], False)))
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    drawn = table("", ("token id", "log-probability", "text"), rows, left=0)
    drawn.columns[-1].justify = "left"
    return drawn


def completion_json(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """A completion with its prompt, as JSON types."""
    return {
        "prompt": prompt,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
    }


def dropped_rows(runner: Runner) -> str:
    """What the plan's capacity took from the answer; "" if nothing."""
    if not runner.dropped:
        return ""
    rows = f"{runner.dropped} row{'s' * (runner.dropped > 1)}"
    return f"moe_capacity={runner.plan.moe_capacity:g} dropped {rows} on the way to experts: 0 drops nothing"


def _print_prompt(prompt: Prompt, chat: bool) -> None:
    """A text goes on where its prompt ends; an answer, and what follows token ids, begins a line."""
    inline = isinstance(prompt, str) and not chat
    shown = prompt if isinstance(prompt, str) else join_ids(prompt)
    OUT.out(shown, style="dim", highlight=False, end="" if inline else "\n")


def join_ids(token_ids: Sequence[int]) -> str:
    """As `--token-ids` takes them."""
    return ",".join(map(str, token_ids))
