"""Weights on the mesh: every device has its own slice, read from the file once, zeros where there is nothing."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from sample_models import write_model

from jaxpar.checkpoint import TensorInfo, open_checkpoint
from jaxpar.checkpoint.load import load_weights, pieces, read_slice
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.errors import CheckpointError
from jaxpar.heads import PADDED, split_heads
from jaxpar.mesh import MeshSpec
from jaxpar.nn.decoder import Decoder
from jaxpar.nn.weights import ZEROS, Block, Source, Weight
from jaxpar.plan import Plan

LAYERS = 4
MESHES = ["tp=1", "dp=2,tp=4", "dp=4,tp=2", "tp=3", "tp=8"]


class Counting:
    """A reader that notes what is read: (tensor, number of values)."""

    def __init__(self, directory: Path) -> None:
        checkpoint = open_checkpoint(directory)
        self.config, self.inner = checkpoint.config, checkpoint.require_reader()
        self.reads: list[tuple[str, int]] = []

    def names(self) -> Collection[str]:
        return self.inner.names()

    def info(self, name: str) -> TensorInfo:
        return self.inner.info(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        values = self.inner.read(name, index)
        self.reads.append((name, values.size))
        return values

    def whole(self, name: str) -> np.ndarray:
        return self.inner.read(name, ())

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 query and 3 KV heads, a vocabulary of 101 and a width of 34: nothing divides by 4."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": LAYERS, "attention_bias": True}
    rng, biases = np.random.default_rng(1), {}
    for layer in range(LAYERS):
        for name, size in (("q", 72), ("k", 24), ("v", 24), ("o", 24)):
            bias = rng.standard_normal(size).astype(np.float32)
            biases[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    return write_model(tmp_path_factory.mktemp("model"), tensors=biases, **heads)


def load(directory: Path, mesh: str, **plan: Any) -> tuple[Counting, dict[str, Weight], dict[str, jax.Array]]:
    """(reader, weights as declared, arrays); any mesh can hold weights, also those that cannot run yet."""
    reader, spec = Counting(directory), MeshSpec.parse(mesh)
    _, state = nnx.split(Decoder(reader.config, Plan(spec, **plan)))
    weights = {".".join(map(str, path)): weight for path, weight in nnx.to_flat_state(state)}
    return reader, weights, load_weights(weights, reader, make_mesh(spec, ensure_devices(spec)))


def on_tp_ranks(array: jax.Array, mesh: str) -> list[np.ndarray]:
    """What every tp rank holds, after it is checked that all replicas hold the same."""
    spec, held = MeshSpec.parse(mesh), {}
    devices = {device: rank for rank, device in enumerate(array.sharding.mesh.devices.flat)}
    for shard in array.addressable_shards:
        tp = spec.coordinates(devices[shard.device])["tp"]
        np.testing.assert_array_equal(held.setdefault(tp, np.asarray(shard.data)), shard.data)
    return [held[tp] for tp in range(spec.tp)]


def heads_of(matrix: np.ndarray, heads: tuple[int, ...], size: int = 8) -> np.ndarray:
    """Rows of the given heads, zeros for those that are padding."""
    rows = matrix.reshape(-1, size, *matrix.shape[1:])
    return np.concatenate([np.zeros_like(rows[0]) if head == PADDED else rows[head] for head in heads])


# Values


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_the_queries_keys_and_values_of_its_heads_with_their_biases(directory: Path, mesh: str) -> None:
    reader, _, arrays = load(directory, mesh)
    tp = MeshSpec.parse(mesh).tp
    heads = split_heads(9, 3, tp)
    for layer in range(LAYERS):
        for kind in ("weight", "bias"):
            q, k, v = (reader.whole(f"model.layers.{layer}.self_attn.{name}_proj.{kind}") for name in "qkv")
            for rank, found in enumerate(on_tp_ranks(arrays[f"slots.{layer}.attention.qkv.{kind}"], mesh)):
                kv = heads.kv_heads[rank * heads.kv_local :][: heads.kv_local]
                queries = heads.q_heads[rank * heads.q_local :][: heads.q_local]
                expected = [heads_of(q, queries), heads_of(k, kv), heads_of(v, kv)]
                np.testing.assert_array_equal(found[0], np.concatenate(expected))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_output_projection_has_the_columns_of_its_query_heads(directory: Path, mesh: str) -> None:
    reader, _, arrays = load(directory, mesh)
    heads = split_heads(9, 3, MeshSpec.parse(mesh).tp)
    whole = reader.whole("model.layers.2.self_attn.o_proj.weight")
    for rank, found in enumerate(on_tp_ranks(arrays["slots.2.attention.out.weight"], mesh)):
        queries = heads.q_heads[rank * heads.q_local :][: heads.q_local]
        np.testing.assert_array_equal(found[0].T, heads_of(whole.T, queries))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_width_and_the_vocabulary_are_split_evenly_and_padded_with_zeros(directory: Path, mesh: str) -> None:
    reader, _, arrays = load(directory, mesh)
    tp = MeshSpec.parse(mesh).tp

    def split(matrix: np.ndarray) -> list[np.ndarray]:
        rows = -(-matrix.shape[0] // tp)
        return np.split(np.pad(matrix, ((0, rows * tp - matrix.shape[0]), (0, 0))), tp)

    mlp = "model.layers.1.mlp."
    gate, up = (split(reader.whole(f"{mlp}{name}_proj.weight")) for name in ("gate", "up"))
    down = split(reader.whole(f"{mlp}down_proj.weight").T)
    rows = split(reader.whole("model.embed_tokens.weight"))
    for rank in range(tp):
        both = on_tp_ranks(arrays["slots.1.ffn.gate_up.weight"], mesh)[rank]
        np.testing.assert_array_equal(both[0], np.concatenate([gate[rank], up[rank]]))
        np.testing.assert_array_equal(on_tp_ranks(arrays["slots.1.ffn.down.weight"], mesh)[rank][0].T, down[rank])
        np.testing.assert_array_equal(on_tp_ranks(arrays["embedding"], mesh)[rank], rows[rank])


def test_norms_and_the_bias_after_the_sum_are_whole_on_every_rank(directory: Path) -> None:
    reader, _, arrays = load(directory, "dp=2,tp=4")
    for found in on_tp_ranks(arrays["slots.0.attention.out.bias"], "dp=2,tp=4"):
        np.testing.assert_array_equal(found[0], reader.whole("model.layers.0.self_attn.o_proj.bias"))
    for found in on_tp_ranks(arrays["norm"], "dp=2,tp=4"):
        np.testing.assert_array_equal(found, reader.whole("model.norm.weight"))


def test_weights_come_in_the_dtype_of_the_plan(directory: Path) -> None:
    reader, _, arrays = load(directory, "tp=2", dtype="bfloat16")
    assert {str(array.dtype) for array in arrays.values()} == {"bfloat16"}
    expected = reader.whole("model.embed_tokens.weight").astype("bfloat16")
    np.testing.assert_array_equal(np.asarray(arrays["embedding"])[:101], expected)


@pytest.mark.parametrize(
    ("mesh", "stages", "slots"),
    [
        ("pp=2,tp=2", "even", [(0, 2), (1, 3)]),
        ("pp=4,dp=2", "even", [(0, 1, 2, 3)]),
        ("pp=3", "even", [(0, 2, 3), (1, None, None)]),
        ("pp=2", "1,3", [(0, 1), (None, 2), (None, 3)]),
    ],
)
def test_a_stage_holds_its_own_layers_in_the_leading_dimension_and_zeros_for_absent_ones(
    directory: Path, mesh: str, stages: str, slots: list[tuple[int | None, ...]]
) -> None:
    reader, _, arrays = load(directory, mesh, stages=stages)
    spec = MeshSpec.parse(mesh)
    devices = {device: rank for rank, device in enumerate(make_mesh(spec, ensure_devices(spec)).devices.flat)}
    for slot, layers in enumerate(slots):
        for shard in arrays[f"slots.{slot}.attention.out.weight"].addressable_shards:
            at = spec.coordinates(devices[shard.device])
            assert shard.data.shape[0] == 1
            layer = layers[at["pp"]]
            if layer is None:
                assert not np.asarray(shard.data).any()
                continue
            whole = reader.whole(f"model.layers.{layer}.self_attn.o_proj.weight")
            heads = split_heads(9, 3, spec.tp)
            queries = heads.q_heads[at["tp"] * heads.q_local :][: heads.q_local]
            np.testing.assert_array_equal(shard.data[0].T, heads_of(whole.T, queries))


# What is read


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=8", "tp=3", "pp=3,dp=2", "pp=2,tp=3"])
def test_every_value_of_a_split_tensor_is_read_once_whatever_the_replicas(directory: Path, mesh: str) -> None:
    reader, _, _ = load(directory, mesh)
    for name in reader.names():
        # No head is copied on these meshes, so that nothing is needed twice.
        assert sum(size for read, size in reader.reads if read == name) == math.prod(reader.info(name).shape), name


def test_no_read_is_larger_than_a_ranks_share(directory: Path) -> None:
    reader, weights, _ = load(directory, "tp=4")
    shares = {
        tensor: math.prod(weight.abstract.shape) // 4
        for weight in weights.values()
        for tensor in weight.tensors
        if any(weight.spec)
    }
    assert {name for name, _ in reader.reads if name not in shares and "norm" not in name} == {
        f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(LAYERS)
    }
    assert all(size <= shares[name] for name, size in reader.reads if name in shares)


def test_a_copied_kv_head_is_read_for_each_rank_that_holds_it(directory: Path) -> None:
    reader, _, _ = load(directory, "tp=6")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert sum(size for read, size in reader.reads if read == name) == 2 * math.prod(reader.info(name).shape)


# What is refused


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read."""
    names: list[str] = []
    monkeypatch.setattr(Counting, "read", lambda self, name, index: names.append(name))
    return names


