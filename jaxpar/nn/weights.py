"""A weight's one description: its shape, how it is sharded, and where its values come from.

Abstract arrays, shardings, checkpoint reading, saving and initial values all follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

ZEROS = -1


@dataclass(frozen=True)
class Block:
    """`rows` consecutive rows of a weight: those of tensor `tensor` from row `start`, or zeros (tensor ZEROS).

    Where the tensor ends before the block does, the rest of the block is zeros.
    """

    tensor: int
    start: int
    rows: int


@dataclass(frozen=True)
class Source:
    """Where one matrix or vector of a weight comes from in a checkpoint.

    Along `dim` (0: rows, 1: columns) the weight is the concatenation of `blocks` of the named tensors, so that fused
    projections, copied KV heads and padding are the same thing: a list of blocks. `shapes` are the tensors' own.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]
    dim: int = 0

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...]) -> Source:
        """A tensor as it is."""
        return cls((tensor,), (shape,), (Block(0, 0, shape[0]),))

    @classmethod
    def padded(cls, tensor: str, shape: tuple[int, ...], ranks: int, dim: int = 0) -> Source:
        """A tensor split evenly over `ranks` along `dim`, zeros after its end."""
        rows = -(-shape[dim] // ranks)
        return cls((tensor,), (shape,), tuple(Block(0, rank * rows, rows) for rank in range(ranks)), dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the blocks make up."""
        size = sum(block.rows for block in self.blocks)
        return tuple(size if dim == self.dim else n for dim, n in enumerate(self.shapes[0]))


class Weight(nnx.Param[Any]):
    """A parameter with its PartitionSpec (`spec`), its `sources` (one a pipeline stage, or one) and `init` scale.

    `init` is the standard deviation of fresh values, "ones" or "zeros".
    """

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Its global shape and dtype, before values are put into it."""
        shape: jax.ShapeDtypeStruct = self.get_value()
        return shape

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint tensors that it is made of, with their shapes."""
        return {
            tensor: shape
            for source in self.sources
            for tensor, shape in zip(source.tensors, source.shapes, strict=True)
        }


def weight(
    sources: Source | tuple[Source, ...],
    split: tuple[str | tuple[str, ...] | None, ...],
    dtype: str,
    init: float | str,
    stages: tuple[str, ...] | None = None,
) -> Weight:
    """Declare a weight.

    Args:
        sources: one Source, or for a weight of a slot one a pipeline stage: it then has a leading stage dimension.
        split: for each dimension of a source the axes that it is split over (None or (): none).
        dtype: of the array.
        init: see Weight.
        stages: the axes of the leading dimension of a slot's weight.
    """
    if isinstance(sources, Source):
        shape, spec = sources.shape, P(*(axes or None for axes in split))
    else:
        shape, spec = (len(sources), *sources[0].shape), P(stages or None, *(axes or None for axes in split))
    kinds = (sources,) if isinstance(sources, Source) else sources
    return Weight(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), spec=spec, sources=kinds, init=init)
