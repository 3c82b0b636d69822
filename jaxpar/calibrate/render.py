"""What was measured as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType

from jaxpar.calibrate.result import Calibration
from jaxpar.tables import human_bytes, table


def render(calibration: Calibration) -> Group:
    """Rates of a rank, then every fit with what it misses."""
    device = calibration.device
    rates = [
        (
            {"triad": "memory, triad", "weights": "memory, one row times weights"}.get(
                rate.what, f"{rate.what} products"
            ),
            human_bytes(rate.size) if rate.what in ("triad", "weights") else f"{rate.size} x {rate.size}",
            f"{rate.rate / 1e9:.4g}",
            "GB/s" if rate.what in ("triad", "weights") else "GFLOP/s",
        )
        for rate in calibration.rates
    ]
    fits = [
        (
            sample.collective,
            sample.level,
            sample.ranks,
            ", ".join(f"{1e6 * alpha:.3g}" for alpha, _ in sample.fit.lines),
            ", ".join(f"{1e-9 / beta:.3g}" if beta else "-" for _, beta in sample.fit.lines),
            f"{sample.fit.error:.1%}",
            f"{max(sample.misses, key=abs):+.1%}",
        )
        for sample in calibration.samples
    ]
    columns = ("collective", "groups", "ranks", "alpha us", "1/beta GB/s", "off by", "most")
    parts: list[RenderableType] = [
        table(
            f"What a rank reaches while all {calibration.mesh.size} work ({device.kind})", ("", "size", "", ""), rates
        ),
        "",
        f"Besides its work a step takes {1e6 * device.step_overhead:.4g} us, and each kernel in it "
        f"{1e6 * device.kernel_overhead:.4g} us",
        "; ".join(
            f"{part} reach{'es' * (part != 'experts')} {value:.1%}" for part, value in calibration.reached.items()
        ),
    ]
    if fits:
        parts += ["", table("A call of a collective: alpha + its operand's bytes times beta", columns, fits, left=2)]
    return Group(*parts)
