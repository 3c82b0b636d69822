"""Host memory that loading takes: a checkpoint of over 1 GB onto 8 faked devices, each load in a process of its own.

python -m benchmarks.load_memory

Faked devices keep their arrays in host memory, so those are subtracted: what is left is what loading needs besides, on
top of the process as it stands with JAX started. It may be one slice of a weight and one tensor, not the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxpar
from benchmarks.common import Spread, arguments, draw_bars, show, write
from benchmarks.random_model import llama, random_tensor, tensor_shapes
from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.reader import TensorReader
from jaxpar.checkpoint.save import config_document
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.tables import human_bytes

MESHES = ("tp=8", "dp=2,tp=4")
DTYPES = ("bfloat16", "float32")
FILE_BYTES = 300 << 20
"""A checkpoint file is closed when it holds this much."""

ALLOWANCE = 16 << 20
"""Bytes that Python, JAX and the allocator may take for themselves while they load."""

MODEL = llama(layers=16, hidden=1536, ffn=4608, queries=24, keys=8, vocabulary=48000, dtype="bfloat16")


def write_checkpoint(folder: Path, config: ModelConfig) -> int:
    """Write a sharded bfloat16 checkpoint of random weights, one tensor in memory at a time -> its bytes."""
    shapes = tensor_shapes(config)
    files = list(_files(shapes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        with (folder / file).open("wb") as out:
            header = json.dumps(_header(names, shapes)).encode()
            out.write(len(header).to_bytes(8, "little") + header)
            for name in names:
                out.write(random_tensor(name, shapes[name]).astype(ml_dtypes.bfloat16).tobytes())
    total = sum(map(_size, shapes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config_document(config)), encoding="utf-8")
    return total


def _files(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    for name in shapes:
        names.append(name)
        if sum(_size(shapes[held]) for held in names) >= FILE_BYTES:
            yield names
            names = []
    if names:
        yield names


def _header(names: list[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    header, offset = {}, 0
    for name in names:
        end = offset + _size(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [offset, end]}
        offset = end
    return header


def _size(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


def load_whole(folder: Path, mesh: str, dtype: str) -> dict[str, int]:
    """`jaxpar.load` in this process, which has loaded nothing before; bytes."""
    before = _start(mesh)
    runner = jaxpar.load(folder, mesh, platform="cpu", dtype=dtype)
    peak = _memory("VmHWM")
    shards = [shard.data for array in runner.weights.values() for shard in array.addressable_shards]
    return {
        "before": before,
        "peak": peak,
        "arrays": _array_bytes(runner.weights),
        "largest_slice": max(shard.nbytes for shard in shards),
        "largest_tensor": _largest_tensor(runner.checkpoint.require_reader()),
    }


def load_each(folder: Path, mesh: str, dtype: str) -> dict[str, int]:
    """The same weight by weight -> the most that was taken, at any time, besides the arrays that there were by then.

    The peak of the whole is when all arrays are there, and does not show it; a host of accelerators holds no arrays.
    """
    before = _start(mesh)
    checkpoint = open_checkpoint(folder)
    spec = MeshSpec.parse(mesh)
    devices = make_mesh(spec, ensure_devices(spec, "cpu"))
    programs = Programs(checkpoint.config, Plan(mesh=spec, dtype=dtype), devices)
    arrays: dict[str, jax.Array] = {}
    most = 0
    for name, weight in programs.weights.items():
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
        arrays |= load_weights({name: weight}, checkpoint.require_reader(), devices)
        most = max(most, _memory("VmHWM") - before - _array_bytes(arrays))
    return {"besides_each": most}


def _start(mesh: str) -> int:
    """Start JAX with the devices of a mesh -> memory that is resident then."""
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in ensure_devices(MeshSpec.parse(mesh))])
    return _memory("VmRSS")


def _array_bytes(arrays: Mapping[str, jax.Array]) -> int:
    """Memory of arrays on faked devices, on which copies of a slice may be the same memory."""
    shards = [shard.data for array in arrays.values() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def _largest_tensor(reader: TensorReader) -> int:
    """Bytes of the checkpoint's largest tensor, as the file holds it."""
    infos = map(reader.info, reader.names())
    return max(math.prod(info.shape) * info.dtype.itemsize for info in infos)


