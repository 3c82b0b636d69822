"""The files of a model directory, which is not trusted: paths stay inside it and sizes are checked before reading."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePath
from typing import Any

from jaxpar.errors import CheckpointError

MAX_TEXT_BYTES = 256 << 20
"""Largest JSON or template file that is read; the largest tokenizer.json in use holds about 35 MB."""


def path_inside(directory: Path, name: str) -> Path:
    """The path of file `name` of a model directory, checked not to lead out of it; the file need not exist.

    A symlink may lead to another file of the directory or, in the Hugging Face cache (`snapshots/<revision>/name` ->
    `blobs/<hash>`), to the blobs of the same repository. Anything else could read any file of this machine.

    Raises:
        CheckpointError: if `name` is absolute, climbs with "..", or is a symlink that leads elsewhere.
    """
    relative = PurePath(name)
    if not name or "\0" in name or relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(
            f"{directory}: file name {name!r} leads outside the model directory; put the file into it"
        )
    try:
        root = directory.resolve()
        target = (root / relative).resolve()
    except (OSError, RuntimeError) as error:  # a loop of symlinks
        raise CheckpointError(f"{directory / name}: {one_line(error)}; copy the file into the directory") from error
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{directory / name} is a symlink to {target}, outside the model directory; copy the file into it"
        )
    return directory / relative


def file_size(path: Path) -> int:
    """Size of a regular file in bytes.

    Raises:
        CheckpointError: if there is no such file, or it is a directory, a pipe or a device.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; fetch the model again")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file; put the file there")
    return path.stat().st_size


def read_text(path: Path) -> str:
    """Text of a small UTF-8 file.

    Raises:
        CheckpointError: if it is absent, unreadable, larger than `MAX_TEXT_BYTES`, or not UTF-8.
    """
    size = file_size(path)
    if size > MAX_TEXT_BYTES:
        raise CheckpointError(f"{path}: {size} bytes, expected at most {MAX_TEXT_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as text ({one_line(error)}); fetch it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CheckpointError: as `read_text`, or if the text is not a JSON object.
    """
    return parse_json(read_text(path), path)


def parse_json(text: str | bytes, source: Path) -> dict[str, Any]:
    """The JSON object that `text`, found in file `source`, holds.

    Raises:
        CheckpointError: if it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not valid JSON ({one_line(error)}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} holds a JSON {type(value).__name__}, expected an object")
    return value


def one_line(error: BaseException) -> str:
    """What an exception of another library says, on one line."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return " ".join(str(error).split()) or type(error).__name__
