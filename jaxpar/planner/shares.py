"""What each part of a deployment contributes to what is minimised: seconds of a request, or of a device per token.

The contributions of all parts add up to the whole, so that two plans can be compared part by part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from jaxpar.planner.estimate import Estimate
from jaxpar.planner.timing import StepTime

IDLE = "prefill pool without work"


def contributions(one: Estimate, objective: str) -> dict[str, float]:
    """Seconds by what they are spent on: of a device for each generated token, for "latency" of a whole request.

    Names are "prefill FFN", "decode over tp", "prefill bubble" and the like; what is hidden behind work is not there.
    """
    steps = one.output - 1
    if objective == "latency":
        of_prefill, of_decode = 1.0, steps / one.decode.tpot
        waits = {"queue": one.served.first.queue, "transfer": one.served.first.transfer}
    else:
        prompts = one.pools[0].replicas * one.output
        of_prefill = one.pools[0].devices / prompts
        of_decode = one.pools[-1].devices * steps / one.output / one.batch / one.decode.tpot
        # A pool that waits for the other one costs as much as one that works.
        idle = one.pools[0].devices * (1 - one.served.prefilling) / (one.served.rate * one.output) if one.apart else 0.0
        waits = {IDLE: idle}
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in prefill_parts(one).items():
        if name != "bubble" or objective == "latency":
            found[f"prefill {name}"] += of_prefill * seconds
    for name, seconds in decode_parts(one).items():
        found[f"decode {name}"] += of_decode * one.decode.tpot * seconds
    return {name: seconds for name, seconds in {**found, **waits}.items() if seconds}


def prefill_parts(one: Estimate) -> dict[str, float]:
    """Seconds of a prompt by part, all of its chunks together."""
    found = _parts(one.prefill.steps)
    return {**found, "bubble": one.prefill.bubble} if one.prefill.bubble else found


def decode_parts(one: Estimate) -> dict[str, float]:
    """Seconds between two tokens by part, without the prefills of others."""
    return _parts([(one.decode.step, one.decode.ticks)])


def _parts(steps: Iterable[tuple[StepTime, int]]) -> dict[str, float]:
    """By the name of what works, and "over tp" for what is sent and not hidden."""
    found: defaultdict[str, float] = defaultdict(float)
    for step, times in steps:
        for part in step.parts:
            found[part.name] += times * part.working
            exposed = part.sent - part.hidden
            for axes, seconds in part.sending:
                if seconds:
                    found[f"over {'+'.join(axes)}"] += times * exposed * seconds / part.sent
        found["host"] += times * step.overhead
    return {name: seconds for name, seconds in found.items() if seconds}
