"""Programs compiled for a target, kept in a folder: what the compiler made, to be read as often as is liked."""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Program:
    """The text of a compiled program, the bytes of a device, and the compiler's own estimate where it makes one.

    `arguments` are weights, cache and batch as they lie in memory, `aliased` those of them that are written in place;
    `seconds` is `optimal_seconds`, 0 where there is none.
    """

    text: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    seconds: float

    @property
    def total(self) -> int:
        """What a device needs for it, apart from its instructions."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @classmethod
    def of(cls, compiled: Any) -> Program:
        """A `jax.stages.Compiled`."""
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        return cls(
            compiled.as_text(),
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            max(float(cost.get("optimal_seconds", 0.0)), 0.0),
        )


class Kept:
    """Compiled programs in a folder, each under a name; what is there is not compiled again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def has(self, name: str) -> bool:
        """Whether it is there, made by this version of JAX."""
        return self._path(name).exists()

    def program(self, name: str, compiled: Callable[[], Any]) -> tuple[Program, float]:
        """The program of that name, compiled if it is not there -> and the seconds that compiling it took."""
        path = self._path(name)
        if not path.exists():
            start = time.perf_counter()
            made = Program.of(compiled())
            document = {"name": name, "took": time.perf_counter() - start, "program": asdict(made)}
            part = path.with_suffix(".part")
            part.write_bytes(gzip.compress(json.dumps(document).encode(), 5))
            part.replace(path)
        document = json.loads(gzip.decompress(path.read_bytes()))
        return Program(**document["program"]), document["took"]

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(f"{name} jax {version('jax')}".encode()).hexdigest()
        return self._folder / f"{digest[:24]}.json.gz"
