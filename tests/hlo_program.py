"""A program with many collectives, and what XLA's backends make of it: `python tests/hlo_program.py FILE [TOPOLOGY]`.

Without a topology it compiles for eight faked CPU devices. With one it compiles ahead of time, with no device present:
"tpu:v5e:2x4" needs the libtpu package; "cuda:FILE" the jax-cuda13-plugin and jax-cuda13-pjrt packages, and a file with
the device's GpuTargetConfigProto as XLA writes it. `tests/hlo/` holds the texts, shortened to what the ledger reads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("pp", "dp", "ep", "cp", "tp")
SHAPE = (1, 2, 1, 1, 4)
SIZES = dict(zip(AXES, SHAPE, strict=True))
LAYERS, TOKENS, WIDTH, HIDDEN = 3, 32, 128, 256


def abstract_mesh() -> AbstractMesh:
    """The program's mesh without devices, for tracing."""
    return AbstractMesh(SHAPE, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The program's mesh on the first devices, for compiling."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[:8]).reshape(SHAPE), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def program(mesh: Any) -> Any:
    """bf16 tokens [TOKENS, WIDTH] split over dp, weights [LAYERS, WIDTH, HIDDEN] over tp: the jitted `shard_map`."""

    def step(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("ffn:psum"):
                return x + lax.psum((x @ weight) @ weight.T, "tp"), None

        def ring(keys: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            with jax.named_scope("attention:ring"):
                moved = lax.ppermute(keys, "tp", [(rank, (rank + 1) % 4) for rank in range(4)])
            return moved, jnp.sum(keys * keys)

        x, _ = lax.scan(layer, x, weights)
        rank = lax.axis_index(("dp", "tp")).astype(x.dtype)
        with jax.named_scope("attention:psum"):
            first, second = lax.psum((x * rank, x + rank), "tp")
        with jax.named_scope("moe:gather"):
            whole = lax.all_gather(first * rank, "tp", axis=0, tiled=True)
            part = lax.psum_scatter(whole + rank, "tp", scatter_dimension=0, tiled=True)
        with jax.named_scope("moe:all_to_all"):
            exchanged = lax.all_to_all(whole * rank, "tp", 0, 0, tiled=True)
        keys, _ = lax.scan(ring, exchanged, None, length=3)
        with jax.named_scope("stage:pipeline"):
            passed = lax.ppermute(keys, "dp", [(0, 1)])
        with jax.named_scope("loop=rounds"):
            _, total = lax.while_loop(
                lambda carry: jnp.max(carry[1]) < 1e3,
                lambda carry: (carry[0] + 1, lax.psum(carry[1] * rank.astype(jnp.float32), ("dp", "tp"))),
                (0, lax.psum(jnp.sum(second).astype(jnp.float32), "dp")),
            )
        return first + second, part, passed, total

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("dp"), P(None, None, "tp")),
            out_specs=(P("dp"), P(("dp", "tp")), P(("dp", "tp")), P()),
        )
    )


def arguments(mesh: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What the program takes, without values."""
    return (
        jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp"))),
        jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, None, "tp"))),
    )


def compiled_text(mesh: Mesh) -> str:
    """The program as XLA compiles it for the mesh's devices."""
    text: str = program(mesh).lower(*arguments(mesh)).compile().as_text()
    return text


def _shorten(text: str) -> str:
    """Without the tables of source lines, and without what is noted on instructions that the ledger does not read."""
    header, body = text.split("\n", 1)
    body = body[re.search(r"^(ENTRY )?%", body, re.MULTILINE).start() :]  # type: ignore[union-attr]
    trips = r'"known_trip_count":\{"n":"\d+"\}'
    lines = []
    for line in body.splitlines():
        line, _, config = line.partition(", backend_config=")
        line, comma, metadata = line.partition(", metadata=")
        if re.search(r" (while|all-|reduce-scatter|collective-)[a-z-]*\(", line):
            line += comma + re.sub(r' (?:scheduling_name="[^"]*" )?stack_frame_id=\d+', "", metadata)
        if found := re.search(trips, config):
            line += ", backend_config={" + found[0] + "}"
        lines.append(line)
    return "\n".join([header.split(",")[0], "", *lines, ""])


def _main(path: str, topology: str = "") -> None:
    if not topology:
        jax.config.update("jax_num_cpu_devices", 8)
        mesh = device_mesh()
    else:
        platform, _, name = topology.partition(":")
        gpu = {"topology": "1x1x8", "target_config": Path(name).read_text()} if platform == "cuda" else {}
        mesh = device_mesh(topologies.get_topology_desc("" if gpu else name, platform, **gpu).devices)
    Path(path).write_text(_shorten(compiled_text(mesh)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