def _memory(field: str) -> int:
    """A field of /proc/self/status in bytes: VmHWM, the most memory that was ever resident, or VmRSS, what is now."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Write the checkpoint, load it in fresh processes, report."""
    for load in (load_whole, load_each):
        if sys.argv[1:2] == [load.__name__]:  # what the fresh processes are started with
            print(json.dumps(load(Path(sys.argv[2]), *sys.argv[3:])))
            return
    parser = arguments("Host memory that loading takes.", rounds=3)
    parser.add_argument("--scratch", type=Path, default=argparse.SUPPRESS, help="folder for the checkpoint (1.4 GB)")
    options = parser.parse_args()
    scratch = getattr(options, "scratch", None)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="load-memory-", dir=scratch) as name:
        free, needed = shutil.disk_usage(name).free, 1.5 * sum(map(_size, tensor_shapes(MODEL).values()))
        if free < needed:
            sys.exit(f"{name} has {human_bytes(free)} free, the checkpoint takes {human_bytes(needed)}: give --scratch")
        checkpoint = write_checkpoint(Path(name), MODEL)
        for mesh in MESHES:
            for dtype in DTYPES:
                loads = [_in_fresh_processes(name, mesh, dtype) for _ in range(options.rounds)]
                rows.append({"mesh": mesh, "dtype": dtype, **_judge(loads)})
    report(rows, checkpoint, options.out)
    if not all(row["met"] for row in rows):
        sys.exit("loading takes more memory than one slice and one tensor")


def _in_fresh_processes(*arguments: str) -> dict[str, int]:
    figures: dict[str, int] = {}
    for load in (load_whole, load_each):
        command = [sys.executable, "-m", "benchmarks.load_memory", load.__name__, *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures |= json.loads(done.stdout.splitlines()[-1])
    return figures


def _judge(loads: list[dict[str, int]]) -> dict[str, Any]:
    """The load that took most, held against the bound."""
    worst = max(loads, key=_besides)
    bound = worst["largest_slice"] + worst["largest_tensor"] + ALLOWANCE
    return {**worst, "besides": _besides(worst), "bound": bound, "met": _besides(worst) <= bound, "loads": loads}


def _besides(load: dict[str, int]) -> int:
    """What loading took besides the arrays."""
    return max(load["peak"] - load["before"] - load["arrays"], load["besides_each"])


def report(rows: list[dict[str, Any]], checkpoint: int, out: Path) -> None:
    """Table, JSON and picture."""
    names = ("peak", "before", "arrays", "besides", "largest_slice", "largest_tensor", "bound")
    show(
        f"Loading a checkpoint of {human_bytes(checkpoint)} (bfloat16) onto 8 faked devices: host memory",
        ["mesh", "dtype", "peak", "before", "arrays", "besides", "largest slice", "largest tensor", "bound", ""],
        [
            (row["mesh"], row["dtype"], *(human_bytes(row[name]) for name in names), "met" if row["met"] else "MISSED")
            for row in rows
        ],
        left=2,
    )
    write(out, "load_memory", {"checkpoint_bytes": checkpoint, "rows": rows})
    draw_bars(
        out / "load_memory.png",
        f"Loading {human_bytes(checkpoint)} onto 8 faked devices: host memory besides the arrays",
        "MiB",
        [f"{row['mesh']}\n{row['dtype']}" for row in rows],
        {
            "taken": [Spread.of([_besides(load) / 2**20 for load in row["loads"]]) for row in rows],
            "bound": [Spread.of([row["bound"] / 2**20]) for row in rows],
        },
    )


if __name__ == "__main__":
    main()
