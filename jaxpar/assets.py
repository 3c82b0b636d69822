"""Where the bundled meshes and models lie: beside the code in an installed wheel, at the top of a source checkout."""

from __future__ import annotations

import os
from pathlib import Path

from jaxpar.errors import CheckpointError
from jaxpar.values import shown


def mesh_dir() -> Path:
    """Folder of the bundled mesh presets, one TOML file each."""
    return _data_dir() / "meshes"


def model_names() -> tuple[str, ...]:
    """Names of the bundled models: trained ones, and bare `config.json` cards for planning."""
    return tuple(sorted(path.parent.name for path in (_data_dir() / "models").glob("*/config.json")))


def model_dir(name: str | os.PathLike[str]) -> Path:
    """Path of a model: a bundled model's name, a model directory, or a single model file.

    A bundled name wins over a folder of the same name in the working directory; `./name` is always the folder.

    Raises:
        CheckpointError: there is neither; the message lists the bundled names. Or it is no name at all.
    """
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"model={shown(name)}: give a model directory, a GGUF file, or a bundled model's name")
    text = os.fspath(name)
    if text in model_names():
        return _data_dir() / "models" / text
    if text and os.path.exists(text):
        return Path(text)
    raise CheckpointError(
        f"no model {text!r}: it is neither a directory or file here nor a bundled model ({', '.join(model_names())})"
    )


def _data_dir() -> Path:
    package = Path(__file__).parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent
