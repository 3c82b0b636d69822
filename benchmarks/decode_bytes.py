"""The memory traffic of a 70B-shaped decode step on accelerators, as their compilers count it.

Llama-3-70B cut to four layers, tp 8, bfloat16, 64 requests of 4096 tokens: compiled for a TPU v5p and an H200, neither
of which is needed. The floor reads every weight of the products once, and every cached key and value once.

On TPUs XLA counts bytes and makes seconds of them, its own model and no measurement; what a kernel moves is what the
kernel says. A weight that is copied into a core's memory before its product is counted several times over. On GPUs it
says neither, and temporaries show whether the cache is copied.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.common import Spread, arguments, draw_bars, figure, show, write
from jaxpar.aot.targets import Target
from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.ledger.predict import local_bytes
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step

MODEL, LAYERS, MESH, LANES, KEYS = "llama-3-70b", 4, "tp=8", 64, 4096
TARGETS = ("v5p:2x2x2", "h200:1x1x8")
PEER, PEER_BYTES, GOAL = "jax-llm-examples", 2.50e9, 1.062e-3
"""What JAX's own example of serving Llama 3 takes, by the same model of the same compiler."""


def measured(target: Target) -> dict[str, Any]:
    """What the target's compiler says of the step, and the floor."""
    config = read_config(model_dir(MODEL))
    config = config.of_layers(slice(LAYERS))
    plan = Plan(MeshSpec.parse(MESH), dtype="bfloat16")
    programs = Programs(config, plan, target.mesh(plan.mesh))
    step = Step(config, plan, "decode", LANES, 1, KEYS)
    given = programs.abstract_arguments(step, LANES * KEYS // plan.page_size)
    begin = time.perf_counter()
    program = programs.step("decode").lower(*given).compile()
    seconds = time.perf_counter() - begin
    weights = {name: weight for name, weight in given[0].items() if name != "embedding"}
    specs = {name: programs.weight_specs[name] for name in weights}
    floor = local_bytes(weights, specs, plan.mesh.sizes) + LAYERS * sum(step.bag_bytes)
    said = program.cost_analysis() or {}
    memory = program.memory_analysis()
    return {
        "target": str(target),
        "floor_bytes": floor,
        "floor_seconds": floor / target.kind.memory_bandwidth,
        "bytes_accessed": said.get("bytes accessed"),
        "optimal_seconds": said.get("optimal_seconds"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "compile_seconds": seconds,
    }


def shown(value: float | None, unit: float) -> str:
    """A figure in a unit, or that the compiler gives none."""
    return "not said" if value is None else figure(value / unit)


def main() -> None:
    """Compile for every target, report."""
    options = arguments("Memory traffic of a decode step.", rounds=1).parse_args()
    rows = [measured(Target.parse(name)) for name in TARGETS]
    show(
        f"{MODEL}, {LAYERS} layers, {MESH}, bfloat16: a decode step of {LANES} requests of {KEYS} tokens, each device",
        ["target", "floor, GB", "floor, ms", "XLA's bytes, GB", "XLA's seconds, ms", "temporaries, MiB"],
        [
            (
                row["target"],
                figure(row["floor_bytes"] / 1e9),
                figure(row["floor_seconds"] * 1e3),
                shown(row["bytes_accessed"], 1e9),
                shown(row["optimal_seconds"], 1e-3),
                figure(row["temporary_bytes"] / 2**20),
            )
            for row in rows
        ],
    )
    write(options.out, "decode_bytes", {"peer": PEER, "peer_bytes": PEER_BYTES, "goal": GOAL, "rows": rows})
    tpu = rows[0]
    found = {"floor": tpu["floor_seconds"], "jaxpar": tpu["optimal_seconds"], PEER: GOAL}
    draw_bars(
        options.out / "decode_bytes.png",
        f"{MODEL}, {LAYERS} layers, {MESH}, {LANES} x {KEYS}: a decode step on {tpu['target']}",
        "XLA's seconds, ms",
        list(found),
        {"decode": [Spread.of([seconds * 1e3]) for seconds in found.values()]},
    )
    if tpu["optimal_seconds"] > GOAL:
        sys.exit(f"XLA expects {tpu['optimal_seconds'] * 1e3:.3f} ms on {tpu['target']}: more than {PEER}")


if __name__ == "__main__":
    main()
