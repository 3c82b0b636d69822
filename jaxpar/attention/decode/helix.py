"""`helix`: attention as `q_replicated`, then the output projection and the dense FFN over (cp, tp) together.

    attention   keys over cp, heads over tp           all-to-all over cp     (Helix Parallelism, arXiv:2507.07120)
    out, FFN    width over cp x tp                    all-reduce over (cp, tp)

Without it the ranks of cp compute the same FFN cp times. With it none idles, and each reads a slice of the FFN's
weights. Nothing more is stored: all ranks of cp hold the same tp shard of every weight, because prefill needs it
whole; a decode step reads its slice of that (copied on CPU, where it lies on accelerators: `kernels/dense.py`). So FFN
and output projection are stored cp times, as under every strategy, and read once. Experts are not sliced: a slice of
the width of each of them could only be copied. They take a share of the tokens, or are split over cp themselves.
"""

from __future__ import annotations

from jaxpar.attention.decode.exchange import exchange_traffic
from jaxpar.attention.decode.q_replicated import run
from jaxpar.ledger.traffic import Traffic
from jaxpar.strategies import Step, Strategy


def traffic(step: Step) -> list[Traffic]:
    """An all-to-all of partial results in each layer; the sums over (cp, tp) belong to `all_reduce`."""
    return exchange_traffic(step, "helix")


def check(step: Step) -> str | None:
    """Any heads and widths: where cp does not divide them the last ranks have less."""
    return None


STRATEGY = Strategy(
    name="helix",
    sublayer="decode_attention",
    axes=("cp",),
    collectives=("all_to_all",),
    needs="any heads and FFN width",
    run=run,
    traffic=traffic,
    check=check,
)
