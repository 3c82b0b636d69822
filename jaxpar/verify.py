"""Proof on a user's own model: the mesh against one device, logits and tokens, on every rank.

Both run the same prompts. The single device's greedy tokens are fed to both step programs, so that a difference is
seen at the step where it arises and not as a text that has drifted away: prefill over the prompt (in chunks), then
decode token by token. Then the mesh makes its own tokens as `generate` does. One may differ only where the single
device's two best logits are closer than the tolerance; such ties are counted. Lossy strategies are judged by logits
alone: their tolerance is too wide for a token to prove anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import jax
import numpy as np

from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Decoded, Session
from jaxpar.engine.sizes import groups_of
from jaxpar.registry import running
from jaxpar.runner import Runner

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}
"""Largest difference of a logit that rounding in this dtype explains, where logits are of the order of 1."""

RELATIVE_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.006}
"""The same as a part of the single device's largest logit: the larger of the two counts."""


@dataclass
class RankResult:
    """One prompt on one rank of the replica that serves it.

    `max_difference` is that of its logits over prefill and decode, `compared` how many logits it was taken over. Of a
    lossy plan every text that differs is one of the `ties`.
    """

    prompt: int
    rank: int
    max_difference: float = 0.0
    compared: int = 0
    wrong_tokens: int = 0
    ties: int = 0


@dataclass
class Verification:
    """All results; `margin` is the smallest gap between the single device's two best logits at a generated token.

    `lossy` is that of the plan's strategies (`Strategy.lossy`), where the tolerance is theirs; 0: it is the dtype's.
    """

    tolerance: float
    tokens: list[list[int]]
    margin: float = float("inf")
    results: list[RankResult] = field(default_factory=list)
    lossy: float = 0.0

    @property
    def max_difference(self) -> float:
        """Over all prompts and ranks; NaN if it is NaN anywhere."""
        return float(np.max([result.max_difference for result in self.results]))

    @property
    def passed(self) -> bool:
        """Every logit within the tolerance and every token equal, on every rank. A NaN passes nothing."""
        return all(r.max_difference <= self.tolerance and r.wrong_tokens == 0 for r in self.results)


