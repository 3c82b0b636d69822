"""Reference cases: what aiconfigurator 0.12.0 says of known models on eight H200, and the plan here that is the same.

4000 tokens in, 500 out. Its speed-of-light mode is a bound that any roofline must give again; its tables are what
serving engines were measured to take. Its engine keeps every token on every rank of tp, and adds experts up by
all-reduces. Here

    sums        split the width of every expert over tp, and all-reduce: the same FLOPs, bytes of weights and messages
    experts     whole experts over tp, whose rows are gathered and reduce-scattered: the same bytes on the wire, and one
                rank may have more rows than another, as in the tables' prefill
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions, ideal
from jaxpar.planner.timing import decode_time, prefill_time
from jaxpar.planner.workload import Workload
from jaxpar.presets import DeviceKind, load_preset

WORKLOAD = Workload(4000, 500)


@dataclass(frozen=True)
class Published:
    """Milliseconds of a prefill and of a decode step, 0: not given; weights of a device in GiB."""

    prefill: float
    decode: float
    weights: float = 0.0


@dataclass(frozen=True)
class Case:
    """A deployment, what its peer says of it, and what is right where that is wrong.

    `sums` and `experts` are the plans (None: the same); `batch` requests are decoded, `prompts` prefilled together.
    `imbalance` is that of its tables, whose experts are drawn by a power law; `command` is how the peer is asked.
    """

    name: str
    what: str
    model: str
    sums: Plan
    experts: Plan | None
    batch: int
    bound: Published
    table: Published
    right: Published
    command: tuple[str, ...]
    types: dict[str, Any] = field(default_factory=dict)
    imbalance: float = 1.0
    prompts: int = 1

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return read_config(model_dir(self.model))

    def bounds(self) -> tuple[float, float]:
        """Milliseconds of a prefill and of a decode step that nothing can be faster than."""
        return self._times(
            self.sums, self.sums, unhindered(load_preset("h200-calibrated-8").device), ideal(**self.types)
        )

    def times(self) -> tuple[float, float]:
        """The same with what the calibrated preset says, and typical efficiencies."""
        assumed = Assumptions(**self.types, imbalance=self.imbalance)
        return self._times(self.experts or self.sums, self.sums, load_preset("h200-calibrated-8").device, assumed)

    def _times(self, first: Plan, then: Plan, device: DeviceKind, assumed: Assumptions) -> tuple[float, float]:
        prefill = prefill_time(self.config, first, device, WORKLOAD, assumed, self.prompts)
        decode = decode_time(self.config, then, device, WORKLOAD, assumed, self.batch)
        return 1e3 * prefill.prefill, 1e3 * decode.tpot


def unhindered(device: DeviceKind) -> DeviceKind:
    """A device whose links have no latency and all of their bandwidth."""
    return replace(device, link_latency=1e-12, internode_latency=1e-12, fits=())


def _plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {"dtype": "bfloat16", "chunk": WORKLOAD.input, "max_num_seqs": 4096, "devices_per_node": 8}
    return Plan(**(fields | changes))


_TP8 = _plan(mesh=MeshSpec(tp=8))
_OVER_TP = _plan(mesh=MeshSpec(tp=8), experts_over=("tp",), sequence_parallel=True, moe_dispatch="standard")
_ATTENTION_DP = _plan(mesh=MeshSpec(ep=8), moe_dispatch="standard")
_LLAMA, _QWEN = "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen3-235B-A22B-FP8"
_EXPERTS = ("--moe-ep-size", "8", "--moe-tp-size", "1")
_FP8: dict[str, Any] = {"weight_dtype": "fp8", "kv_dtype": "fp8"}

CASES = (
    Case(
        "R1", "Llama-3.1-70B bf16, tp 8, batch 64", "llama-3-70b", _TP8, None, 64,
        Published(123.1, 6.85, 16.43), Published(163.3, 16.16), Published(123.1, 6.85, 16.43),
        (_LLAMA, "--tp-size", "8"),
    ),
    Case(
        "R2", "Qwen3-235B fp8, tp 8, ep 8, batch 64", "qwen3-235b-a22b", _TP8, _OVER_TP, 64,
        Published(42.2, 8.02, 27.50), Published(143.7, 18.18), Published(42.2, 8.02, 27.65),
        (_QWEN, "--tp-size", "8", *_EXPERTS), _FP8 | {"attention_dtype": "fp8"}, 2.35,
    ),
    Case(
        "R2b", "Qwen3-235B fp8, dp 8, ep 8, batch 32 a rank", "qwen3-235b-a22b", _ATTENTION_DP, None, 256,
        Published(0, 11.22, 33.93), Published(0, 28.59), Published(0, 11.22, 35.09),
        (_QWEN, "--tp-size", "1", "--attention-dp-size", "8", *_EXPERTS), _FP8 | {"attention_dtype": "fp8"}, 2.35, 8,
    ),
    Case(
        "R3", "DeepSeek-V3 fp8, tp 8, ep 8, batch 64", "deepseek-v3", _TP8, _OVER_TP, 64,
        Published(59.4, 20.6, 84.6), Published(161.2, 28.8), Published(68.5, 18.05, 79.27),
        ("deepseek-ai/DeepSeek-V3", "--tp-size", "8", *_EXPERTS), _FP8, 1.6,
    ),
    Case(
        "R4", "Llama-3.1-70B bf16, tp 16 on two nodes, batch 32", "llama-3-70b", _plan(mesh=MeshSpec(tp=16)), None,
        32, Published(14136, 6.3, 8.37), Published(14113, 35.2), Published(0, 0, 8.37), (_LLAMA, "--tp-size", "16"),
        prompts=32,
    ),
)  # fmt: skip
"""`bound` and `table` are the peer's, `right` what a count of every weight gives; the figures are pinned by tests."""
