"""The memory of a device that a compiled step takes, against what the device has."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

_NEEDED = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    `weights`, `cache` (the pool of pages) and `inputs` (the step's other arguments: tokens, page tables, positions,
    what comes from the stage before) are exact, from shapes and PartitionSpecs. The rest is the compiler's: `padding`
    is what its layouts add to the arguments, `outputs` are those that take no argument's place (the cache takes its
    own), `code` is the program. Of a program that the compiler refuses for its memory only `temporaries` is known.
    `temporaries` is None of what was not compiled, since weights and cache alone do not fit.
    """

    capacity: int
    weights: int
    cache: int
    inputs: int
    padding: int = 0
    temporaries: int | None = None
    outputs: int = 0
    code: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        compiled = self.padding + (self.temporaries or 0) + self.outputs + self.code
        return self.weights + self.cache + self.inputs + compiled

    @property
    def fits(self) -> bool:
        """Whether the device holds it. A device's runtime takes some memory, too, of which no compiler knows."""
        return self.total <= self.capacity

    @property
    def largest(self) -> str:
        """The name of the item that takes most: weights, cache or temporaries."""
        left = self.total - self.weights - self.cache
        sizes = {"weights": self.weights, "cache": self.cache, "temporaries": left}
        return max(sizes, key=lambda name: sizes[name])

    def to_json(self) -> dict[str, Any]:
        """Every item in bytes."""
        return asdict(self) | {"total": self.total, "fits": self.fits, "largest": self.largest}


def needed_of(message: str) -> int | None:
    """Bytes for which a compiler refuses a program, None for any other complaint.

    XLA:TPU calls them temporaries; arguments are among them.
    """
    found = _NEEDED.search(message) if "RESOURCE_EXHAUSTED" in message else None
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
