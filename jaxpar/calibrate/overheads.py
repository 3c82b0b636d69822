"""What steps and kernels take besides their work: models with next to no work run their real decode steps.

1 layer of width 64     step overhead +  (kernels of 1 layer)  x kernel overhead  +  a little work
8 layers of width 64    step overhead +  (kernels of 8 layers) x kernel overhead  +  a little work
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpar.calibrate.result import Overheads
from jaxpar.calibrate.steps import Run
from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.ledger.steps import make_steps
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.timing import step_time
from jaxpar.presets import DeviceKind

LAYERS = (1, 8)
"""Of the models that are run."""


def overheads(device: DeviceKind, runs: Sequence[Run]) -> Overheads:
    """What is left of the times of two models once the planner has predicted the rest, for `device`."""
    rests, kernels = [], []
    for run in runs:
        (step,) = make_steps(run.config, run.plan, "decode", run.requests, run.tokens)
        work, more = (
            step_time(step, device, Assumptions(kernel_overhead=each, step_overhead=0.0)).seconds for each in (0.0, 1.0)
        )
        rests.append(run.seconds - work)
        kernels.append(more - work)
    kernel = max(0.0, (rests[1] - rests[0]) / (kernels[1] - kernels[0]))
    return Overheads(max(0.0, rests[0] - kernel * kernels[0]), kernel)


def narrow(layers: int) -> ModelConfig:
    """A model of so many layers with next to no work in them."""
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
        dtype="float32",
    )
