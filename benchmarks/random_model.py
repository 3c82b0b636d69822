"""Llama models of any size with random weights: every tensor is made, alike on every mesh, when it is read."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.checkpoint.reader import TensorInfo
from jaxpar.devices import abstract_mesh
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs


def llama(
    layers: int, hidden: int, ffn: int, queries: int, keys: int, vocabulary: int, dtype: str = "float32"
) -> ModelConfig:
    """A llama with heads of 64, `queries` query and `keys` KV ones, and an untied vocabulary head."""
    return ModelConfig(
        model_type="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=64,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope=RopeConfig(),
        windows=(None,) * layers,
        dtype=dtype,
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of this model."""
    programs = Programs(config, Plan(), abstract_mesh(MeshSpec()))
    return {tensor: shape for weight in programs.weights.values() for tensor, shape in weight.tensors.items()}


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of the tensor `name`: matrices ~ N(0, 1/fan_in), so that activations neither vanish nor grow; norms 1."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)


class RandomReader:
    """A checkpoint of random weights that is on no disk (a `jaxpar.checkpoint.reader.TensorReader`)."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = tensor_shapes(config)
        # The slices of one weight are read one after the other; a fused one is of three tensors.
        self._values = lru_cache(maxsize=3)(lambda name: random_tensor(name, self._shapes[name]))

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._shapes

    def info(self, name: str) -> TensorInfo:
        """Shape and element type of a tensor."""
        return TensorInfo(self._shapes[name], np.dtype(np.float32), Path("random"))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor."""
        return self._values(name)[index]

    def close(self) -> None:
        """Nothing is open."""
