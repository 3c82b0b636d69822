"""What attention and experts reach of what products and memory do, from real steps of one layer of a bundled card.

Experts lie over all devices: what sorting rows, packing them and finding their way back takes besides the messages
themselves counts as theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxpar.assets import model_dir
from jaxpar.calibrate.steps import Run
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.ledger.steps import make_steps
from jaxpar.plan import Phase
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.timing import step_time
from jaxpar.presets import DeviceKind

_LEAST = 1e-3


class Trial(NamedTuple):
    """A step that shows what a part of it reaches: `efficiency` is what a preset calls it.

    All devices are on `axis`: replicas, or experts over all of them.
    """

    efficiency: str
    axis: str
    card: str
    phase: Phase
    requests: int
    tokens: int

    @property
    def config(self) -> ModelConfig:
        """One layer of the card."""
        return read_config(model_dir(self.card)).of_layers(slice(-1, None))


def trials(on_cpu: bool) -> Iterator[Trial]:
    """Small ones for a CPU; requests are those of a replica."""
    dense, experts = ("tiny", "tiny-moe") if on_cpu else ("llama-3.1-8b", "qwen3-235b-a22b")
    prompt, lanes, context = (512, 16, 512) if on_cpu else (8192, 32, 4096)
    yield Trial("attention", "dp", dense, "prefill", 1, prompt)
    yield Trial("cache", "dp", dense, "decode", lanes, context)
    yield Trial("experts", "ep", experts, "prefill", 1, prompt)


def efficiency_of(trial: Trial, run: Run, device: DeviceKind) -> float:
    """The efficiency of the trial's part with which the planner's time of the step is the one of `run`."""
    step = make_steps(run.config, run.plan, run.phase, run.requests, run.tokens)[-1]

    def predicted(efficiency: float) -> float:
        so = replace(device, efficiency={**device.efficiency, trial.efficiency: efficiency})
        return step_time(step, so, Assumptions(overlap=0.0)).seconds

    low, high = _LEAST, 1.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted(middle) > run.seconds else (low, middle)
    return high
