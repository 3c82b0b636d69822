"""`jaxpar verify --all`: every way to run a model, and the table of equality, bytes and time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from jaxpar.cli.output import OUT, human_bytes, print_json, progress, table
from jaxpar.errors import RequestError
from jaxpar.tables import counted

if TYPE_CHECKING:
    from jaxpar.checkpoint import Checkpoint
    from jaxpar.verify import RankResult, Verification
    from jaxpar.verify_all import Measured, Outcome

_COLUMNS = ("sublayer", "strategy", "mesh", "result", "max |difference|", "wrong tokens", "ties",
            "sent in prefill", "sent in a decode step", "calls", "prefill s", "decode step ms")  # fmt: skip
_NOTHING = "NOTHING RAN, so nothing is proved"


def verify_all(
    model: str,
    checkpoint: Checkpoint,
    devices: int,
    fields: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    tolerance: float | None,
    platform: str | None,
    budget: float | None,
    json: bool,
) -> int:
    """Prove every way, print what was found, and return the exit status: 1 if anything differs or nothing ran.

    Args:
        model: its name, for the document.
        checkpoint: the model.
        devices: how many each plan uses.
        fields: of all plans.
        prompts: token ids.
        new_tokens: greedy tokens after each.
        tolerance: on logits; None: by dtype, size of logits and strategy.
        platform: as `jaxpar.load` takes it.
        budget: seconds from now after which no further plan starts; None: all are run.
        json: print a document in place of the table.

    Raises:
        RequestError: a budget below 0.
        PlanError, MeshError: fields or a number of devices that nothing can run with.
    """
    begin = time.monotonic()
    if budget is not None and not 0 <= budget < math.inf:
        raise RequestError(f"budget={budget}: it must be 0 or above, and finite")
    with progress("Loading onto one device") as status:
        from jaxpar.applicable import every_way
        from jaxpar.devices import ensure_devices
        from jaxpar.mesh import MeshSpec
        from jaxpar.runner import load
        from jaxpar.verify_all import verify_all as prove

        ways = every_way(checkpoint.config, devices, fields)
        ensure_devices(MeshSpec(dp=devices), platform)
        alone = {"expert_slots": 0, "rebalance_every": 0}
        single = load(checkpoint, "tp=1", platform, **{**fields, **alone})
        until = math.inf if budget is None else begin + budget
        outcomes = [*prove(checkpoint, single, ways, prompts, new_tokens, platform, tolerance, until, status.say)]
    seconds = time.monotonic() - begin
    if json:
        document = {"model": model, "devices": devices, "dtype": single.plan.dtype, "prompts": prompts}
        print_json(document | outcomes_json(outcomes) | {"seconds": seconds})
    else:
        what = (
            f"on {counted(devices, 'device')} against one in {single.plan.dtype}, {counted(len(prompts), 'prompt')}, "
            f"{counted(new_tokens, 'token')} after each"
        )
        OUT.print(render_outcomes(outcomes, what, seconds), markup=False)
    return 0 if all_passed(outcomes) else 1


def all_passed(outcomes: Sequence[Outcome]) -> bool:
    """Something ran, and nothing failed."""
    results = {outcome.result for outcome in outcomes}
    return "passed" in results and "failed" not in results


def render_outcomes(outcomes: Sequence[Outcome], what: str, seconds: float) -> Group:
    """A row for every way, what the rows leave open, and the verdict on `what` was done in so many seconds."""
    counts = Counter(outcome.result for outcome in outcomes)
    notes = [f"{one.way.name}: {note}" for one in outcomes if (note := _note(one))]
    verdict = "PASSED" if all_passed(outcomes) else "FAILED" if counts["failed"] else _NOTHING
    last = (
        f"{verdict}: {what}: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not applicable']} not applicable, {counts['not run']} not run, in {seconds:.0f} s"
    )
    return Group(_table(outcomes), "", *notes, *[""] * bool(notes), last)


def outcomes_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Every outcome, how many there are of each kind, and the verdict, as JSON types."""
    counts = Counter(outcome.result for outcome in outcomes)
    return {
        "counts": {result: counts[result] for result in ("passed", "failed", "not applicable", "not run")},
        "passed": all_passed(outcomes),
        "rows": [_row_json(outcome) for outcome in outcomes],
    }


