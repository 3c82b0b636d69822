"""What a calibration has found: rates, fits, and the device kind that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxpar.calibrate.fit import fit_lines
from jaxpar.links import Fit, Level
from jaxpar.mesh import MeshSpec
from jaxpar.presets import PRODUCTS, DeviceKind


@dataclass(frozen=True)
class Rate:
    """What one rank reaches while all others work, too: FLOP/s of a product of `size`, or bytes per second.

    `what` is a dtype for square products, "triad" (arrays of `size` bytes) or "weights" (one row times a square matrix
    of `size` bytes).
    """

    what: str
    size: int
    seconds: float
    rate: float


@dataclass(frozen=True)
class Sample:
    """Seconds of one call of a collective for each size of a rank's operand in bytes, and the lines through them."""

    collective: str
    ranks: int
    level: Level
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    fit: Fit

    @classmethod
    def of(cls, collective: str, ranks: int, level: Level, sizes: Sequence[int], seconds: Sequence[float]) -> Sample:
        """With its fit."""
        lines, error = fit_lines(sizes, seconds)
        fit = Fit(collective, ranks, level, tuple((_rounded(a), _rounded(b)) for a, b in lines), _rounded(error))
        return cls(collective, ranks, level, tuple(sizes), tuple(seconds), fit)

    @property
    def misses(self) -> tuple[float, ...]:
        """By which part the fit is above (or, below 0, under) what was measured, size by size."""
        return tuple(
            self.fit.seconds(size, self.ranks) / taken - 1 for size, taken in zip(self.sizes, self.seconds, strict=True)
        )


@dataclass(frozen=True)
class Overheads:
    """Seconds that no work explains: of a step, and of each kernel in it."""

    step: float = 0.0
    kernel: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Everything that was measured on the devices of `mesh`; `base` says what nobody measures."""

    mesh: MeshSpec
    experts_over: tuple[str, ...]
    base: DeviceKind
    rates: tuple[Rate, ...]
    samples: tuple[Sample, ...]
    overheads: Overheads = Overheads()
    reached: Mapping[str, float] = field(default_factory=dict)
    """Efficiencies of attention, of reading the cache and of experts, where they were measured."""

    @property
    def device(self) -> DeviceKind:
        """The kind, calibrated: peaks are those of `base` or what was measured where that is more."""
        best = {what: max(rate.rate for rate in self.rates if rate.what == what) for what in self._measured}
        products = {dtype: best[dtype] for dtype in PRODUCTS if dtype in best}
        peak = max(self.base.peak_bf16_flops, *(rate for dtype, rate in products.items() if dtype != "fp8"))
        of_fp8 = max(self.base.peak_fp8_flops, products.get("fp8", 0.0))
        bandwidth = max(self.base.memory_bandwidth, best["triad"], best["weights"])
        return replace(
            self.base,
            peak_bf16_flops=_rounded(peak),
            peak_fp8_flops=_rounded(of_fp8),
            efficiency={
                dtype: min(1.0, _rounded(rate / (of_fp8 if dtype == "fp8" else peak)))
                for dtype, rate in products.items()
            }
            | {part: _rounded(value) for part, value in self.reached.items()},
            memory_bandwidth=_rounded(bandwidth),
            memory_efficiency=min(1.0, _rounded(best["weights"] / bandwidth)),
            step_overhead=_rounded(self.overheads.step),
            kernel_overhead=_rounded(self.overheads.kernel),
            fits=tuple(sample.fit for sample in self.samples),
        )

    @property
    def _measured(self) -> Mapping[str, None]:
        return dict.fromkeys(rate.what for rate in self.rates)

    def to_json(self) -> dict[str, Any]:
        """The device kind and everything that was measured, as plain data."""
        return {
            "mesh": self.mesh.sizes,
            "device": asdict(self.device),
            "rates": [asdict(rate) for rate in self.rates],
            "collectives": [asdict(sample) | {"misses": sample.misses} for sample in self.samples],
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