def test_a_tensor_of_the_wrong_shape_is_refused_before_any_is_read(tmp_path: Path, reads: list[str]) -> None:
    wrong = {"model.layers.0.mlp.down_proj.weight": np.zeros((24, 33), np.float32)}
    with pytest.raises(CheckpointError) as raised:
        load(write_model(tmp_path, tensors=wrong), "tp=2")
    assert str(raised.value) == (
        f"{tmp_path}/model.safetensors: tensor model.layers.0.mlp.down_proj.weight has shape [24, 33], but config.json "
        "asks for [24, 34]; the configuration and the weights are not of the same model, fetch both again"
    )
    assert reads == []


def test_a_missing_tensor_is_refused_before_any_is_read(tmp_path: Path, reads: list[str]) -> None:
    write_model(tmp_path, tie_word_embeddings=True)
    config = (
        (tmp_path / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight is missing among 11 tensors; fetch the weights"):
        load(tmp_path, "tp=2")
    assert reads == []


# Slices of a weight that is pieced together


class Arrays:
    """A reader of arrays in memory."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self.arrays[int(name)][index]


@st.composite
def sources(draw: Any) -> tuple[Source, list[np.ndarray], np.ndarray]:
    """A weight made of blocks of up to three tensors, and what it should be."""
    dim = draw(st.sampled_from([0, 1]))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    arrays = [1 + 100 * t + np.arange(size * 3, dtype=np.float32).reshape(size, 3) for t, size in enumerate(sizes)]
    blocks, parts = [], []
    for _ in range(draw(st.integers(1, 5))):
        tensor, rows = draw(st.integers(ZEROS, len(sizes) - 1)), draw(st.integers(1, 6))
        part = np.zeros((rows, 3), np.float32)
        start = 0 if tensor == ZEROS else draw(st.integers(0, sizes[tensor]))
        if tensor != ZEROS:
            inside = arrays[tensor][start : start + rows]
            part[: len(inside)] = inside
        blocks.append(Block(tensor, start, rows))
        parts.append(part)
    expected = np.concatenate(parts)
    if dim:
        arrays, expected = [x.T for x in arrays], expected.T
    names = tuple(str(t) for t in range(len(sizes)))
    return Source(names, tuple(x.shape for x in arrays), tuple(blocks), dim), arrays, expected


@given(sources(), st.data())
def test_any_slice_of_any_blocks_is_that_of_the_whole_weight(built: Any, data: Any) -> None:
    source, arrays, expected = built
    assert source.shape == expected.shape
    bounds = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size - 1))
        bounds.append((start, data.draw(st.integers(start + 1, size))))
    found = read_slice((source,), source.shape, tuple(bounds), Arrays(arrays), np.dtype(np.float32))
    np.testing.assert_array_equal(found, expected[tuple(slice(*bound) for bound in bounds)])


def test_neighbouring_blocks_are_one_read() -> None:
    source = Source(("a", "b"), ((12, 3), (4, 3)), (Block(0, 0, 4), Block(0, 4, 4), Block(1, 0, 4), Block(ZEROS, 0, 2)))
    assert list(pieces(source, 0, 14)) == [(0, 0, 0, 8), (1, 0, 8, 4)]
    assert list(pieces(source, 2, 10)) == [(0, 2, 0, 6), (1, 0, 6, 2)]
    assert list(pieces(source, 12, 14)) == []
