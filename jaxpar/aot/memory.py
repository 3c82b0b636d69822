"""The memory of a device that a compiled step takes, against what the device has."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    `weights`, `cache` (the pool of pages) and `inputs` (the step's other arguments: tokens, page tables, positions,
    what comes from the stage before) are exact, from shapes and PartitionSpecs. The rest is the compiler's: `padding`
    is what its layouts add to the arguments, `outputs` are those that take no argument's place (the cache takes its
    own), `code` is the program. `temporaries` is None of what was not compiled, since it cannot fit, or where the
    compiler gave up; `total` is then the least that it takes.
    """

    capacity: int
    weights: int
    cache: int
    inputs: int
    padding: int = 0
    temporaries: int | None = None
    outputs: int = 0
    code: int = 0
    used: int = 0
    """What the compiler says in all of a program that does not fit; 0: it does, or was not asked."""

    @property
    def total(self) -> int:
        """All of it."""
        known = self.weights + self.cache + self.inputs + self.padding + self.outputs + self.code
        return max(known + (self.temporaries or 0), self.used)

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


def used_of(message: str) -> int | None:
    """The bytes in all of a program that a compiler refuses for its memory; None for any other complaint."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    found = _USED.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0
