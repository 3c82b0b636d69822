"""Questions that tests of the planner ask."""

from __future__ import annotations

from functools import cache
from typing import Any

from jaxpar.assets import model_dir
from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.evaluate import Evaluator, Question
from jaxpar.planner.search import Found, search
from jaxpar.planner.workload import Targets, Workload


def config_of(model: str) -> ModelConfig:
    return open_checkpoint(model_dir(model)).config


def question(
    model: str = "llama-3-70b",
    cluster: str = "h200-8",
    ttft: float | None = None,
    tpot: float | None = None,
    objective: str = "throughput",
    assumed: Assumptions | None = None,
    loads: Any = None,
    **workload: Any,
) -> Question:
    asked = Workload(**{"input": 4000, "output": 500, **workload})
    targets = Targets(ttft, tpot)
    return Question(
        config_of(model), Cluster.parse(cluster), asked, targets, assumed or Assumptions(), objective, loads
    )


@cache
def found(**asked: Any) -> Found:
    return search(Evaluator(question(**asked)))
