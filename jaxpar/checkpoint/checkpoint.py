"""A model on disk, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.files import one_line, path_inside
from jaxpar.checkpoint.gguf_config import gguf_config
from jaxpar.checkpoint.gguf_file import GgufFile
from jaxpar.checkpoint.gguf_reader import GgufReader
from jaxpar.checkpoint.gguf_tokenizer import gguf_tokenizer
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.checkpoint.mxfp4_reader import Mxfp4Reader
from jaxpar.checkpoint.reader import TensorReader
from jaxpar.checkpoint.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from jaxpar.checkpoint.tokenizer import Tokenizer, read_tokenizer
from jaxpar.errors import CheckpointError

_WANTED = "give a Hugging Face model directory, its config.json, or a GGUF file"


@dataclass
class Checkpoint:
    """A model: its description, its weights (None where there is only a config.json) and, read when asked, its text."""

    path: Path
    config: ModelConfig
    reader: TensorReader | None
    _gguf: GgufFile | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if there is none that can be read: token ids need none."""
        try:
            return self._read_tokenizer()
        except CheckpointError:  # said by `require_tokenizer`, where text is used
            return None

    def require_reader(self) -> TensorReader:
        """The weights.

        Raises:
            CheckpointError: if there are none.
        """
        if self.reader is None:
            others = self.path.is_dir() and sorted(file.name for file in self.path.glob("*.bin"))
            remedy = f"save {others[0]} as safetensors" if others else "fetch the model's weights"
            raise CheckpointError(f"{self.path} has no {SINGLE_FILE} or {INDEX_FILE}; {remedy}")
        return self.reader

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            CheckpointError: if there is none, or it cannot be read.
        """
        tokenizer = self.tokenizer or self._read_tokenizer()
        if tokenizer is None:
            raise CheckpointError(f"{self.path} has no tokenizer; give token ids, or add the model's tokenizer.json")
        return tokenizer

    def _read_tokenizer(self) -> Tokenizer | None:
        if self._gguf is not None:
            return gguf_tokenizer(self._gguf)
        return read_tokenizer(self.path) if self.path.is_dir() else None

    def close(self) -> None:
        """Close the files of the weights."""
        if self.reader is not None:
            self.reader.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`: a Hugging Face directory, a config.json alone (no weights), or a GGUF file.

    Raises:
        CheckpointError: if there is no model that can be read, with what is wrong and the remedy.
    """
    try:
        return _open_directory(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error


def _open_file(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory; {_WANTED}")
    if path.suffix == ".json":
        return Checkpoint(path, read_config(path), reader=None)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is not a model; {_WANTED}")
    file = GgufFile(path)
    try:
        config = gguf_config(file)
    except CheckpointError:
        file.ranges.close()
        raise
    return Checkpoint(path, config, GgufReader(file, config), _gguf=file)


def _open_directory(path: Path) -> Checkpoint:
    if not path_inside(path, "config.json").exists():
        inside = sorted(file.name for file in path.iterdir())
        found = f"it holds {', '.join(inside[:3])}{', ...' if len(inside) > 3 else ''}" if inside else "it is empty"
        raise CheckpointError(f"{path} is not a model directory: no config.json, {found}; {_WANTED}")
    config = read_config(path)
    has_weights = any(path_inside(path, name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    if not has_weights:
        return Checkpoint(path, config, reader=None)
    return Checkpoint(path, config, Mxfp4Reader(path) if config.model_type == "gpt_oss" else SafetensorsReader(path))
