"""How much fuller the fullest rank of experts is than the mean, from loads that were measured."""

from __future__ import annotations

import numpy as np

from jaxpar.moe.balance import device_loads, over_mean, place
from jaxpar.moe.slots import experts_in_slots


def imbalance(loads: np.ndarray, ranks: int, slots: int = 0) -> float:
    """The fullest rank's load over the mean, averaged over layers, whose times add up.

    Args:
        loads: of experts [MoE layers, experts].
        ranks: that the experts are split over.
        slots: of all ranks, those left over with copies of hot experts (`jaxpar balance`); 0: each lies once, in order.

    Raises:
        PlanError: slots that cannot be.
    """
    if ranks == 1:
        return 1.0
    if slots:
        of_ranks = place(loads, slots, ranks).device_loads
    else:
        in_order = np.array(experts_in_slots(loads.shape[1], ranks))
        of_ranks = device_loads(loads, np.tile(in_order, (len(loads), 1)), ranks)
    return float(over_mean(of_ranks).max(axis=1).mean())
