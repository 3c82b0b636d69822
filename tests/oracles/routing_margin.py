"""How far the tokens of an oracle are from being routed otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def routing_margins(model: PreTrainedModel) -> Iterator[list[float]]:
    """A list that fills, in the block, with the smallest margin of every call of every router of `model`."""
    margins: list[float] = []

    def keep(router: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        margins.append(float(margin(router, outputs[0])))

    hooks = [
        module.register_forward_hook(keep)
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


def margin(router: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """The smallest gap, over tokens `logits` [T, E], between the last that is chosen and the first that is not.

    Of experts, and of groups where the choice is limited to some.
    """
    if hasattr(router, "e_score_correction_bias"):
        scores, best = logits.sigmoid() + router.e_score_correction_bias, 2
    else:
        scores, best = logits.softmax(-1), 1
    if getattr(router, "topk_method", "group_limited_greedy") != "group_limited_greedy":
        return gap(scores, router.top_k)
    groups, kept = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
    if groups == kept:
        return gap(scores, router.top_k)
    grouped = scores.view(len(scores), groups, -1)
    of_groups = grouped.topk(best).values.sum(-1)
    of_experts = grouped[torch.arange(len(scores))[:, None], of_groups.topk(kept).indices].flatten(1)
    return torch.minimum(gap(of_groups, kept), gap(of_experts, router.top_k))


def gap(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The smallest difference, over rows, of the score at place `count` and the next."""
    ordered = scores.sort(descending=True).values
    return (ordered[:, count - 1] - ordered[:, count]).min()
