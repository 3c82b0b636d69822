"""The calibration as a preset: a TOML file that is whole or not there."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxpar.calibrate.result import Calibration
from jaxpar.errors import JaxparError
from jaxpar.links import Fit
from jaxpar.presets import DeviceKind
from jaxpar.whole_file import written_whole


def check_writable(path: Path) -> None:
    """Refuse a path before anything is measured.

    Raises:
        JaxparError: not a .toml file, or one that cannot be written.
    """
    if path.suffix != ".toml":
        raise JaxparError(f"{path}: a preset is a .toml file, such as {path.stem or 'mine'}.toml")
    if path.exists() and not path.is_file():
        raise JaxparError(f"{path} is not a file: name one that can be written")
    if not path.parent.is_dir():
        raise JaxparError(f"{path}: there is no folder {path.parent}: make it, or name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise JaxparError(f"{path} cannot be written: name another file")


def write_preset(calibration: Calibration, path: Path, description: str) -> None:
    """Write the preset; an older file is replaced only when the new one is whole.

    Raises:
        JaxparError: the file cannot be written.
    """
    try:
        with written_whole(path) as part:
            part.write_text(to_toml(calibration, description), encoding="utf-8")
    except OSError as error:
        raise JaxparError(f"{path} cannot be written: {error.strerror or error}; name another file") from error


def to_toml(calibration: Calibration, description: str) -> str:
    """The preset's text; what has its default is left out."""
    spec, device = calibration.mesh, calibration.device
    lines = [f"description = {_value(description)}", f"experts_over = {_value(list(calibration.experts_over))}"]
    lines += ["", "[mesh]", *(f"{axis} = {spec.sizes[axis]}" for axis in spec.active(spec.sizes) or ("tp",))]
    lines += ["", "[device]"]
    lines += [
        f"{one.name} = {_value(getattr(device, one.name))}"
        for one in fields(DeviceKind)
        if one.name != "fits" and getattr(device, one.name) not in (one.default, {})
    ]
    for fit in device.fits:
        lines += ["", *_fit(fit)]
    return "\n".join(lines) + "\n"


def _fit(fit: Fit) -> list[str]:
    lines = [list(line) for line in fit.lines]
    values = {"collective": fit.collective, "ranks": fit.ranks, "level": fit.level, "lines": lines, "error": fit.error}
    return ["[[device.fits]]", *(f"{key} = {_value(value)}" for key, value in values.items())]


def _value(value: Any) -> str:
    """As TOML writes it: texts and numbers are those of JSON, tables are in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)
