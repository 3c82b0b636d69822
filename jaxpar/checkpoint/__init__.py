"""Reading a model from disk: its description, its weights slice by slice, and its tokenizer."""

from __future__ import annotations

from jaxpar.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxpar.checkpoint.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig
from jaxpar.checkpoint.gguf_config import read_gguf_config
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.checkpoint.reader import TensorInfo, TensorReader
from jaxpar.checkpoint.stream_decoder import StreamDecoder
from jaxpar.checkpoint.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "RouterConfig",
    "StreamDecoder",
    "TensorInfo",
    "TensorReader",
    "Tokenizer",
    "open_checkpoint",
    "read_config",
    "read_gguf_config",
]