def lossy(verification: Verification) -> str:
    """What to add to a tolerance that a lossy strategy has set; nothing otherwise."""
    part = verification.lossy
    return f", lossy: {100 * part:g}% of the largest logit" if part else ""


def wrong_and_ties(verification: Verification, results: Sequence[RankResult]) -> tuple[object, int]:
    """Two columns of some results; of a lossy plan no token is wrong, and texts that differ are counted as ties."""
    wrong = "-" if verification.lossy else sum(result.wrong_tokens for result in results)
    return wrong, sum(result.ties for result in results)


def tokens_of_lossy(verification: Verification) -> str:
    """What the tokens of a lossy plan come to."""
    results = verification.results
    return f"tokens, which prove nothing then, differ in {sum(r.ties for r in results)} of {len(results)} texts"


def _table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for one in outcomes:
        found, plan = one.measured, one.way.plan
        result: str = (
            "FAILED" if one.result == "failed" else "not run (budget)" if one.result == "not run" else one.result
        )
        if one.measured is not None and one.measured.verification.lossy:
            result = f"{result}, lossy"
        name = (one.way.sublayer, one.way.strategy, "-" if plan is None else str(plan.mesh), result)
        rows.append((*name, *(["-"] * (len(_COLUMNS) - len(name)) if found is None else _figures(found))))
    return table("", _COLUMNS, rows, left=4)


def _figures(found: Measured) -> tuple[object, ...]:
    verification, decode = found.verification, found.decode_seconds
    allowed = f" of {verification.tolerance:.2e}" if verification.lossy else ""
    return (
        f"{verification.max_difference:.2e}{allowed}",
        *wrong_and_ties(verification, verification.results),
        human_bytes(found.prefill_bytes),
        human_bytes(found.decode_bytes),
        found.decode_calls,
        f"{found.prefill_seconds:.3f}",
        "-" if decode is None else f"{1000 * decode:.1f}",
    )


def _note(one: Outcome) -> str:
    """What the row of a way leaves open: why it was not run, or what it was allowed."""
    if one.reason:
        return f"{one.result}: {one.reason}"
    if one.measured is None:
        return ""
    verification, dropped = one.measured.verification, one.measured.dropped
    notes = []
    if one.result == "failed" or verification.lossy:
        notes.append(f"tolerance {verification.tolerance:g}{lossy(verification)}")
    if verification.lossy:
        notes.append(tokens_of_lossy(verification))
    if dropped:
        notes.append(f"{counted(dropped, 'row')} dropped, for which moe_capacity had no room")
    return "; ".join(notes)


def _row_json(one: Outcome) -> dict[str, Any]:
    plan, found = one.way.plan, one.measured
    row: dict[str, Any] = {
        "sublayer": one.way.sublayer,
        "strategy": one.way.strategy,
        "mesh": None if plan is None else plan.mesh.sizes,
        "result": one.result,
        "reason": one.reason,
    }
    if found is None:
        return row
    verification = found.verification
    return row | {
        "max_difference": verification.max_difference,
        "tolerance": verification.tolerance,
        "lossy": verification.lossy,
        "margin": verification.margin,
        "ranks": len({result.rank for result in verification.results}),
        "wrong_tokens": sum(result.wrong_tokens for result in verification.results),
        "ties": sum(result.ties for result in verification.results),
        "prefill_bytes": found.prefill_bytes,
        "decode_bytes": found.decode_bytes,
        "decode_calls": found.decode_calls,
        "prefill_seconds": found.prefill_seconds,
        "decode_seconds": found.decode_seconds,
        "dropped_rows": found.dropped,
    }
