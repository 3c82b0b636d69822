"""`int8`: a two-shot sum in whole numbers of -127 to 127, a float32 scale for up to 128: about a byte for each value.

                     blocks of 128 values -> 128 codes, 1 scale
rank 0: a0 b0        all-to-all             a0 + a1        all-gather    ->    a b
rank 1: a1 b1        of codes               b0 + b1        of codes      ->    a b       (collectives/quantized.py)

Codes are evenly spaced, so that a block's largest value sets the error of all of it: at most 1/254 of it, twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.collectives.quantized import Codes, quantized
from jaxpar.collectives.reduction import Reduction, sublayers_traffic
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def _encode(scaled: jax.Array) -> jax.Array:
    return jnp.round(scaled).astype(jnp.int8)


REDUCTION = quantized(Codes("int8", jnp.int8, 127.0, _encode, error=0.5))


def run(plan: Plan) -> Reduction:
    """Codes out, float32 sums, codes back; and each half alone."""
    return REDUCTION


def traffic(step: Step) -> list[Traffic]:
    """2 (P-1)/P of 132 bytes for each 128 values of a row, or a little more, twice a layer."""
    return sublayers_traffic(step, REDUCTION)


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes."""
    return None


STRATEGY = Strategy(
    name="int8",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("all_to_all", "all_gather"),
    needs="any shape; results are rounded to 8 bits",
    run=run,
    traffic=traffic,
    check=check,
    # Measured: SmolLM2-135M 19.5 % (docs/reductions.md), a small MoE whose experts change 11.9 %.
    lossy=0.25,
)
