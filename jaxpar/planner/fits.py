"""Whether a model can fit on devices at all: its weights, each once, over all of them. No plan has less."""

from __future__ import annotations

import math

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.pipeline.balance import layer_work
from jaxpar.planner.assumptions import NUMBER_BYTES, Assumptions
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.rates import framework_of
from jaxpar.tables import counted, human_bytes


def parameters(config: ModelConfig) -> int:
    """Weights of all matrices: layers with every expert, the embedding, and the head where it has its own."""
    moe = config.moe
    total = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    for layer in range(config.num_hidden_layers):
        total += layer_work(config, layer)
        if moe is not None and moe.layers[layer]:
            others = moe.num_experts - moe.router.top_k
            total += 3 * config.hidden_size * moe.intermediate_size * others
    return total


def refuse_too_large(config: ModelConfig, cluster: Cluster, assumed: Assumptions) -> None:
    """Refuse a model whose weights alone are more than the devices have together.

    Raises:
        PlanError: with the bytes that a device would need and has, and how many devices would do.
    """
    weights = parameters(config) * NUMBER_BYTES[assumed.weight_dtype or config.dtype]
    each, device = weights / cluster.devices, cluster.device
    framework = framework_of(device, assumed)
    room = (1 - assumed.reserve) * device.memory_bytes - framework
    if room <= 0:
        raise PlanError(
            f"reserve={assumed.reserve:g} and framework_bytes={framework:g} leave nothing of "
            f"{human_bytes(device.memory_bytes)} a device of {cluster.name}: assume less, such as "
            "--assume framework_bytes=0"
        )
    if each > room:
        enough = math.ceil(weights / room)
        raise PlanError(
            f"the weights need {human_bytes(each)} a device on {counted(cluster.devices, 'device')} of {cluster.name}, "
            f"which have {human_bytes(room)} each besides reserve and runtime: {counted(enough, 'device')} or more "
            "would hold them"
        )
