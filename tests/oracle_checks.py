"""Holding a model on a mesh against what transformers gave, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sample_models import open_session, rank_logits, rank_tokens

from jaxpar.batch import StepOutput
from jaxpar.runner import Runner

DECODED = 4
"""Decode steps whose loads are counted."""


def assert_logits(runner: Runner, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]) -> None:
    """Every rank of every request's replica holds its slice of the expected logits, and together they hold all."""
    seen = [np.zeros_like(logits, dtype=int) for logits in expected]
    for rank, request, tokens, ids, found in rank_logits(runner, prompts):
        seen[request][tokens, ids] += 1
        np.testing.assert_allclose(found, expected[request][tokens, ids], rtol=0, atol=1e-4, err_msg=f"rank {rank}")
    assert all((count == 1).all() for count in seen)


def assert_tokens(runner: Runner, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Every rank of every request's replica chooses the expected tokens."""
    chosen = rank_tokens(runner, prompts, len(expected[0]))
    mesh = runner.plan.mesh
    replicas, size = mesh.dp * mesh.ep, mesh.cp * mesh.tp
    for request, on_rank in enumerate(chosen):
        # The last stage has the tokens.
        first = ((mesh.pp - 1) * replicas + request % replicas) * size
        assert on_rank == {first + rank: list(expected[request]) for rank in range(size)}


def checked_loads(
    runner: Runner, prompts: Sequence[Sequence[int]], following: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """The choices that each expert got in prefill and in decode steps of the tokens that follow [layers, experts].

    Over all ranks each choice of each token counts once.
    """
    assert runner.config.moe is not None
    # As many tokens as `assert_tokens` makes, whose programs these are.
    session = open_session(runner, prompts, len(following[0]) - 1)
    outputs: list[StepOutput] = []
    runner.programs.watchers.append(outputs.append)
    for _ in session.prefill():
        pass
    prefill, steps = len(outputs), ({i: tokens[step] for i, tokens in enumerate(following)} for step in range(DECODED))
    for step in steps:
        for _ in session.decode(step):
            pass
    runner.programs.watchers.remove(outputs.append)
    found = []
    for some, tokens in ((outputs[:prefill], sum(map(len, prompts))), (outputs[prefill:], DECODED * len(prompts))):
        found.append(np.sum([np.asarray(output.loads).sum(axis=0) for output in some], axis=0))
        assert (found[-1].sum(axis=1) == tokens * runner.config.moe.router.top_k).all()
    return found[0], found[1]
