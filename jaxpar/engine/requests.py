"""What a user asks for, and what comes back."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

from jaxpar.errors import RequestError

FinishReason = Literal["stop", "length"]

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Beyond these the choice is greedy, or uniform, in float32."""

_KINDS: tuple[tuple[str, type, str], ...] = (
    ("max_new_tokens", numbers.Integral, "a whole number"),
    ("temperature", numbers.Real, "a number"),
    ("top_k", numbers.Integral, "a whole number"),
    ("top_p", numbers.Real, "a number"),
    ("seed", numbers.Integral, "a whole number"),
)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, in vLLM's words.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 filter nothing; equal prompts with the same `seed` get the same
    text. A request ends at the model's end token (unless `ignore_eos`), after `max_new_tokens`, or with the token that
    completes one of `stop`: of "end" and "ending" the longer one is never seen. Where a token completes several, the
    text ends before the one that begins first.

    Raises:
        RequestError: a value out of its range.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be served, before anything is compiled."""
        for name, kind, wanted in _KINDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise RequestError(f"{name}={value!r}: it must be {wanted}")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r}: it must be True or False")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={self.max_new_tokens}: ask for at least 1 token")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature={self.temperature}: it must be 0 (greedy), or from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k={self.top_k}: it must be 0 (off), or how many of the likeliest tokens to keep")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p}: it must be above 0 and at most 1 (off)")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed={self.seed}: it must be from 0 to {2**32 - 1}")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise RequestError(f"stop: {stop!r} is not a text; give one text or a list of them")
            if not stop:
                raise RequestError("stop: an empty text would stop at once; leave it out")


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments; `stop` may be one text."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: str | Iterable[str]
    ignore_eos: bool


@dataclass(frozen=True)
class Token:
    """One generated token of request `index`, as a stream yields it.

    `text` is what it adds to the text (it may be empty while a character or a stop string is incomplete); on the last
    token of a request `finish_reason` says why it ended.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    `token_ids` include the end token where it ended a request; `text` holds neither it nor the stop string (empty
    without a tokenizer); `logprobs` are natural logarithms under the model's own distribution.
    """

    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: FinishReason
