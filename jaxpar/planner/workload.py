"""What is asked of a deployment: the requests that come, and how fast they have to be served."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.values import real_number, shown, whole_number


@dataclass(frozen=True)
class Workload:
    """Requests of one shape.

    `input` tokens of a prompt, of which the first `prefix` are in a cache already; `output` tokens that are generated;
    `concurrency` requests under way at once in all (None: as many as the planner finds best).

    Raises:
        PlanError: a number that no workload can have.
    """

    input: int
    output: int
    prefix: int = 0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no workload can be."""
        for name, least in (("input", 1), ("output", 1), ("prefix", 0), ("concurrency", 1)):
            given = getattr(self, name)
            if given is None and name == "concurrency":
                continue
            value = whole_number(given)
            if value is None or value < least:
                raise PlanError(f"{name}={shown(given)}: it must be a whole number of at least {least}")
            object.__setattr__(self, name, value)
        if self.prefix >= self.input:
            raise PlanError(
                f"prefix={self.prefix} of input={self.input} tokens: the cached prefix is a part of the input, and one "
                f"token of it at least has to be computed; use prefix <= {self.input - 1}"
            )

    @property
    def fresh(self) -> int:
        """Tokens of a prompt that prefill computes."""
        return self.input - self.prefix

    @property
    def longest(self) -> int:
        """Tokens of a request when it ends."""
        return self.input + self.output

    @property
    def mean_context(self) -> int:
        """Tokens that a decode step finds cached for a request, in the mean over its output."""
        return self.input + self.output // 2

    def check(self, config: ModelConfig) -> None:
        """Refuse a workload that the model cannot serve.

        Raises:
            PlanError: more tokens than the model's context.
        """
        context = config.max_position_embeddings
        if self.longest > context:
            raise PlanError(
                f"input={self.input} and output={self.output} are {self.longest} tokens, more than the model's "
                f"{context} positions: use {context} or less together"
            )


@dataclass(frozen=True)
class Targets:
    """Seconds that a request may take: `ttft` to its first token, `tpot` for each one after it; None: any.

    Raises:
        PlanError: a time that is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no target can be."""
        for name in ("ttft", "tpot"):
            given = getattr(self, name)
            value = real_number(given)
            if given is not None and (value is None or not 0 < value < float("inf")):
                raise PlanError(f"{name}={shown(given)}: a time is above 0")
