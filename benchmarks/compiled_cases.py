"""The steps that are compiled for accelerators: models cut to a few layers, on eight devices of each target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.strategies import Step

TARGETS = ("v5p:2x2x2", "h200:1x1x8")


@dataclass(frozen=True)
class Case:
    """One step: `lanes` requests of a replica, `tokens` new ones of each on a rank, `keys` that the rank has cached."""

    model: str
    mesh: str
    phase: Phase
    lanes: int
    tokens: int
    keys: int
    first: int = 0
    layers: int = 1
    sampled: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> str:
        """What of the plan is not as it is by default, in words."""
        words = [
            f"{name}={'+'.join(value) if isinstance(value, tuple) else value}" if value is not True else name
            for name, value in self.fields.items()
        ]
        return ", ".join([*words, *(["sampled"] if self.sampled else [])])

    @property
    def name(self) -> str:
        """What tells it from all others."""
        sizes = f"{self.lanes} x {self.tokens} at {self.keys}, layers {self.first} to {self.first + self.layers - 1}"
        return f"{self.model} {self.mesh} {self.phase} {self.options}: {sizes}".replace(" :", ":")

    @property
    def config(self) -> ModelConfig:
        """The model that is compiled."""
        return read_config(model_dir(self.model)).of_layers(slice(self.first, self.first + self.layers))

    @property
    def plan(self) -> Plan:
        """In bfloat16."""
        return Plan(MeshSpec.parse(self.mesh), dtype="bfloat16", **self.fields)

    @property
    def step(self) -> Step:
        """The step of the whole program; its config is read anew each time."""
        return Step(self.config, self.plan, self.phase, self.lanes, self.tokens, self.keys, sampled=self.sampled)

    @property
    def pages(self) -> int:
        """Pages on each rank: as many as the requests of all groups fill."""
        return -(-self.keys // Plan.page_size) * self.lanes * self.plan.groups


LLAMA, SMALL, QWEN, WINDOW, MOE, MLA = (
    "llama-3-70b",
    "llama-3.1-8b",
    "qwen2.5-7b",
    "mistral-7b",
    "qwen3-235b-a22b",
    "deepseek-v3",
)


def decode(model: str, mesh: str, lanes: int = 32, keys: int = 2048, **fields: Any) -> Case:
    """A decode step."""
    return Case(model, mesh, "decode", lanes, 1, keys, fields=fields)


def prefill(model: str, mesh: str, tokens: int = 512, keys: int = 2048, lanes: int = 1, **fields: Any) -> Case:
    """A prefill step."""
    return Case(model, mesh, "prefill", lanes, tokens, keys, fields=fields)


def _two(case: Case, first: int = 0) -> Case:
    """The same with two layers; of DeepSeek-V3 from number 2 on, the one has a dense FFN and the other experts."""
    return replace(case, layers=2, first=first)


_SUMS = ("one_shot", "two_shot", "ring", "tree", "int8", "fp8", "fixed_order")
_OVER_CP = {"tokens": 256, "keys": 1024}

# Those that show every strategy come first.
CASES: tuple[Case, ...] = (
    _two(decode(LLAMA, "tp=8", 64, 4096)),
    _two(prefill(LLAMA, "tp=8")),
    _two(decode(LLAMA, "pp=2,tp=4")),
    _two(prefill(LLAMA, "pp=2,tp=4")),
    *(
        prefill(LLAMA, "cp=2,tp=4", **_OVER_CP, prefill_attention=name)
        for name in ("ring", "ring_q", "all_gather", "ulysses")
    ),
    prefill(LLAMA, "cp=4,tp=2", **_OVER_CP, prefill_attention="usp", ulysses_degree=2),
    *(
        decode(LLAMA, "cp=2,tp=4", keys=1024, decode_attention=name)
        for name in ("ag_rs", "a2a", "q_replicated", "helix")
    ),
    *(decode(SMALL, "tp=8", all_reduce=name) for name in _SUMS),
    decode(SMALL, "tp=8", all_reduce="two_level", devices_per_node=4),
    prefill(LLAMA, "tp=8", sequence_parallel=True, collective_matmul=True),
    replace(decode(LLAMA, "tp=8", 64, 4096), sampled=True),
    decode(QWEN, "tp=8", kv_split="head_dim"),
    prefill(QWEN, "tp=8", kv_split="head_dim"),
    decode(LLAMA, "dp=2,tp=4"),
    decode(LLAMA, "tp=8", sequence_parallel=True),
    decode(LLAMA, "cp=2,tp=4", keys=1024, decode_attention="a2a", decode_overlap=2),
    decode(QWEN, "tp=8"),
    decode(MOE, "ep=8", 8, moe_dispatch="standard"),
    prefill(MOE, "ep=8", 512, 1024, moe_dispatch="all_to_all"),
    prefill(MOE, "ep=8", 512, 1024, moe_dispatch="ragged"),
    prefill(MOE, "dp=2,ep=4", 512, 1024, moe_dispatch="two_level", experts_over=("dp", "ep"), devices_per_node=4),
    decode(MOE, "dp=2,tp=4"),
    # The others show shapes of models and meshes.
    decode(MOE, "tp=8", kv_split="head_dim"),
    prefill(MOE, "tp=8", kv_split="head_dim"),
    decode(MOE, "tp=8", 64, experts_over=("tp",)),
    prefill(MOE, "tp=8", experts_over=("tp",)),
    prefill(LLAMA, "tp=8", sequence_parallel=True),
    prefill(LLAMA, "dp=2,tp=4", lanes=2, two_batch_overlap=True),
    prefill(QWEN, "dp=2,tp=4"),
    prefill(WINDOW, "dp=2,tp=4"),
    _two(decode(MLA, "tp=8"), first=2),
    _two(decode(MLA, "ep=8", 8), first=2),
    _two(prefill(MLA, "ep=4,tp=2", 512, 1024), first=2),
    _two(decode(MLA, "cp=2,tp=4", keys=1024), first=2),
    _two(prefill(MLA, "cp=2,tp=4", **_OVER_CP), first=2),
    _two(decode(MLA, "dp=2,ep=4", 8, experts_over=("dp", "ep"), moe_dispatch="all_to_all"), first=2),
    decode(MOE, "cp=2,tp=4", keys=1024, decode_attention="helix"),
    decode(MOE, "cp=2,tp=4", keys=1024, decode_attention="helix", experts_over=("cp", "tp")),
    prefill(MOE, "ep=2,tp=4", 512, 1024, experts_over=("ep", "tp"), sequence_parallel=True),
)
