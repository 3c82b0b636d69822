"""What steps and kernels take besides their work: models with next to no work run their real decode steps.

2 layers of width 64    step overhead +  (kernels of 1 layer)  x kernel overhead  +  a little work
8 layers of width 64    step overhead +  (kernels of 4 layers) x kernel overhead  +  a little work
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs, Weights

LAYERS = (1, 4)
"""Of the models that are run."""

_PROMPT = [1] * 16


@dataclass(frozen=True)
class DecodeSteps:
    """Seconds of a decode step of a narrow model, one request a replica, and what ran."""

    config: ModelConfig
    plan: Plan
    requests: int
    seconds: float


def narrow_steps(mesh: Mesh, spec: MeshSpec, layers: int, steps: int = 15) -> DecodeSteps:
    """The median step of a model of so many narrow layers, a replica on every device of `mesh`."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    plan = Plan(mesh=spec, dtype="float32" if on_cpu else "bfloat16")
    config = _narrow(layers, plan.dtype)
    programs, requests = Programs(config, plan, mesh), spec.size
    session = Session(
        programs, _weights(programs), [_PROMPT] * requests, [len(_PROMPT) + steps + 2] * requests, SamplingParams()
    )
    latest = {request: token for chunk in session.prefill() for request, token in chunk.decoded.tokens.items()}
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        latest = {request: token for one in session.decode(latest) for request, token in one.tokens.items()}
        seconds.append(time.perf_counter() - start)
    # The first one compiles.
    return DecodeSteps(config, plan, requests, statistics.median(seconds[1:]))


def _narrow(layers: int, dtype: str) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope=RopeConfig(),
        windows=(None,) * layers,
        dtype=dtype,
    )


def _weights(programs: Programs) -> Weights:
    """All alike; no time depends on them."""
    arrays = {name: weight.abstract for name, weight in programs.weights.items()}
    shardings = {name: NamedSharding(programs.mesh, programs.weight_specs[name]) for name in arrays}

    def make() -> Weights:
        return {name: jnp.full(array.shape, 0.01, array.dtype) for name, array in arrays.items()}

    made: Weights = jax.jit(make, out_shardings=shardings)()
    return made
