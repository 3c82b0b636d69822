"""Real steps of models with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs, Weights

_DECODED, _PREFILLED = 28, 14
"""Steps that are run: tokens of each request that are decoded, and prefills."""


@dataclass(frozen=True)
class Run:
    """Seconds of a step of `requests` requests in all, that have or prefill `tokens` each."""

    config: ModelConfig
    plan: Plan
    phase: Phase
    requests: int
    tokens: int
    seconds: float


def run_steps(mesh: Mesh, spec: MeshSpec, config: ModelConfig, phase: Phase, requests: int, tokens: int) -> Run:
    """The step of a model, `requests` on each rank of a mesh of dp and ep alone, each of `tokens`.

    In prefill all tokens are one chunk; in decode the last few of them are those that are decoded. Of several steps the
    one that a quarter are faster than counts: what else a machine does makes steps longer, for seconds at a time, and
    rates are read from what is left of one once the rest is predicted.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    plan = Plan(mesh=spec, dtype="float32" if on_cpu else "bfloat16", chunk=tokens, max_num_seqs=requests)
    programs, count = Programs(config, plan, mesh), spec.size * requests
    weights = _weights(programs)
    timed = (
        _decoding(programs, weights, count, tokens)
        if phase == "decode"
        else _prefills(programs, weights, count, tokens)
    )
    # The first one compiles.
    return Run(config, plan, phase, count, tokens, statistics.quantiles([*timed][1:], n=4)[0])


def _decoding(programs: Programs, weights: Weights, requests: int, tokens: int) -> Iterator[float]:
    session = _session(programs, weights, requests, tokens - _DECODED, tokens)
    latest = {request: token for chunk in session.prefill() for request, token in chunk.decoded.tokens.items()}
    for _ in range(_DECODED):
        start = time.perf_counter()
        latest = {request: token for one in session.decode(latest) for request, token in one.tokens.items()}
        yield time.perf_counter() - start


def _prefills(programs: Programs, weights: Weights, requests: int, tokens: int) -> Iterator[float]:
    for _ in range(_PREFILLED):
        session = _session(programs, weights, requests, tokens, tokens + 1)
        start = time.perf_counter()
        for chunk in session.prefill():
            jax.block_until_ready(chunk.output.token)
        yield time.perf_counter() - start


def _session(programs: Programs, weights: Weights, requests: int, tokens: int, room: int) -> Session:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, programs.config.vocab_size, tokens).tolist() for _ in range(requests)]
    return Session(programs, weights, prompts, [room] * requests, SamplingParams())


def _weights(programs: Programs) -> Weights:
    """Random, so that tokens go to all experts alike; norms among them."""
    arrays = {name: weight.abstract for name, weight in programs.weights.items()}
    shardings = {name: NamedSharding(programs.mesh, programs.weight_specs[name]) for name in arrays}

    def make() -> Weights:
        keys = jax.random.split(jax.random.key(0), len(arrays))
        return {
            name: (0.05 * jax.random.normal(key, array.shape, jnp.float32)).astype(array.dtype)
            for key, (name, array) in zip(keys, arrays.items(), strict=True)
        }

    made: Weights = jax.jit(make, out_shardings=shardings)()
    return made
