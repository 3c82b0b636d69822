"""The plan: which axes each sublayer is split over, where the residual stream lives, and which strategy runs.

Everything that communicates asks the plan; nothing guesses from shapes. A new way to run the model is a new value
here and a new module in the registry, not a new code path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.errors import PlanError
from jaxpar.mesh import AXES, MeshSpec, parse_experts_over
from jaxpar.values import shown, whole_number

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
DTYPES = ("float32", "bfloat16", "float16")
# Axes that a step program can split over so far; the others exist in specs, presets and `jaxpar mesh`.
RUNNABLE_AXES = ("dp", "tp")


@dataclass(frozen=True)
class Sublayer:
    """How one sublayer joins the residual stream: enter -> local -> leave.

    Entering gathers the tokens over `gather`; leaving sums the partial results over `sum` and reduce-scatters them over
    `scatter`. An empty tuple is no communication at all.
    """

    gather: tuple[str, ...]
    sum: tuple[str, ...]
    scatter: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One way to run a model on a mesh; the fields are the keyword arguments of `jaxpar.load`.

    `sequence_parallel` splits the residual stream over tp along its tokens (arXiv:2205.05198); `chunk` is the most
    tokens of one prompt that a prefill step takes; `page_size` the tokens of a KV cache page; `max_num_seqs` the most
    requests that a replica runs at once; `dtype` that of weights, activations and cache.
    """

    mesh: MeshSpec = field(default_factory=MeshSpec)
    experts_over: tuple[str, ...] = ("ep",)
    prefill_attention: str = "local"
    decode_attention: str = "local"
    all_reduce: str = "psum"
    sequence_parallel: bool = False
    chunk: int = 512
    page_size: int = 16
    max_num_seqs: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what no plan can have; numbers become ints, and axes a tuple in the mesh's order."""
        if not isinstance(self.mesh, MeshSpec):
            raise PlanError(f"mesh={shown(self.mesh)}: give a MeshSpec, such as MeshSpec(dp=2, tp=4)")
        for name in ("chunk", "page_size", "max_num_seqs"):
            given = getattr(self, name)
            value = whole_number(given)
            if value is None or value < 1:
                raise PlanError(f"{name}={shown(given)}: it must be a whole number of at least 1")
            object.__setattr__(self, name, value)
        for name in ("prefill_attention", "decode_attention", "all_reduce"):
            if not isinstance(getattr(self, name), str):
                default = getattr(Plan, name)
                raise PlanError(f"{name}={shown(getattr(self, name))}: give a strategy's name, such as {default!r}")
        if not isinstance(self.sequence_parallel, bool):
            raise PlanError(f"sequence_parallel={shown(self.sequence_parallel)}: it must be True or False")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise PlanError(f"dtype={shown(self.dtype)} is unknown: use one of {', '.join(DTYPES)}")
        object.__setattr__(self, "experts_over", parse_experts_over(self.experts_over))

    def active(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one rank: axes of size 1 appear in no spec and no collective."""
        return self.mesh.active(axes)

    @property
    def requests(self) -> tuple[str, ...]:
        """The axes over which requests are split."""
        return self.active(("dp", "ep"))

    @property
    def width(self) -> tuple[str, ...]:
        """The axes over which heads, the dense width and the vocabulary are split."""
        return self.active(("tp",))

    @property
    def stages(self) -> tuple[str, ...]:
        """The axes over which layers are split."""
        return self.active(("pp",))

    @property
    def pages(self) -> tuple[str, ...]:
        """The axes over which the pages of the KV cache are split: replicas, and positions within one."""
        return self.active(("dp", "ep", "cp"))

    def tokens(self, phase: Phase) -> tuple[str, ...]:
        """The axes over which the tokens that attention and the dense FFN work on are split."""
        return self.active(("dp", "ep", "cp") if phase == "prefill" else ("dp", "ep"))

    @property
    def residual(self) -> dict[Phase, tuple[str, ...]]:
        """The axes over which the tokens of the residual stream are split: the one place where that is said."""
        over_tokens = self.width if self.sequence_parallel else ()
        return {phase: (*self.tokens(phase), *over_tokens) for phase in PHASES}

    def slices(self, phase: Phase) -> tuple[str, ...]:
        """The axes over which the residual stream of one replica is split."""
        return tuple(axis for axis in self.residual[phase] if axis not in self.requests)

    def strategies(self, phase: Phase) -> dict[str, str]:
        """The name of the strategy that each sublayer runs in `phase`, in the order of the forward pass."""
        return {
            "embedding": "vocab_parallel",
            f"{phase}_attention": self.prefill_attention if phase == "prefill" else self.decode_attention,
            "all_reduce": self.all_reduce,
            "head": "vocab_parallel",
            "sampling": "vocab_parallel",
        }

    def sublayer(self, phase: Phase) -> Sublayer:
        """How a sublayer whose width is split over `width` joins the residual stream in `phase`.

        Its parts are sums over tp; where the residual stream is split over tp as well, each rank keeps a slice of the
        tokens of the sum.
        """
        residual, tokens = self.residual[phase], self.tokens(phase)
        return Sublayer(
            gather=tuple(axis for axis in residual if axis not in tokens),
            sum=tuple(axis for axis in self.width if axis not in residual),
            scatter=tuple(axis for axis in self.width if axis in residual),
        )

    def check_runnable(self) -> None:
        """Refuse, by name, the axes that step programs do not split over yet."""
        for axis in AXES:
            size = self.mesh.sizes[axis]
            if size > 1 and axis not in RUNNABLE_AXES:
                raise PlanError(
                    f"{axis}={size}: running with {axis} > 1 is not there yet; "
                    f"use {' and '.join(RUNNABLE_AXES)} (`jaxpar mesh` shows any mesh)"
                )
