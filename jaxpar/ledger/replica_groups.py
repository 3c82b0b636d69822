"""Who talks to whom in a compiled collective: XLA's notations of device groups, and the mesh axes that they stand for.

    {{0,1,2,3},{4,5,6,7}}                                  the groups, listed
    [2,4]<=[8]          [4,2]<=[2,4]T(1,0)                 iota: reshape the device numbers, transpose, cut into rows
    mesh['dp'=2,'tp'=4] {'tp'}                             a mesh and the axes that a group spans
    mesh['a'=8], device_ids=([4,2]T(1,0)) {'a':(2)4}       its device numbers, and a part of an axis: of size 4, after 2
    source_target_pairs={{0,1},{1,2}}                      pairs of a collective-permute

Numbers are partitions of the program, the position of a device in the mesh, whatever its hardware number is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<ids>[\d,]+)\](?:T\((?P<transpose>[\d,]+)\))?\))? \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def parse_groups(attributes: str, devices: int) -> Groups:
    """The groups, or the (source, target) pairs, in the attributes of an instruction of a program of `devices`.

    No group at all means one of all devices. Raises ValueError for a notation that is not one of the above.
    """
    if found := _MESH.search(attributes):
        return _mesh_groups(found["mesh"], found["ids"], found["transpose"], found["axes"])
    if found := _IOTA.search(attributes):
        return _tuples(_iota(found[3], found[4]).reshape(int(found[1]), int(found[2])))
    if found := _LISTED.search(attributes):
        groups = re.findall(r"\{([\d,]*)\}", found[1] or "")
        return tuple(tuple(_numbers(group)) for group in groups) or (tuple(range(devices)),)
    raise ValueError(f"no device groups in {attributes[:120]!r}")


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes over which `groups` reduce or exchange: () for single ranks, None if no set of axes gives them.

    Groups that cut one axis into equal parts are named by it, as the jaxpr names `axis_index_groups`.
    """
    axes, coordinates = _varying(groups, sizes)
    ranks = math.prod(sizes[axis] for axis in axes)
    if len(axes) == 1 and {len(set(group)) for group in groups} == {len(group) for group in groups} == {len(groups[0])}:
        ranks = len(groups[0])
    fixed = [position for position, axis in enumerate(sizes) if axis not in axes]
    for group in groups:
        if len(set(group)) != ranks or len(group) != ranks or np.ptp(coordinates[np.ix_(fixed, group)], axis=1).any():
            return None
    return axes


def axes_of_pairs(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which (source, target) pairs move anything."""
    return _varying(pairs, sizes)[0]


def _varying(groups: Groups, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], np.ndarray]:
    """Axes whose coordinate differs within some group, and all coordinates [axes, devices]."""
    devices = math.prod(sizes.values())
    if (last := max(map(max, groups))) >= devices:
        raise ValueError(f"the program's groups name device {last}, but the mesh has {devices} devices")
    coordinates = np.stack(np.unravel_index(np.arange(devices), tuple(sizes.values())))
    differs = np.any([np.ptp(coordinates[:, group], axis=1) > 0 for group in map(list, groups)], axis=0)
    return tuple(axis for axis, moved in zip(sizes, differs, strict=True) if moved), coordinates


def _mesh_groups(mesh: str, ids: str | None, transpose: str | None, axes: str) -> Groups:
    """Groups of the mesh notation. An axis of which only a part is named is cut where the part begins and ends."""
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(mesh)}
    parts = [(name, int(before or 1), int(size or sizes[name])) for name, _, before, size in _AXIS.findall(axes)]
    shape: list[int] = []
    dimension_of: dict[tuple[str, int, int], list[int]] = {part: [] for part in parts}
    for name, whole in sizes.items():
        own = [part for part in parts if part[0] == name]
        cuts = sorted({1, whole} | {cut for _, before, size in own for cut in (before, before * size)})
        for start, end in pairwise(cuts):
            for part in own:
                if part[1] <= start and end <= part[1] * part[2]:
                    dimension_of[part].append(len(shape))
            shape.append(end // start)
    inside = [dimension for part in parts for dimension in dimension_of[part]]
    outside = [dimension for dimension in range(len(shape)) if dimension not in inside]
    # Device numbers are an iota if a transposition follows or none are given, else a list.
    devices = np.array(_numbers(ids)) if ids and not transpose else _iota(ids or str(math.prod(shape)), transpose)
    arranged = devices.reshape(shape).transpose([*outside, *inside])
    return _tuples(arranged.reshape(-1, math.prod(shape[dimension] for dimension in inside)))


def _iota(dimensions: str, transpose: str | None) -> np.ndarray:
    shape = _numbers(dimensions)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return (numbers.transpose(_numbers(transpose)) if transpose else numbers).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _tuples(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())
