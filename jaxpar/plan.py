"""The plan: which axes each sublayer is split over, where the residual stream lives, and which strategy runs.

Everything that communicates asks the plan; nothing guesses from shapes. A new way to run the model is a new value
here and a new module in the registry, not a new code path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from jaxpar.links import Links
from jaxpar.mesh import MeshSpec
from jaxpar.plan_checks import DTYPES, checked_values, refuse_combinations

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
SublayerName = Literal["attention", "mla", "ffn", "moe", "vocabulary"]


@dataclass(frozen=True)
class Sublayer:
    """How one sublayer joins the residual stream: enter -> local -> leave.

    Entering gathers the tokens over `gather`, and of those that ranks of `deal` all have each takes its own slice;
    leaving reduce-scatters the partial results over `scatter`, sums them over `sum` and gathers the slices over `deal`.
    An empty tuple is no communication at all. Over `ring_in` the sublayer's first product gathers the tokens as it
    goes, over `ring_out` the last one scatters its sums as it goes (`collectives/matmul.py`), before `sum`.
    """

    gather: tuple[str, ...]
    scatter: tuple[str, ...]
    sum: tuple[str, ...]
    deal: tuple[str, ...] = ()
    ring_in: tuple[str, ...] = ()
    ring_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One way to run a model on a mesh; the fields are the keyword arguments of `jaxpar.load`.

    `stages` says which layers the stages of pp have: "even", "balanced" by the work of layers and head, or how many
    each has, "17,17,17,10" (`jaxpar/pipeline`).

    `prefill_attention`, `decode_attention` and `all_reduce` name strategies of the registry (`jaxpar strategies`);
    "auto" chooses for each step. `experts_over` are the axes over which experts are split, `moe_dispatch` is how tokens
    reach them; an expert's width is split over tp unless tp is among the axes. `moe_deduplicate` sends a token once to
    each rank that has any of its experts, and not once for each; `moe_capacity` drops the rows by which what one rank
    sends to another exceeds so many times an even share (0: none is ever dropped); `devices_per_node` consecutive ranks
    are joined by fast links (0: no nodes are known). `expert_slots` is how many experts all ranks together have room
    for: those left over hold copies of hot ones (0: each expert lies once, in order). `rebalance_every` moves experts
    by the loads of the latest steps, every so many steps, a layer between two steps (0: never).
    `kv_split` is what becomes of KV heads where tp is more: "replicate" stores copies of them, "head_dim" splits each
    along its dimensions (`heads.py`), and sums scores over the ranks that share it.
    `layout` deals the tokens of a prefill chunk over cp, `cp_interleave` is the number of positions that follow one
    another on a rank where they are striped. `ulysses_degree` is how much of cp `usp` gives to its all-to-all (0: as
    much as KV heads allow). `decode_overlap` is the number of parts in which a decode step's requests go through
    attention, so that one part's exchange may overlap with the next part's work (HOP-B of Helix, arXiv:2507.07120).
    `two_batch_overlap` runs a step as two half batches, layer by layer in turn, so that what one sends may overlap with
    the other's work; `single_batch_overlap` is the number of blocks in which what experts made is sent back, so that
    one block's way may overlap with the next block's work (both as in SGLang).
    `links` are what a preset says of the links between devices, from which `all_reduce="auto"` chooses (None: nothing).
    `sequence_parallel` splits the residual stream over tp along its tokens (arXiv:2205.05198); with `collective_matmul`
    the products of attention and of dense FFNs gather and scatter them as they go in prefill (`collectives/matmul.py`;
    latent attention enters, and experts enter and leave, as without it); `microbatches` are the groups of a replica's
    requests that follow one another through the stages of pp (0: as many as stages); `chunk` is the most tokens of one
    prompt that a prefill step takes, or about the most that steps take in the mean with a `chunk_parity`, which makes
    chunks unequal, later ones smaller, so that less is idle over pp: it is the number of tokens of context at which a
    token's attention costs as much as the rest of its work (`jaxpar pipeline MODEL` says it; 0: equal chunks);
    `page_size` the tokens of a KV cache page; `max_num_seqs` the most requests that a replica runs at once; `dtype`
    that of weights, activations and cache.
    """

    mesh: MeshSpec = field(default_factory=MeshSpec)
    stages: str = "even"
    experts_over: tuple[str, ...] = ("ep",)
    moe_dispatch: str = "auto"
    moe_deduplicate: bool = False
    moe_capacity: float = 0.0
    devices_per_node: int = 0
    expert_slots: int = 0
    rebalance_every: int = 0
    kv_split: str = "replicate"
    layout: str = "striped"
    cp_interleave: int = 1
    prefill_attention: str = "auto"
    ulysses_degree: int = 0
    decode_attention: str = "auto"
    decode_overlap: int = 1
    two_batch_overlap: bool = False
    single_batch_overlap: int = 1
    all_reduce: str = "psum"
    links: Links | None = None
    sequence_parallel: bool = False
    collective_matmul: bool = False
    microbatches: int = 0
    chunk: int = 512
    chunk_parity: int = 0
    page_size: int = 16
    max_num_seqs: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what no plan can have; numbers become ints, and axes a tuple in the mesh's order."""
        for name, value in checked_values(self).items():
            object.__setattr__(self, name, value)
        refuse_combinations(self)

    def active(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one rank: axes of size 1 appear in no spec and no collective."""
        return self.mesh.active(axes)

    @property
    def itemsize(self) -> int:
        """Bytes of one value of `dtype`."""
        return DTYPES[self.dtype]

    @property
    def fixed_order(self) -> bool:
        """Whether a request's results must not depend, bit for bit, on what other requests a step has."""
        return self.all_reduce == "fixed_order"

    @property
    def requests(self) -> tuple[str, ...]:
        """The axes over which requests are split."""
        return self.active(("dp", "ep"))

    @property
    def lanes(self) -> tuple[str, ...]:
        """The axes over which the lanes of a step are split: each stage of each replica works on lanes of its own."""
        return self.active(("pp", "dp", "ep"))

    @property
    def groups(self) -> int:
        """Groups into which the requests of a replica are dealt: as many as stages unless asked otherwise."""
        return self.microbatches or self.mesh.pp

    @property
    def width(self) -> tuple[str, ...]:
        """The axes over which heads, the dense width and the vocabulary are split."""
        return self.active(("tp",))

    @property
    def sequence(self) -> tuple[str, ...]:
        """The axes over which the positions of a request are split."""
        return self.active(("cp",))

    @property
    def pipeline(self) -> tuple[str, ...]:
        """The axes over which layers are split."""
        return self.active(("pp",))

    @property
    def experts(self) -> tuple[str, ...]:
        """The axes over which experts are split."""
        return self.active(self.experts_over)

    @property
    def pages(self) -> tuple[str, ...]:
        """The axes over which the pages of the KV cache are split: replicas, and positions within one."""
        return self.active(("dp", "ep", "cp"))

    def tokens(self, phase: Phase) -> tuple[str, ...]:
        """The axes over which the tokens that attention and the dense FFN work on are split."""
        return self.active(("dp", "ep", "cp") if phase == "prefill" else ("dp", "ep"))

    @cached_property
    def residual(self) -> dict[Phase, tuple[str, ...]]:
        """The axes over which the tokens of the residual stream are split: the one place where that is said."""
        over_tokens = self.width if self.sequence_parallel else ()
        return {phase: (*self.tokens(phase), *over_tokens) for phase in PHASES}

    def row_slices(self, phase: Phase) -> tuple[str, ...]:
        """The axes over which the residual stream splits the tokens that attention works on."""
        return tuple(axis for axis in self.residual[phase] if axis not in self.tokens(phase))

    def slices(self, phase: Phase) -> tuple[str, ...]:
        """The axes over which the residual stream of one replica is split."""
        return tuple(axis for axis in self.residual[phase] if axis not in self.requests)

    def strategies(self, phase: Phase) -> dict[str, str]:
        """The name of the strategy that each sublayer runs in `phase`, in the order of the forward pass."""
        return {
            "embedding": "vocab_parallel",
            f"{phase}_attention": self.prefill_attention if phase == "prefill" else self.decode_attention,
            "moe_dispatch": self.moe_dispatch,
            "all_reduce": self.all_reduce,
            "pipeline": "send_recv",
            **({"projections": "collective_matmul"} if self.collective_matmul else {}),
            "head": "vocab_parallel",
            "sampling": "vocab_parallel",
        }

    @cached_property
    def _joined(self) -> dict[tuple[SublayerName, Phase], Sublayer]:
        """What `sublayer` has answered: a planner asks a thousand times."""
        return {}

    def width_of(self, sublayer: SublayerName, phase: Phase) -> tuple[str, ...]:
        """The axes over which a sublayer's width is split: heads where they leave attention, an FFN, the vocabulary.

        In decode every rank of cp has the same tokens. Attention over cp leaves each with a slice of the heads;
        under `helix` (arXiv:2507.07120) dense FFNs are split over cp as well. The width of experts is not: they are
        dealt tokens over cp, or split over it. Axes that experts are split over do not split their width.
        """
        of_ffn = sublayer == "ffn" and self.decode_attention == "helix"
        over_cp = phase == "decode" and (sublayer in ("attention", "mla") or of_ffn)
        axes = (*self.sequence, *self.width) if over_cp else self.width
        return tuple(axis for axis in axes if sublayer != "moe" or axis not in self.experts)

    def sublayer(self, name: SublayerName, phase: Phase) -> Sublayer:
        """How a sublayer joins the residual stream in `phase`.

        Its parts are sums over the axes of its width; of those over which the residual stream is split as well each
        rank keeps a slice of the tokens. An MoE layer has one owner for every token: axes over which tokens are copies
        and that do not split an expert's width deal them out.
        """
        if (name, phase) not in self._joined:
            self._joined[name, phase] = self._sublayer(name, phase)
        return self._joined[name, phase]

    def _sublayer(self, name: SublayerName, phase: Phase) -> Sublayer:
        residual, width = self.residual[phase], self.width_of(name, phase)
        is_moe = name == "moe"
        axes = self.active(("dp", "ep", "cp", "tp"))
        gather = tuple(axis for axis in self.row_slices(phase) if axis in width or not is_moe)
        scatter = tuple(axis for axis in width if axis in residual)
        # A decode step would read its weights once a rank of the ring, and wait for as many hops.
        rings = self.collective_matmul and phase == "prefill"
        # Latents must be the same on all ranks, bit for bit: each product of a ring has its rows in other places.
        ring_in = rings and name in ("attention", "ffn")
        ring_out = rings and name in ("attention", "mla", "ffn")
        return Sublayer(
            gather=() if ring_in else gather,
            scatter=() if ring_out else scatter,
            sum=tuple(axis for axis in width if axis not in residual),
            deal=tuple(axis for axis in axes if axis not in (*residual, *width)) if is_moe else (),
            ring_in=gather if ring_in else (),
            ring_out=scatter if ring_out else (),
        )

    def routed(self, phase: Phase) -> tuple[str, ...]:
        """The axes whose ranks may hold different tokens to dispatch to experts; stages have different layers, too."""
        sublayer = self.sublayer("moe", phase)
        split = (*self.pipeline, *self.residual[phase], *sublayer.deal)
        return self.active(axis for axis in split if axis not in sublayer.gather)
