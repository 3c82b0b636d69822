"""Holding a model on a mesh against what transformers gave, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sample_models import rank_logits, rank_tokens

from jaxpar.runner import Runner


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
        first = request % replicas * size
        assert on_rank == {first + rank: list(expected[request]) for rank in range(size)}
