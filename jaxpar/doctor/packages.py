"""What is installed: versions, the extras of jaxpar, and the accelerators that programs can be compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Literal

from packaging.requirements import Requirement

from jaxpar.aot.targets import COMPILERS, compiler_problem

_SHOWN = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin",
          "jax-cuda13-pjrt", "jax-rocm7-plugin", "jax-rocm7-pjrt")  # fmt: skip
_OF_JAX = {"jaxlib": "", "libtpu": "tpu", "jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}

Find = Callable[[str], str | None]
State = Literal["installed", "other version", "not installed"]


@dataclass(frozen=True)
class Package:
    """An installed package; `wanted` are the versions that the installed JAX asks for, "" where it names none."""

    name: str
    version: str
    wanted: str
    matches: bool


@dataclass(frozen=True)
class Extra:
    """An extra of jaxpar, and what of it is missing or of another version than it asks for."""

    name: str
    state: State
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Compiler:
    """What compiles for a platform without a device of it, or the `problem` that stops it."""

    platform: str
    packages: tuple[str, ...]
    problem: str


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def find_packages(find: Find = installed) -> list[Package]:
    """JAX and what belongs to it, as far as it is installed."""
    found = []
    for name in _SHOWN:
        if (have := find(name)) is not None:
            wanted = [one for one in _wanted("jax", _OF_JAX[name]) if one.name == name] if name in _OF_JAX else []
            matches = all(one.specifier.contains(have, prereleases=True) for one in wanted)
            found.append(Package(name, have, str(wanted[0].specifier) if wanted else "", matches))
    return found


def find_extras(find: Find = installed) -> list[Extra]:
    """Every extra of jaxpar; none where jaxpar runs from its source without being installed."""
    if installed("jaxpar") is None:
        return []
    return [_extra(name, find) for name in metadata("jaxpar").get_all("Provides-Extra") or []]


def find_compilers() -> list[Compiler]:
    """The platforms of accelerators, and what `jaxpar compile` says of their compilers."""
    return [Compiler(platform, packages, compiler_problem(platform)) for platform, packages in COMPILERS.items()]


def _extra(name: str, find: Find) -> Extra:
    missing: list[str] = []
    others: list[str] = []
    for one in _of_extra("jaxpar", name):
        have = find(one.name)
        if have is None:
            missing.append(f"{one.name} is not installed")
        elif not one.specifier.contains(have, prereleases=True):
            others.append(f"{one.name} {have} is installed, and {one.specifier} asked for")
    state: State = "not installed" if missing else "other version" if others else "installed"
    return Extra(name, state, (*missing, *others))


def _of_extra(package: str, extra: str) -> Iterator[Requirement]:
    """What an extra asks for beside what the package asks for in any case, with the extras that it names in turn."""
    plain = {str(one) for one in _wanted(package, "")}
    for one in _wanted(package, extra):
        if str(one) not in plain:
            yield one
            for inner in one.extras:
                yield from _of_extra(one.name, inner)


def _wanted(package: str, extra: str) -> Iterator[Requirement]:
    """What a package asks for on this machine with an extra, or with none."""
    for text in requires(package) or []:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield one
