"""FLOPs of a compiled program: its matrix products as the compiler wrote them, a multiply-add as two.

GPUs have `dot`, in fusions, or calls of cuBLAS; TPUs have `convolution`, of which a batch of products is one with gaps
between the values of its left side. A kernel (Pallas) says in its call what it costs, if whoever wrote it has said so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache

import numpy as np

from jaxpar.ledger.flops import per_iteration
from jaxpar.ledger.hlo_text import Computation, Instruction, Module, array_shape
from jaxpar.ledger.hlo_walk import Site, inside, walk
from jaxpar.ledger.scope import scope_of

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CUBLAS = re.compile(r'"dot_dimension_numbers":\{"lhs_contracting_dimensions":\[([^\]]*)\]')
_ESTIMATE = re.compile(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)')
_METADATA = re.compile(r'serialized_metadata = "\{\\22flops\\22: \\22(\d+)')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def compiled_flops(module: Module) -> dict[str, int]:
    """FLOPs of one rank by sublayer, as `trace_flops` names them: loops multiplied out, others per iteration."""
    totals: Counter[str] = Counter()
    for name, flops in walk(module, _visit, _weigh):
        totals[name] += flops
    return dict(totals)


def flops_of(module: Module, computation: Computation, instruction: Instruction) -> int:
    """FLOPs of one instruction with all that it runs; of loops whose trips are not known, of one iteration."""
    site = Site(computation)
    rows = _visit(instruction, site)
    return _weigh(inside(module, instruction, site, _visit, _weigh) if rows is None else rows)


def _visit(instruction: Instruction, site: Site) -> list[tuple[str, int]] | None:
    flops = _flops(instruction, site.computation)
    if flops is None:
        return None
    return [(per_iteration(scope_of(instruction.op_name)[0], site.per), site.calls * flops)] if flops else []


def _weigh(rows: object) -> int:
    return sum(flops for _, flops in rows)  # type: ignore[attr-defined]


def _flops(instruction: Instruction, computation: Computation) -> int | None:
    """Those of one instruction, None for what may run others."""
    attributes = instruction.attributes
    match instruction.opcode:
        case "dot":
            contracted = _CONTRACTED.search(attributes)
            left = _operand_shape(instruction, computation, 0)
            return 2 * math.prod(array_shape(instruction.shape)) * _along(left, contracted[1] if contracted else "")
        case "convolution":
            return _convolution(instruction, computation)
        case "custom-call":
            if estimate := _ESTIMATE.search(attributes) or _METADATA.search(attributes):
                return int(estimate[1])
            if "__cublas$" in attributes and (contracted := _CUBLAS.search(attributes)):
                left = _operand_shape(instruction, computation, 0)
                size = math.prod(array_shape(instruction.shape))
                return 2 * size * _along(left, contracted[1].replace('"', ""))
    return None


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """Each value of the result sums over the kernel's input features, and over those places that meet a value."""
    labels = _LABELS.search(instruction.attributes)
    assert labels is not None, instruction.attributes
    found = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    shapes = [*(_operand_shape(instruction, computation, number) for number in (0, 1)), array_shape(instruction.shape)]
    pairs = 1
    for dimension, place in enumerate(sorted(filter(str.isdigit, labels[3]))):
        sizes = (shape[label.index(place)] for shape, label in zip(shapes, labels.groups(), strict=True))
        pairs *= _pairs(found[1] if found else "", dimension, *sizes)
    right, result = shapes[1:]
    features = right[labels[2].index("i")]
    return 2 * pairs * features * math.prod(result[labels[3].index(label)] for label in "bf")


@cache
def _pairs(window: str, dimension: int, left: int, right: int, result: int) -> int:
    """Places of the result times places of the kernel that meet a value of the left side, not a gap or padding."""
    fields = dict(re.findall(r"(\w+)=(\S+)", window))

    def value(name: str, default: int) -> int:
        return int(fields[name].split("x")[dimension]) if name in fields else default

    before = int(fields["pad"].split("x")[dimension].split("_")[0]) if "pad" in fields else 0
    gaps = value("lhs_dilate", 1)
    firsts, steps = np.arange(result) * value("stride", 1) - before, np.arange(right) * value("rhs_dilate", 1)
    places = np.add.outer(firsts, steps)
    return int(((places >= 0) & (places <= (left - 1) * gaps) & (places % gaps == 0)).sum())


def _operand_shape(instruction: Instruction, computation: Computation, number: int) -> list[int]:
    return array_shape(computation.instructions[instruction.operands[number]].shape)


def _along(shape: list[int], dimensions: str) -> int:
    return math.prod(shape[int(dimension)] for dimension in dimensions.split(",") if dimension)
