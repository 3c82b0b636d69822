"""Weights of a GGUF file of the llama family, under their Hugging Face names and in their Hugging Face order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import ml_dtypes
import numpy as np

from jaxpar.checkpoint.byte_ranges import bounds_of
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.gguf_file import GgufFile, GgufTensor
from jaxpar.checkpoint.reader import TensorInfo
from jaxpar.errors import CheckpointError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_CHUNK_VALUES = 1 << 20
"""Values that are dequantized at a time: bounds the temporaries at a few times 4 MiB."""


class GgufReader:
    """The tensors of a GGUF file (see TensorReader); quantized ones are dequantized to float32 as they are read.

    Only the blocks that a slice touches are read and dequantized, so that slices of one tensor together cost what
    the whole tensor costs once.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._tensors = {hugging_face_name(name): tensor for name, tensor in file.tensors.items()}
        # The rotary frequency factors are part of the configuration (see gguf_config).
        self._tensors.pop("rope_freqs.weight", None)
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._head_dim = config.head_dim

    def names(self) -> Collection[str]:
        """Every tensor's name; a tensor that llama does not have keeps its name in the file."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape, element type and file of a tensor (see TensorReader)."""
        tensor = self._find(name)
        return TensorInfo(tensor.shape, _PLAIN.get(tensor.kind, np.dtype(np.float32)), self._file.path)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of a tensor (see TensorReader)."""
        tensor = self._find(name)
        bounds = bounds_of(index, tensor.shape)
        heads = self._heads.get(name.split(".")[-2]) if name.startswith("model.layers.") else None
        if heads is None:
            return self._read(tensor, bounds)
        if tensor.shape[0] != heads * self._head_dim:
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name} has {tensor.shape[0]} rows, expected {heads} heads of "
                f"{self._head_dim}; convert the model again"
            )
        # Rows are permuted within each head, so whole heads are read.
        (start, stop), *rest = bounds
        first, last = start // self._head_dim, -(-stop // self._head_dim)
        whole = self._read(tensor, [(first * self._head_dim, last * self._head_dim), *rest])
        return unpermute(whole, self._head_dim)[start - first * self._head_dim : stop - first * self._head_dim]

    def close(self) -> None:
        """Close the file."""
        self._file.ranges.close()

    def _find(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self._file.path}: tensor {name} is missing among {len(self._tensors)} tensors; fetch the file again"
            )
        return self._tensors[name]

    def _read(self, tensor: GgufTensor, bounds: list[tuple[int, int]]) -> np.ndarray:
        """The values of `tensor` within `bounds`, in the order in which the file has them."""
        ranges = self._file.ranges
        if tensor.kind in _PLAIN:
            index = tuple(slice(*bound) for bound in bounds)
            return ranges.read_array(tensor.offset, tensor.shape, _PLAIN[tensor.kind], index)
        # As bytes, a row is its blocks one after another: the columns wanted are some of the blocks, cut to size.
        *outer, (start, stop) = bounds if len(bounds) > 1 else [(0, 1), *bounds]
        first, last = start // tensor.block_size, -(-stop // tensor.block_size)
        columns = slice(start - first * tensor.block_size, stop - first * tensor.block_size)
        blocks = slice(first * tensor.block_bytes, last * tensor.block_bytes)
        byte_shape = (*(tensor.shape[:-1] or (1,)), tensor.row_bytes)
        result = np.empty([*(high - low for low, high in outer), stop - start], np.float32)
        if result.size == 0:
            return result.reshape([high - low for low, high in bounds])
        row_values = math.prod(result.shape[1:-1]) * (last - first) * tensor.block_size
        rows = max(1, _CHUNK_VALUES // row_values)
        for done in range(0, len(result), rows):
            row = outer[0][0] + done
            chunk = (slice(row, min(row + rows, outer[0][1])), *(slice(*bound) for bound in outer[1:]), blocks)
            stored = ranges.read_array(tensor.offset, byte_shape, np.dtype(np.uint8), chunk)
            result[done : done + rows] = self._dequantize(tensor, stored)[..., columns]
        return result.reshape([high - low for low, high in bounds])

    def _dequantize(self, tensor: GgufTensor, stored: np.ndarray) -> np.ndarray:
        gguf = self._file.gguf
        try:
            with np.errstate(all="ignore"):  # a scale that is not finite is the file's own
                return gguf.dequantize(stored, gguf.GGMLQuantizationType[tensor.kind])
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name} is {tensor.kind}, which the gguf library does not dequantize"
                "; use a file of another quantization"
            ) from error


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a llama tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name


def unpermute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of Q or K, [heads * head_dim, ...], from GGUF's order of rotary pairs to that of Hugging Face.

    GGUF pairs neighbours (0, 1), (2, 3), ...; Hugging Face pairs (0, d/2), (1, d/2 + 1), ...
    """
    pairs = weight.reshape(len(weight) // head_dim, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
