"""Saving is the inverse of loading, on every mesh, and leaves whole directories or none."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from oracle_data import ORACLES, ROOT

from jaxpar.checkpoint.hf_config import read_config
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader
from jaxpar.checkpoint.save import collect_tensors, config_document, staged, write_model, write_tensors
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.errors import CheckpointError
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs

WITH_EXPERTS = ("mixtral", "qwen3_moe", "qwen3_moe_dense")
"""Oracles of architectures whose experts can be written."""


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    reader = SafetensorsReader(directory)
    return {name: reader.read(name, ()) for name in reader.names()}


def round_trip(name: str, mesh: str) -> dict[str, np.ndarray]:
    """An oracle's tensors, read onto a mesh in their own dtype and collected from it."""
    config, spec = read_config(ROOT / name), MeshSpec.parse(mesh)
    programs = Programs(config, Plan(mesh=spec, dtype=config.dtype), make_mesh(spec, ensure_devices(spec)))
    arrays = load_weights(programs.weights, SafetensorsReader(ROOT / name), programs.mesh)
    return collect_tensors(programs.weights, arrays)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# Six experts over four ranks leave one of them without any.
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *itertools.product(ORACLES, ["tp=1", "dp=2,tp=4", "tp=3"]),
        *itertools.product(WITH_EXPERTS, ["ep=4", "ep=2,tp=3"]),
    ],
)
def test_tensors_collected_from_a_mesh_are_those_of_the_checkpoint(name: str, mesh: str) -> None:
    assert_same(round_trip(name, mesh), read_tensors(ROOT / name))


@pytest.mark.parametrize("name", [*ORACLES, *WITH_EXPERTS])
def test_a_saved_configuration_reads_back_as_it_was(name: str, tmp_path: Path) -> None:
    config = read_config(ROOT / name)
    (tmp_path / "config.json").write_text(json.dumps(config_document(config)))
    assert read_config(tmp_path) == config


def test_experts_of_an_architecture_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"^experts of deepseek_v3 cannot be written: choose mixtral or qwen3_moe$"
    ):
        config_document(read_config(ROOT / "deepseek_v3"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_saved_model_has_the_tensors_in_the_dtype_of_its_configuration(tmp_path: Path, dtype: str) -> None:
    config = dataclasses.replace(read_config(ROOT / "llama"), dtype=dtype)
    tensors = read_tensors(ROOT / "llama")
    with staged(tmp_path / "saved") as folder:
        write_model(folder, config, tensors)
    numpy_dtype = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    assert_same(read_tensors(tmp_path / "saved"), {name: value.astype(numpy_dtype) for name, value in tensors.items()})
    assert read_config(tmp_path / "saved") == config


def test_a_save_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    for existed in (False, True):
        with pytest.raises(KeyboardInterrupt), staged(tmp_path / "saved") as folder:
            (folder / "model.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt
        assert (tmp_path / "saved").exists() == existed
        (tmp_path / "saved").mkdir(exist_ok=True)
        assert list((tmp_path / "saved").iterdir()) == []


def test_a_save_keeps_what_else_a_directory_holds(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with staged(tmp_path) as folder:
        (folder / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "config.json"}
    assert (tmp_path / "notes").read_text() == "mine"


def test_config_comes_last_so_that_a_directory_with_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    monkeypatch.setattr("jaxpar.checkpoint.save.os.replace", lambda source, target: moved.append(target.name))
    with staged(tmp_path) as folder:
        for name in ("config.json", "a.json", "model.safetensors"):
            (folder / name).write_text("{}")
    assert moved == ["a.json", "model.safetensors", "config.json"]


def test_a_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="already holds a model"), staged(tmp_path):
        raise AssertionError("it was opened")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            CheckpointError, match=r"file/model cannot be written: Not a directory; choose another directory"
        ),
        staged(tmp_path / "file" / "model"),
    ):
        raise AssertionError("it was opened")


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.safetensors"
    write_tensors(path, {"a": np.ones(3, np.float32)}, {})
    before = path.read_bytes()

    def full_disk(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors cannot be written: No space left"):
        write_tensors(path, {"a": np.zeros(4, np.float32)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saved_files_can_be_read_by_everyone_that_the_umask_allows(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"a": np.ones(3, np.float32)}, {})
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode
