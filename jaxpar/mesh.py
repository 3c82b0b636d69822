"""The named device mesh as numbers: sizes of the five axes, and who each rank is. Knows nothing of JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxpar.errors import MeshError, PlanError
from jaxpar.values import shown, whole_number

AXES = ("pp", "dp", "ep", "cp", "tp")
"""Mesh axes, outermost first: consecutive ranks differ in tp, so that tp runs over the fastest links."""

_ALL = frozenset(AXES)

MAX_RANKS = 65_536
"""More ranks than any deployment has: a typing error, refused before anything is sized by it."""

_EXAMPLE = 'write a mesh as "dp=2,tp=4"'


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the five mesh axes; those that are not named have size 1.

    Raises:
        MeshError: a size that is not a whole number from 1, or more than `MAX_RANKS` ranks in all.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that no mesh can have."""
        for axis in AXES:
            given = getattr(self, axis)
            size = whole_number(given)
            if size is None or size < 1:
                raise MeshError(
                    f"mesh axis {axis} has size {shown(given)}: a size is a whole number from 1; {_EXAMPLE}"
                )
            object.__setattr__(self, axis, size)
        if self.size > MAX_RANKS:
            product = " x ".join(f"{axis} {self.sizes[axis]}" for axis in self.active(AXES))
            raise MeshError(f"mesh {product} has more than {MAX_RANKS} ranks: use smaller axes")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Read `"dp=2,tp=4"`; the order of the axes does not matter, and spaces are allowed.

        Raises:
            MeshError: naming the piece that is not `axis=size`, or the axis that is unknown or given twice.
        """
        pieces = [piece.strip() for piece in text.split(",")]
        whole = shown(text)
        if pieces == [""]:
            raise MeshError(f'mesh {whole} is empty: {_EXAMPLE} (one device is "tp=1")')
        sizes: dict[str, int] = {}
        for piece in pieces:
            axis, equals, size = (part.strip() for part in piece.partition("="))
            if not equals:
                raise MeshError(f"mesh {whole}: {shown(piece)} is not axis=size; {_EXAMPLE}")
            if axis not in AXES:
                raise MeshError(f"mesh {whole}: unknown axis in {shown(piece)}; the axes are {', '.join(AXES)}")
            if axis in sizes:
                raise MeshError(f"mesh {whole}: axis {axis} is given twice; give each axis one size")
            # Nine digits are past MAX_RANKS already, and keep int() from being asked for a number of a million digits.
            if not re.fullmatch(r"0*[1-9][0-9]{0,8}", size):
                raise MeshError(f"mesh {whole}: the size in {shown(piece)} is not a whole number from 1 to {MAX_RANKS}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int]) -> MeshSpec:
        """Build from a mapping such as `{"dp": 2, "tp": 4}`.

        Raises:
            MeshError: an unknown axis, or a size that `MeshSpec` refuses.
        """
        for axis in sizes:
            _known(axis)
        return cls(**sizes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of every axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def active(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` with more than one rank, in the mesh's order: what a PartitionSpec or a collective names."""
        wanted = set(axes)
        if not wanted <= _ALL:
            _known(min(wanted - _ALL, key=str))
        return tuple(axis for axis in self._split if axis in wanted)

    @cached_property
    def _split(self) -> tuple[str, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis in AXES if self.sizes[axis] > 1)

    def extent(self, axes: Iterable[str]) -> int:
        """Number of ranks along `axes` taken together; 1 over no axis."""
        return math.prod(self.sizes[_known(axis)] for axis in set(axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis, the innermost axis varying fastest.

        Raises:
            MeshError: no such rank.
        """
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not on mesh {self}: its ranks are 0 to {self.size - 1}")
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.sizes[axis])
        return {axis: position[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """Rank at the given coordinates, 0 on the axes that are not named: the inverse of `coordinates`.

        Raises:
            MeshError: an unknown axis, or a coordinate outside it.
        """
        for axis, position in coordinates.items():
            if not 0 <= position < self.sizes[_known(axis)]:
                raise MeshError(f"{axis}={position} is not on mesh {self}: {axis} has size {self.sizes[axis]}")
        return _flatten(self, AXES, coordinates)

    def __str__(self) -> str:
        """Canonical text that `parse` reads back: the axes with more than one rank, or `tp=1`."""
        return ",".join(f"{axis}={self.sizes[axis]}" for axis in self.active(AXES)) or "tp=1"


@dataclass(frozen=True)
class RankRow:
    """One rank of a mesh: its coordinate on every axis, and which share of the experts it holds."""

    rank: int
    pp: int
    dp: int
    ep: int
    cp: int
    tp: int
    expert_rank: int


def parse_experts_over(axes: str | Iterable[str]) -> tuple[str, ...]:
    """Read `"dp,cp,tp"`, or a list of these axes, into a tuple in the mesh's order.

    Raises:
        PlanError: no axis, an unknown one, one given twice, or pp (a stage's experts stay in the stage).
    """
    usable = ", ".join(axis for axis in AXES if axis != "pp")
    try:
        axes = [piece.strip() for piece in axes.split(",")] if isinstance(axes, str) else [str(axis) for axis in axes]
    except TypeError as error:
        raise PlanError(f'experts over {shown(axes)}: give axes out of {usable}, such as "dp,tp"') from error
    named = shown(",".join(axes))
    for axis in axes:
        if axis == "pp":
            raise PlanError(f"experts over {named}: a pipeline stage keeps its own experts; use axes out of {usable}")
        if axis not in AXES:
            raise PlanError(f"experts over {named}: unknown axis {shown(axis)}; use axes out of {usable}")
        if axes.count(axis) > 1:
            raise PlanError(f"experts over {named}: axis {axis} is given twice; name each axis once")
    if not axes:
        raise PlanError(f'experts over no axis: name at least one of {usable}; "ep" is the usual choice')
    return tuple(axis for axis in AXES if axis in axes)


def rank_table(spec: MeshSpec, experts_over: str | Iterable[str] = ("ep",)) -> list[RankRow]:
    """Every rank with its coordinates and its expert rank: the position along `experts_over`, last axis fastest.

    Ranks with the same expert rank hold the same experts (or, where tp is not in `experts_over`, tp slices of them).
    """
    axes = parse_experts_over(experts_over)
    rows = []
    for rank in range(spec.size):
        position = spec.coordinates(rank)
        rows.append(RankRow(rank=rank, **position, expert_rank=_flatten(spec, axes, position)))
    return rows


def sglang_sizes(spec: MeshSpec, experts_over: str | Iterable[str] = ("ep",)) -> dict[str, int]:
    """Return the mesh in SGLang's words.

    There `tp_total` (`--tp-size`) counts every rank of a stage: attention splits it as attn_dp x attn_cp x attn_tp, the
    experts as moe_dp x ep x moe_tp, and world = tp_total x pp. Our ep axis splits requests in attention, so it counts
    in attn_dp; an expert's width is split over tp only where tp holds no experts of its own.
    """
    axes = parse_experts_over(experts_over)
    tp_total = spec.extent(("dp", "ep", "cp", "tp"))
    ep = spec.extent(axes)
    moe_tp = 1 if "tp" in axes else spec.tp
    return {
        "attn_dp": spec.extent(("dp", "ep")),
        "attn_cp": spec.cp,
        "attn_tp": spec.tp,
        "tp_total": tp_total,
        "pp": spec.pp,
        "world": tp_total * spec.pp,
        "ep": ep,
        "moe_tp": moe_tp,
        "moe_dp": tp_total // ep // moe_tp,
    }


def _known(axis: str) -> str:
    if axis not in AXES:
        raise MeshError(f"unknown mesh axis {shown(axis)}; the axes are {', '.join(AXES)}")
    return axis


def _flatten(spec: MeshSpec, axes: tuple[str, ...], coordinates: Mapping[str, int]) -> int:
    """Row-major index along `axes`, the last one fastest."""
    index = 0
    for axis in axes:
        index = index * spec.sizes[axis] + coordinates.get(axis, 0)
    return index
