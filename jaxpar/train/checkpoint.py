"""Fresh weights, and the checkpoint of a run: both are tensors by Hugging Face's names, whatever the mesh.

One safetensors file holds the weights, the optimizer's two moments ("mu.", "nu." before a tensor's name), the losses
so far, whose number is the number of steps, and in its header what the run is made of.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpar.checkpoint.files import one_line
from jaxpar.checkpoint.reader import TensorInfo
from jaxpar.checkpoint.save import write_tensors
from jaxpar.errors import CheckpointError, RequestError
from jaxpar.nn.weights import Weight

CHECKPOINT_FILE = "checkpoint.safetensors"
_RECIPE = "recipe"


class ArrayReader:
    """Tensors in memory (see TensorReader); `file` is what error messages name."""

    def __init__(self, tensors: Mapping[str, np.ndarray], file: Path) -> None:
        self._tensors, self._file = tensors, file

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and element type of a tensor."""
        if name not in self._tensors:
            raise CheckpointError(
                f"{self._file}: tensor {name} is missing among {len(self._tensors)} tensors; remove it to start anew"
            )
        return TensorInfo(self._tensors[name].shape, self._tensors[name].dtype, self._file)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of a tensor."""
        return self._tensors[name][index]

    def close(self) -> None:
        """Nothing is open."""


def fresh_tensors(weights: Mapping[str, Weight], seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors to start from: normal values of each weight's scale, ones for norms, zeros for biases.

    A tensor's values depend on its name and `seed` alone, so that every mesh starts from the same model.
    """
    tensors = {}
    for weight in weights.values():
        for name, shape in weight.tensors.items():
            if isinstance(weight.init, str):
                tensors[name] = np.full(shape, {"ones": 1, "zeros": 0}[weight.init], np.float32)
            else:
                random = np.random.default_rng((seed, zlib.crc32(name.encode())))
                tensors[name] = random.standard_normal(shape, np.float32) * np.float32(weight.init)
    return tensors


@dataclass(frozen=True)
class RunCheckpoint:
    """A run after some steps: tensors by name, and the training and validation losses up to there, in nats."""

    weights: Mapping[str, np.ndarray]
    mu: Mapping[str, np.ndarray]
    nu: Mapping[str, np.ndarray]
    losses: list[float]
    validation: list[float]


def write_checkpoint(path: Path, checkpoint: RunCheckpoint, recipe: Mapping[str, Any]) -> None:
    """Replace the run's checkpoint, whose directory is made if need be.

    `recipe` is what must be the same when the run goes on.
    """
    tensors = {
        **checkpoint.weights,
        **{f"mu.{name}": value for name, value in checkpoint.mu.items()},
        **{f"nu.{name}": value for name, value in checkpoint.nu.items()},
        "losses": np.array(checkpoint.losses, np.float32),
        "validation": np.array(checkpoint.validation, np.float32),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors, {_RECIPE: json.dumps(recipe)})


def read_checkpoint(path: Path, recipe: Mapping[str, Any]) -> RunCheckpoint:
    """The checkpoint that `write_checkpoint` wrote.

    Raises:
        CheckpointError: the file is no such checkpoint.
        RequestError: it is that of another run; names the first difference.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            written = json.loads((file.metadata() or {})[_RECIPE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        losses, validation = (tensors.pop(name).tolist() for name in ("losses", "validation"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not the checkpoint of a training run ({one_line(error)}): remove it to start anew"
        ) from error
    for key in {**recipe, **written}:
        if written.get(key) != recipe.get(key):
            raise RequestError(
                f"{path} is that of a run with {key}={written.get(key)}, not {recipe.get(key)}: "
                f"give the same options to go on with it, or another directory"
            )

    def moments(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    return RunCheckpoint(tensors, moments("mu."), moments("nu."), losses, validation)
