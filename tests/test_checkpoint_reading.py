"""Slices of safetensors files are read exactly, and a directory that is not what it says is refused by name."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import error_of
from safetensors.numpy import save, save_file

from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.byte_ranges import ByteRanges
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader
from jaxpar.errors import CheckpointError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MATRIX = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
ARRAY = np.arange(5 * 4 * 6, dtype=np.int16).reshape(5, 4, 6)


def shards(directory: Path, weight_map: dict[str, Any], **files: dict[str, np.ndarray]) -> Path:
    """A directory of named shards with an index."""
    for name, tensors in files.items():
        save_file(tensors, directory / f"{name}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def with_header(directory: Path, header: Any, data: bytes = bytes(16)) -> Path:
    """A directory whose safetensors file has a header written by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_slices_hold_the_values_that_were_saved_in_their_own_type(tmp_path: Path, dtype: type):
    save_file({"w": MATRIX.astype(dtype), "scalar": np.array(3, dtype)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert set(reader.names()) == {"w", "scalar"}
    assert reader.info("w").shape == (24, 10)
    assert reader.info("w").file == tmp_path / "model.safetensors"
    for index in [(), (slice(3, 9),), (slice(None), slice(2, 5)), (slice(23, 24), slice(9, 10)), (slice(4, 4),)]:
        piece = reader.read("w", index)
        assert piece.dtype == reader.info("w").dtype == dtype
        np.testing.assert_array_equal(piece, MATRIX.astype(dtype)[index])
    assert reader.read("scalar", ()) == 3


@given(st.data())
def test_any_slice_of_an_array_in_a_file_is_that_of_the_array(tmp_path_factory: pytest.TempPathFactory, data: Any):
    file = tmp_path_factory.getbasetemp() / "array.bin"
    file.write_bytes(b"before" + ARRAY.tobytes())
    index = ()
    for size in ARRAY.shape[: data.draw(st.integers(0, ARRAY.ndim))]:
        start = data.draw(st.integers(0, size))
        index += (slice(start, data.draw(st.integers(start, size))),)
    ranges = ByteRanges(file)
    np.testing.assert_array_equal(ranges.read_array(6, ARRAY.shape, ARRAY.dtype, index), ARRAY[index])
    ranges.close()


@pytest.mark.parametrize("index", [(slice(0, 25),), (slice(-1, None),), (slice(0, 8, 2),), (slice(None),) * 3])
def test_an_index_outside_the_tensor_is_not_clipped(tmp_path: Path, index: tuple[slice, ...]):
    save_file({"w": MATRIX}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"\(24, 10\)"):
        SafetensorsReader(tmp_path).read("w", index)


@pytest.mark.parametrize("index", [(slice(0, 512),), (slice(None), slice(128, 256))])
def test_a_slice_takes_memory_for_itself_alone(tmp_path: Path, index: tuple[slice, ...]):
    save_file({"w": np.zeros((4096, 1024), np.float16)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    tracemalloc.start()
    piece = reader.read("w", index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert piece.nbytes == 1 << 20
    assert peak < 1.5 * piece.nbytes  # the whole tensor is 8 times as large


def test_reading_leaves_nothing_of_the_file_in_memory(tmp_path: Path, fresh_python: Callable[..., str]):
    size = 256 << 20
    header = {"w": {"dtype": "BF16", "shape": [8, size // 16], "data_offsets": [0, size]}}
    file = with_header(tmp_path, header, b"") / "model.safetensors"
    os.truncate(file, file.stat().st_size + size)  # a hole: it reads as zeros and takes no disk
    printed = fresh_python(f"""
from pathlib import Path
import re
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

reader = SafetensorsReader(Path({str(tmp_path)!r}))
before = peak()
for row in range(8):
    reader.read("w", (slice(row, row + 1),))
print(peak() - before)
""")
    assert int(printed) < 1.25 * size / 8


def test_shards_are_found_through_the_index(tmp_path: Path):
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": MATRIX}, two={"b": MATRIX + 1})
    reader = SafetensorsReader(tmp_path)
    assert set(reader.names()) == {"a", "b"}
    assert reader.info("b").file.name == "two.safetensors"
    np.testing.assert_array_equal(reader.read("b", (slice(2, 4),)), MATRIX[2:4] + 1)


def test_an_absent_shard_is_named(tmp_path: Path):
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": MATRIX})
    message = error_of(lambda: SafetensorsReader(tmp_path))
    assert "two.safetensors is absent, and model.safetensors.index.json names it for tensor b" in message


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path):
    shards(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}, one={"a": MATRIX})
    assert (
        "one.safetensors holds no tensor b, which model.safetensors.index.json says it does; fetch both again"
        in error_of(lambda: SafetensorsReader(tmp_path))
    )


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 1}, ["a"]])
def test_an_index_without_a_map_of_files_is_refused(tmp_path: Path, weight_map: Any):
    shards(tmp_path, weight_map)
    assert "weight_map" in error_of(lambda: SafetensorsReader(tmp_path))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", "", "a\0b"])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path, name: str):
    save_file({"a": MATRIX}, tmp_path / "outside.safetensors")
    directory = tmp_path / "model"
    directory.mkdir()
    shards(directory, {"a": name})
    assert "leads outside the model directory; put the file into it" in error_of(lambda: SafetensorsReader(directory))


def test_a_symlink_cannot_lead_out_of_the_directory(tmp_path: Path):
    save_file({"a": MATRIX}, tmp_path / "outside.safetensors")
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert "outside the model directory; copy the file" in error_of(lambda: SafetensorsReader(directory))


def test_a_symlink_into_the_blobs_of_the_hugging_face_cache_is_followed(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": MATRIX}, blobs / "f00d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    np.testing.assert_array_equal(SafetensorsReader(snapshot).read("a", ()), MATRIX)


def test_a_missing_tensor_is_named(tmp_path: Path):
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    assert "tensor b is missing among 1 tensors; fetch the weights and config.json again" in error_of(
        lambda: SafetensorsReader(tmp_path).info("b")
    )


def test_a_type_that_is_not_read_is_named_only_when_the_tensor_is_wanted(tmp_path: Path):
    save_file({"a": MATRIX, "b": MATRIX.astype(np.int64)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    np.testing.assert_array_equal(reader.read("a", ()), MATRIX)
    assert "tensor b is I64, expected one of F32, F16, BF16" in error_of(lambda: reader.read("b", ()))


def test_a_truncated_file_names_the_tensor_that_it_cuts(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"a": MATRIX[:1], "w": MATRIX}, file)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    message = error_of(lambda: SafetensorsReader(tmp_path))
    assert f"ends at byte {size - 1}, and tensor w at {size}; it is truncated" in message


def test_a_file_that_shrinks_after_it_was_opened_is_an_error_and_no_crash(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(1 << 20, np.float32)}, file)
    reader = SafetensorsReader(tmp_path)
    os.truncate(file, 1 << 20)
    message = error_of(lambda: reader.read("w", ()))
    assert f"ends at byte {1 << 20}; it was truncated while being read, fetch it again" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it is truncated, fetch it again"),
        (b"\x00" * 7, "truncated"),
        (b"GIF89a, and so on", "or no safetensors file, fetch it again"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of 1099511627776 bytes in a file of 10"),
        ((4).to_bytes(8, "little") + b"nope", "is not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "holds a JSON list"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, expected: str):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert expected in error_of(lambda: SafetensorsReader(tmp_path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"shape": [2, -2]}, "w: shape is [2, -2], expected a list"),
        ({"shape": [2, 2.0]}, "w: shape is [2, 2.0]"),
        ({"shape": [1] * 100}, "w: shape is [1, 1, 1, 1, 1, 1, ...], expected a list of at most 8 sizes"),
        ({"shape": [2, 3]}, "tensor w has 16 bytes, expected 24 for F32 of shape [2, 3]; fetch it again"),
        ({"shape": [2**31, 2**31]}, "w: shape is"),
        ({"data_offsets": [16, 0]}, "w: data_offsets is [16, 0]"),
        ({"data_offsets": [0]}, "w: data_offsets is [0]"),
        ({"data_offsets": [0, 10**30]}, "it is truncated"),
        ({"dtype": 32}, "w: dtype is 32"),
        ({"dtype": None}, "w: dtype is None"),
    ],
)
def test_a_broken_header_is_refused_by_name(tmp_path: Path, change: dict[str, Any], expected: str):
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    with_header(tmp_path, {"__metadata__": {"format": "np"}, "w": entry})
    assert SafetensorsReader(tmp_path).read("w", ()).tolist() == [[0, 0], [0, 0]]
    with_header(tmp_path, {"w": entry | change})
    assert expected in error_of(lambda: SafetensorsReader(tmp_path))


@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_damage_anywhere_in_a_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, damage: bytes
):
    content = bytearray(save({"a": MATRIX, "b": ARRAY.astype(np.float16)}))
    content[position : position + len(damage)] = damage
    directory = tmp_path_factory.getbasetemp()
    (directory / "model.safetensors").write_bytes(content)
    try:
        reader = SafetensorsReader(directory)
        for name in reader.names():
            assert reader.read(name, ()).shape == reader.info(name).shape
    except CheckpointError:
        pass


def test_a_directory_opens_as_description_weights_and_no_tokenizer(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": MATRIX}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.vocab_size == 16
    np.testing.assert_array_equal(checkpoint.require_reader().read("w", ()), MATRIX)
    assert checkpoint.tokenizer is None
    assert "has no tokenizer; give token ids" in error_of(checkpoint.require_tokenizer)
    checkpoint.close()


def test_a_bare_config_is_a_model_without_weights(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    for path in (tmp_path, file):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config.vocab_size == 16
        assert checkpoint.reader is None
        assert "no model.safetensors" in error_of(checkpoint.require_reader)


def test_pickled_weights_are_not_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    message = error_of(open_checkpoint(tmp_path).require_reader)
    assert "save pytorch_model.bin as safetensors" in message


def test_a_path_that_is_no_model_is_refused_with_what_is_there_and_what_is_wanted(tmp_path: Path):
    wanted = "give a Hugging Face model directory, its config.json, or a GGUF file"
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path, found in [
        (tmp_path / "absent", "no such file or directory"),
        (tmp_path / "empty", "no config.json, it is empty"),
        (tmp_path, "no config.json, it holds empty, notes.txt"),
        (tmp_path / "notes.txt", "is not a model"),
    ]:
        message = error_of(lambda path=path: open_checkpoint(path))
        assert str(path) in message
        assert found in message
        assert wanted in message


def test_a_pipe_is_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    assert "config.json is not a regular file" in error_of(lambda: open_checkpoint(tmp_path))