def verify(
    mesh: Runner,
    single: Runner,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Compare a model on a mesh with the same model on one device.

    Args:
        mesh: the model on the mesh.
        single: the same model on one device, with the same dtype.
        prompts: token ids, of any lengths.
        new_tokens: greedy tokens to compare after each prompt.
        tolerance: on logits; None takes TOLERANCE of the dtype, or more where logits are large or a strategy is lossy.
        progress: called with a word on what comes next.
    """
    dtype, largest = mesh.plan.dtype, 0.0
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    rank_of = {device: rank for rank, device in enumerate(mesh.programs.mesh.devices.flat)}
    rows: dict[tuple[int, int], RankResult] = {}

    def row(prompt: int, device: jax.Device) -> RankResult:
        key = prompt, rank_of[device]
        return rows.setdefault(key, RankResult(*key))

    # As many at once as one replica may run: both run the same steps.
    groups = [[prompts[i] for i in group] for group in groups_of(len(prompts), single.plan)]
    tokens: list[list[int]] = []
    margins: list[list[float]] = [[] for _ in prompts]
    for group in groups:
        first = len(tokens)
        progress("greedy tokens on one device")
        tokens += [next(iter(on_rank.values())) for on_rank in _greedy(single, group, params)]

        progress("logits of prefill and decode, step by step")
        for ours, theirs in _pairs(*(_steps(runner, group, tokens[first:], params) for runner in (mesh, single))):
            reference = np.asarray(theirs.logits)
            for i, at in ours.places.items():
                expected = reference[*theirs.places[i], : mesh.config.vocab_size]
                largest = max(largest, float(np.abs(expected).max()))
                if i in ours.generates:
                    best = np.partition(expected[-1], -2)[-2:]
                    margins[first + i].append(float(best[1] - best[0]))
                for device, here, found, start in _on_every_rank(ours.logits, *at):
                    part = expected[here, start : start + found.shape[1]]
                    difference = np.abs(found[:, : part.shape[1]] - part)
                    result = row(first + i, device)
                    # np.maximum keeps a NaN, where max() may not.
                    result.max_difference = float(np.maximum(result.max_difference, difference.max(initial=0.0)))
                    result.compared += difference.size
    lossy = 0.0
    if tolerance is None:
        lossy = max(one.lossy for of_step in running(mesh.config, mesh.plan).values() for one in of_step.values())
        tolerance = max(TOLERANCE[dtype], max(RELATIVE_TOLERANCE[dtype], lossy) * largest)
    verification = Verification(tolerance, tokens, margin=min(min(gaps) for gaps in margins), lossy=lossy)

    progress("greedy tokens on every rank of the mesh")
    for i, on_rank in enumerate(found for group in groups for found in _greedy(mesh, group, params)):
        for device, ours_only in on_rank.items():
            result = row(i, device)
            pairs = enumerate(zip(ours_only, tokens[i], strict=True))
            # After the first difference the texts differ, and so do all tokens that follow.
            wrong = next((place for place, (mine, other) in pairs if mine != other), None)
            if wrong is not None and (lossy or margins[i][wrong] <= tolerance):
                result.ties += 1
            elif wrong is not None:
                result.wrong_tokens += 1
    verification.results = [rows[key] for key in sorted(rows)]
    return verification


@dataclass
class _Step:
    """Logits [lanes, T, V] of one step; lane and place in it of each prompt's tokens; the prompts that generate.

    `number` counts chunks, and after them the tokens of each request: groups of requests have steps of the same.
    """

    number: int
    logits: jax.Array
    places: dict[int, tuple[np.ndarray, np.ndarray]]
    generates: list[int]


def _steps(
    runner: Runner, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[_Step]:
    """Run `tokens` after `prompts` through prefill and decode, logits of every position coming out."""
    session, longest = _session(runner, prompts, params), max(map(len, prompts))
    for chunk in session.prefill(logits=True):
        places = enumerate(zip(chunk.rows, chunk.columns, strict=True))
        assert chunk.output.logits is not None
        yield _Step(chunk.offset, chunk.output.logits, {i: at for i, at in places if len(at[0])}, chunk.ended)
    for at in range(params.max_new_tokens - 1):
        for step in session.decode({i: row[at] for i, row in enumerate(tokens)}, logits=True):
            assert step.output.logits is not None
            first = np.zeros(1, np.int64)
            decoded = {i: (np.array([row]), first) for i, row in step.rows.items()}
            yield _Step(longest + at, step.output.logits, decoded, list(step.rows))


def _pairs(ours: Iterator[_Step], theirs: Iterator[_Step]) -> Iterator[tuple[_Step, _Step]]:
    """Each of our steps with that of a single group of all requests which has the same tokens."""
    groups = groupby(ours, key=lambda step: step.number)
    for (_, steps), other in zip(groups, theirs, strict=True):
        for step in steps:
            yield step, other


def _greedy(
    runner: Runner, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[dict[jax.Device, list[int]]]:
    """The greedy tokens of every prompt as each device of its replica holds them, groups in rotation over stages."""
    session = _session(runner, prompts, params)
    found: list[dict[jax.Device, list[int]]] = [{} for _ in prompts]
    latest: dict[int, int] = {}

    def keep(decoded: Decoded) -> None:
        output = decoded.output.token
        for i, row in decoded.rows.items():
            for shard in output.addressable_shards:
                lanes = range(*shard.index[0].indices(output.shape[0]))
                if row in lanes:
                    token = int(np.asarray(shard.data)[lanes.index(row)])
                    found[i].setdefault(shard.device, []).append(token)
                    if len(found[i][shard.device]) < params.max_new_tokens:
                        latest[i] = token

    for chunk in session.prefill():
        keep(chunk.decoded)
    for step in session.turns(latest):
        keep(step)
    return found


def _session(runner: Runner, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Session:
    capacity = [len(prompt) + params.max_new_tokens - 1 for prompt in prompts]
    return Session(runner.programs, runner.weights, prompts, capacity, params)


def _on_every_rank(
    logits: jax.Array, rows: np.ndarray, columns: np.ndarray
) -> Iterator[tuple[jax.Device, np.ndarray, np.ndarray, int]]:
    """Each device's own copy of logits at places: (device, which of the places, [those, ids it holds], first id)."""
    for shard in logits.addressable_shards:
        lanes, tokens, ids = (range(*s.indices(n)) for s, n in zip(shard.index, logits.shape, strict=True))
        held = (rows >= lanes.start) & (rows < lanes.stop) & (columns >= tokens.start) & (columns < tokens.stop)
        if held.any():
            found = np.asarray(shard.data)[rows[held] - lanes.start, columns[held] - tokens.start]
            yield shard.device, np.flatnonzero(held), found, ids.start
