"""What a program is compiled for: a slice of TPUs or nodes of GPUs, described and not present.

    v5p:2x2x4      a TPU slice, chips along each dimension of its torus
    h200:1x4x8     slices x hosts x GPUs of a host

The compilers are XLA's own, from packages of their own: libtpu, and the CUDA plugin, which needs no driver, and of CUDA
the assembler (ptxas) and the device library that nvcc comes with.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpar.aot.kinds import GPUS, gpu_target_config
from jaxpar.devices import make_mesh
from jaxpar.errors import MeshError
from jaxpar.kinds import DEVICES_A_CHIP, KINDS, SIDES
from jaxpar.mesh import MAX_RANKS, MeshSpec
from jaxpar.presets import DeviceKind
from jaxpar.values import shown

Platform = Literal["tpu", "gpu"]

CUDA = Path("/usr/local/cuda")
"""Where CUDA itself is installed."""

COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda13-plugin")}
"""The packages that compile for a platform."""

_EXAMPLES = "write v5p:2x2x4 (chips of a TPU slice) or h200:1x4x8 (slices x hosts x GPUs of a host)"

# Compilers read these when they are loaded. libtpu would ask Google's metadata server which TPU it is on, keep a lock
# against a second process, and write logs to /tmp; both would write to standard error.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Target:
    """Devices that programs compile for: `name` is one of `aot.kinds`, `shape` what stands after it."""

    name: str
    shape: tuple[int, int, int]

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read "v5p:2x2x4" or "h200:1x4x8".

        Raises:
            MeshError: an unknown kind, or a shape that it does not come in.
        """
        name, _, written = text.strip().lower().partition(":")
        if name not in SIDES and name not in GPUS:
            raise MeshError(f"target {shown(text)}: unknown kind; use {', '.join([*SIDES, *GPUS])}: {_EXAMPLES}")
        if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){1,2}", written):
            raise MeshError(f"target {shown(text)}: {shown(written)} is no shape; {_EXAMPLES}")
        sizes = [int(size) for size in written.split("x")]
        dimensions = SIDES.get(name, 3)
        if len(sizes) != dimensions:
            example = "x".join(["4"] * dimensions)
            raise MeshError(f"target {shown(text)}: {name} has {dimensions} dimensions; write {name}:{example}")
        if math.prod(sizes) > MAX_RANKS:
            raise MeshError(f"target {shown(text)} has more than {MAX_RANKS} devices: use a smaller one")
        return cls(name, (*sizes, *[1] * (3 - len(sizes))))  # type: ignore[arg-type]

    @property
    def platform(self) -> Platform:
        """The compiler that it takes: "tpu" or "gpu"."""
        return "tpu" if self.name in SIDES else "gpu"

    @property
    def kind(self) -> DeviceKind:
        """What one of its devices can do; a node is a TPU slice, or a host's GPUs."""
        return replace(KINDS[self.name], devices_per_node=self.size if self.platform == "tpu" else self.shape[2])

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(self.shape) * self._devices_a_chip

    @property
    def plan_fields(self) -> dict[str, Any]:
        """What a plan takes over unless it is asked for something else, as from a preset."""
        return {"devices_per_node": self.kind.devices_per_node, "links": self.kind.links}

    @cached_property
    def devices(self) -> list[Any]:
        """Its devices, for which JAX compiles; none of them is present.

        Raises:
            MeshError: the compiler's package is not installed or not of JAX's version, or it has no such topology.
        """
        require_compiler(self)
        # Importing JAX sets TF_CPP_MIN_LOG_LEVEL to 1.
        os.environ.update({name: value for name, value in _QUIET.items() if os.environ.get(name, "1") == "1"})
        jax.config.update("jax_platforms", "cpu")
        options: Mapping[str, str] = {"topology_name": str(self)}
        if self.platform == "gpu":
            options = {"topology": "x".join(map(str, self.shape)), "target_config": gpu_target_config(GPUS[self.name])}
        try:
            topology = topologies.get_topology_desc(platform={"gpu": "cuda"}.get(self.platform, "tpu"), **options)
        except Exception as error:  # JaxRuntimeError, whose type JAX moves about
            reason = str(error).splitlines()[0]
            raise MeshError(f"target {self}: the compiler has no such topology ({reason}); {_EXAMPLES}") from error
        return list(topology.devices)

    def mesh(self, spec: MeshSpec) -> Mesh:
        """Lay its devices out as `spec`; a smaller mesh takes the first ones.

        Raises:
            MeshError: the mesh has more ranks than the target devices, or see `devices`.
        """
        self.check(spec)
        return make_mesh(spec, self.devices[: spec.size])

    def check(self, spec: MeshSpec) -> None:
        """Raise MeshError if the mesh has more ranks than the target devices; nothing is loaded."""
        if spec.size > self.size:
            raise MeshError(
                f"mesh {spec} needs {spec.size} devices and target {self} has {self.size}: "
                "use a smaller mesh, or a larger target"
            )

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return f"{self.name}:{'x'.join(map(str, self.shape[: SIDES.get(self.name, 3)]))}"

    @property
    def _devices_a_chip(self) -> int:
        return DEVICES_A_CHIP.get(self.name, 1)


def require_compiler(target: Target) -> None:
    """Raise MeshError if the target's compiler is not installed, or not of JAX's version; nothing is loaded."""
    if problem := compiler_problem(target.platform):
        raise MeshError(problem)


def compiler_problem(platform: str) -> str:
    """What stops compiling for "tpu" or "gpu", and what would help; "" if nothing does. Nothing is loaded."""
    extra = {"tpu": "tpu", "gpu": "gpu-compile"}[platform]
    for package in COMPILERS[platform]:
        try:
            found = version(package)
        except PackageNotFoundError:
            return (
                f"{package}, the compiler, is not installed: pip install 'jaxpar[{extra}]' (no accelerator is needed)"
            )
        if platform == "gpu" and found != (wanted := version("jax")):
            return (
                f"{package} {found} does not go with JAX {wanted}, which takes only its own version: "
                f"pip install {package}=={wanted}"
            )
    if platform == "gpu" and not _cuda_tools():
        return (
            "ptxas and libdevice, CUDA's assembler and device library, are not installed, and XLA:GPU crashes without: "
            "pip install 'jaxpar[gpu-compile]' (nvidia-cuda-nvcc, nvidia-nvvm), or CUDA 13 in /usr/local/cuda"
        )
    return ""


def _cuda_tools() -> bool:
    """Whether ptxas and libdevice are where JAX looks: in NVIDIA's packages first, then in CUDA's own place."""
    packages = find_spec("nvidia")
    roots = [Path(where) / "cu13" for where in (packages and packages.submodule_search_locations) or ()]
    return any(
        (root / "bin" / "ptxas").exists() and (root / "nvvm" / "libdevice" / "libdevice.10.bc").exists()
        for root in [*roots, CUDA]
    )
