"""Proof of every way to run a model: each plan in turn against the same model on one device, loaded once.

    plan 1 -> load, compare every logit and token, run again against the clock, free -> plan 2 -> ...

What a plan sends is its closed form, for as many requests as there are prompts, all as long as the longest one. What it
takes is measured as `generate` runs it: groups of requests follow one another through the stages.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from jaxpar.applicable import Way
from jaxpar.checkpoint import Checkpoint
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Decoded, Session
from jaxpar.engine.sizes import groups_in, groups_of
from jaxpar.errors import PlanError
from jaxpar.ledger.predict import predict_steps
from jaxpar.ledger.rounds import loads_of
from jaxpar.ledger.steps import make_steps
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Phase
from jaxpar.runner import Runner, load
from jaxpar.verify import Verification, verify

Result = Literal["passed", "failed", "not applicable", "not run"]


@dataclass(frozen=True)
class Measured:
    """What was found of a plan: of a rank the bytes and calls, of all ranks the time.

    `decode_seconds` are those of a step in which each request gets a token, None where nothing was decoded; `dropped`
    are rows that `moe_capacity` had no room for.
    """

    verification: Verification
    prefill_bytes: int
    decode_bytes: int
    decode_calls: int
    prefill_seconds: float
    decode_seconds: float | None
    dropped: int


@dataclass(frozen=True)
class Outcome:
    """What became of one way: `measured` where it ran, and otherwise `reason` where one can be given."""

    way: Way
    result: Result
    measured: Measured | None = None
    reason: str = ""


def verify_all(
    checkpoint: Checkpoint,
    single: Runner,
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    platform: str | None = None,
    tolerance: float | None = None,
    until: float = float("inf"),
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Outcome]:
    """Prove one way after the other; a plan that two of them have runs once.

    Args:
        checkpoint: the model.
        single: the model on one device.
        ways: of `every_way`.
        prompts: token ids, of any lengths.
        new_tokens: greedy tokens after each prompt.
        platform: as `jaxpar.load` takes it.
        tolerance: as `jaxpar.verify.verify` takes it.
        until: the time (`time.monotonic`) from which no further plan starts.
        progress: called with a word on what comes next.
    """
    seen: dict[object, Outcome] = {}
    for number, way in enumerate(ways, 1):
        plan = way.plan
        if plan is None:
            yield Outcome(way, "not applicable", reason=way.problem)
            continue
        if plan not in seen:
            if time.monotonic() >= until:
                yield Outcome(way, "not run")
                continue

            def say(text: str, place: str = f"{number} of {len(ways)}: {way.name} on {plan.mesh}") -> None:
                progress(f"{place}: {text}")

            say("loading")
            seen[plan] = _prove(checkpoint, single, way, prompts, new_tokens, platform, tolerance, say)
            # A model's programs refer to it and it to them; a process may have only so many (65,530 memory maps).
            gc.collect()
        found = seen[plan]
        yield Outcome(way, found.result, found.measured, found.reason)


def _prove(
    checkpoint: Checkpoint,
    single: Runner,
    way: Way,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    platform: str | None,
    tolerance: float | None,
    say: Callable[[str], None],
) -> Outcome:
    plan = way.plan
    assert plan is not None
    options = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "mesh"}
    try:
        runner = load(checkpoint, plan.mesh, platform, **options | {"dtype": single.plan.dtype})
    except PlanError as error:
        return Outcome(way, "not applicable", reason=str(error))
    except Exception as error:  # the others shall be proved all the same
        return _stumbled(way, error)
    # From here on PlanError says that the program is wrong: tracing refuses what would sum copies.
    try:
        verification = verify(runner, single, prompts, new_tokens, tolerance, say)
        say("once more, against the clock")
        seconds = time_run(runner, prompts, new_tokens)
    except Exception as error:
        return _stumbled(way, error)
    longest = max(map(len, prompts))
    prefill = _sent(runner, "prefill", len(prompts), longest)
    decode = _sent(runner, "decode", len(prompts), longest + (new_tokens > 1))
    measured = Measured(
        verification,
        prefill_bytes=sum(row.sent_bytes for row in prefill),
        decode_bytes=sum(row.sent_bytes for row in decode),
        decode_calls=sum(row.calls for row in decode),
        prefill_seconds=seconds[0],
        decode_seconds=seconds[1],
        dropped=runner.dropped,
    )
    return Outcome(way, "passed" if verification.passed else "failed", measured)


def _stumbled(way: Way, error: Exception) -> Outcome:
    return Outcome(way, "failed", reason=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _sent(runner: Runner, phase: Phase, requests: int, tokens: int) -> list[Traffic]:
    """What each rank sends in a decode step or in a whole prefill, by closed form."""
    steps = make_steps(runner.config, runner.plan, phase, requests, tokens)
    return predict_steps(steps, loads_of(runner.config, None))[0]


def time_run(runner: Runner, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float | None]:
    """Seconds that prefilling all prompts takes, and those of a decode step, every program compiled before.

    A decode step is a rotation of all groups through the stages, so many ticks of the mean length: those in which the
    pipeline fills and drains are not of it. None where `new_tokens` is 1.
    """
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    prefill = decode = steps = 0.0
    for group in groups_of(len(prompts), runner.plan):
        mine = [prompts[i] for i in group]
        capacity = [len(prompt) + new_tokens - 1 for prompt in mine]
        session = Session(runner.programs, runner.weights, mine, capacity, params)
        latest, made = dict[int, int](), Counter[int]()

        def keep(decoded: Decoded, latest: dict[int, int] = latest, made: Counter[int] = made) -> None:
            tokens = decoded.tokens
            made.update(tokens.keys())
            latest |= {i: token for i, token in tokens.items() if made[i] < new_tokens}

        begin = time.perf_counter()
        for chunk in session.prefill():
            keep(chunk.decoded)
        prefilled, filled = time.perf_counter(), session.pipe.ticks
        for step in session.turns(latest):
            keep(step)
        prefill, decode = prefill + prefilled - begin, decode + time.perf_counter() - prefilled
        steps += (session.pipe.ticks - filled) / max(groups_in(len(mine), runner.plan), runner.plan.mesh.pp)
    return prefill, decode / steps if steps else None
