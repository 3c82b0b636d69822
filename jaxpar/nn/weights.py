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
class Entry:
    """Where a tensor that holds `count` matrices [O, I] (or vectors [O]) keeps one: as [count, I, O] (or [count, O]).

    Two kinds of them may lie in turns in the last dimension, [count, I, 2 * O]: `turn` says which of every two is ours.
    """

    index: int
    count: int
    turn: int | None = None

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's own shape, for matrices or vectors of `shape`."""
        *columns, rows = reversed(shape)
        return (self.count, *columns, rows if self.turn is None else 2 * rows)


@dataclass(frozen=True)
class Source:
    """Where one matrix or vector of a weight comes from in a checkpoint.

    Along `dim` (0: rows, 1: columns) the weight is the concatenation of `blocks` of the named tensors, so that fused
    projections, copied KV heads and padding are the same thing: a list of blocks. `shapes` are the tensors' own, or of
    what is taken from them where there are `entries`. Without tensors it is zeros.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]
    dim: int = 0
    entries: tuple[Entry, ...] = ()

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

    @property
    def empty(self) -> Source:
        """Zeros of the same shape, which no checkpoint holds."""
        return Source((), (self.shape,), (Block(ZEROS, 0, self.shape[0]),))

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """The tensors, with the shapes that they have in the checkpoint."""
        shapes = self.shapes
        if self.entries:
            shapes = tuple(entry.stored(shape) for entry, shape in zip(self.entries, shapes, strict=True))
        return dict(zip(self.tensors, shapes, strict=False))


class Weight(nnx.Param[Any]):
    """A parameter with its PartitionSpec (`spec`), its `sources` and its `init` scale.

    Its last dimensions are those of a source; before them may be stages and slots of experts, and `sources` has one for
    each place there, the last dimension fastest. `init` is the standard deviation of fresh values, "ones" or "zeros".
    """

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Its global shape and dtype, before values are put into it."""
        shape: jax.ShapeDtypeStruct = self.get_value()
        return shape

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint tensors that it is made of, with their shapes."""
        return {tensor: shape for source in self.sources for tensor, shape in source.stored.items()}


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
    matrix = P(*(axes or None for axes in split))
    if isinstance(sources, Source):
        return Weight(jax.ShapeDtypeStruct(sources.shape, jnp.dtype(dtype)), spec=matrix, sources=(sources,), init=init)
    shape = (len(sources), *sources[0].shape)
    return Weight(
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), spec=P(stages or None, *matrix), sources=sources, init=init
    )


def residual_std(layers: int) -> float:
    """Initial scale of weights that write to the residual stream of a model with so many layers (GPT-2)."""
    return 0.02 / (2 * layers) ** 0.5


def expert_weight(
    sources: tuple[tuple[Source, ...], ...],
    over: tuple[str, ...],
    split: tuple[str | tuple[str, ...] | None, ...],
    dtype: str,
    init: float | str,
    stages: tuple[str, ...],
) -> Weight:
    """Declare a weight of experts [stages, slots, ...]: one Source for each slot of each stage, slots over axes `over`.

    The other arguments are those of `weight`.
    """
    shape = (len(sources), len(sources[0]), *sources[0][0].shape)
    spec = P(stages or None, over or None, *(axes or None for axes in split))
    flat = tuple(source for stage in sources for source in stage)
    return Weight(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), spec=spec, sources=flat, init=init)
