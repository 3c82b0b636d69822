"""A training run can be interrupted and goes on to the same losses; the command makes a model from a text file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save
from typer.testing import CliRunner, Result

import jaxpar
from jaxpar.checkpoint.config import ModelConfig, MoEConfig, RopeConfig, RouterConfig
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.checkpoint.hf_moe import QWEN3_TENSORS
from jaxpar.cli.train import train as train_command
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.errors import CheckpointError, JaxparError, RequestError
from jaxpar.mesh import MeshSpec
from jaxpar.nn.weights import Weight
from jaxpar.plan import Plan
from jaxpar.train.checkpoint import CHECKPOINT_FILE, RunCheckpoint, fresh_tensors, write_checkpoint
from jaxpar.train.data import read_documents
from jaxpar.train.loop import TrainReport, recipe, train
from jaxpar.train.settings import TrainSettings

RUN = TrainSettings(steps=5, batch=4, length=8, learning_rate=0.01, seed=0, checkpoint_every=2)
RUN_MESH = MeshSpec(dp=2, tp=2)
TINY = ModelConfig(
    model_type="llama",
    vocab_size=270,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope=RopeConfig("yarn", factor=8.0, original_max_position_embeddings=8),
    windows=(None,),
    bos_token_id=0,
    eos_token_ids=(1,),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\f".join(f"Chapter {i}: it is a truth universally acknowledged, that {i * i}." for i in range(80)))
    return path


def run(text: Path, out: Path, stop_after: int = 0, mesh: MeshSpec = RUN_MESH) -> TrainReport:
    def on_step(done: int, loss: float) -> None:
        if done == stop_after:
            raise KeyboardInterrupt

    return train(text, out, TINY, Plan(mesh=mesh), make_mesh(mesh, ensure_devices(mesh)), RUN, on_step)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainReport]:
    """An unbroken run."""
    out = tmp_path_factory.mktemp("run") / "made" / "with its parents"
    return out, run(text, out)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_that_was_interrupted_goes_on_to_the_same_losses_and_the_same_model(
    text: Path, tmp_path: Path, finished: tuple[Path, TrainReport]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(text, out, stop_after=3)
    assert files(out) == {CHECKPOINT_FILE}
    report = run(text, out)
    unbroken_out, unbroken = finished
    assert report.losses == unbroken.losses
    assert report.validation == unbroken.validation
    assert (out / "model.safetensors").read_bytes() == (unbroken_out / "model.safetensors").read_bytes()


def test_a_run_that_was_interrupted_goes_on_on_another_mesh(
    text: Path, tmp_path: Path, finished: tuple[Path, TrainReport]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path, stop_after=3, mesh=MeshSpec())
    report = run(text, tmp_path)
    assert report.losses == pytest.approx(finished[1].losses, rel=1e-6)


def test_a_run_interrupted_before_its_first_checkpoint_leaves_nothing(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(text, out, stop_after=1, mesh=MeshSpec())
    assert not out.exists()


def test_a_finished_run_leaves_a_model_its_tokenizer_and_its_curve(finished: tuple[Path, TrainReport]) -> None:
    out, report = finished
    curve = json.loads((out / "loss.json").read_text())
    assert files(out) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "loss.json",
        "loss.png",
    }
    assert read_config(out) == TINY
    assert curve["training"] == [round(loss, 5) for loss in report.losses]
    assert [point["step"] for point in curve["validation"]] == [2, 4, 5]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report.parameters == 270 * 16 + 16 * (16 + 2 * 8 + 16 + 3 * 24) + 3 * 16


def test_a_finished_model_is_not_trained_over(text: Path, finished: tuple[Path, TrainReport]) -> None:
    with pytest.raises(CheckpointError, match="already holds a model"):
        run(text, finished[0])


def test_a_checkpoint_of_another_run_is_refused_with_the_difference(text: Path, tmp_path: Path) -> None:
    empty = RunCheckpoint({}, {}, {}, [], [])
    documents = read_documents(text)
    for settings, changed in ((dataclasses.replace(RUN, seed=5), "seed=5, not 0"), (RUN, "text_sha256=")):
        other = documents if settings != RUN else documents[1:]
        write_checkpoint(tmp_path / CHECKPOINT_FILE, empty, recipe(other, TINY, settings))
        with pytest.raises(RequestError, match=f"that of a run with {changed}"):
            run(text, tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", save({"a": np.ones(3)})])
def test_a_broken_checkpoint_is_refused_by_name(text: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / CHECKPOINT_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{CHECKPOINT_FILE} is not the checkpoint of a training run"):
        run(text, tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weights: dict[str, Weight], seed: int) -> dict[str, np.ndarray]:
        return {name: value * np.nan for name, value in fresh_tensors(weights, seed).items()}

    monkeypatch.setattr("jaxpar.train.loop.fresh_tensors", broken)
    with pytest.raises(JaxparError, match=r"loss of step 1 is nan: use a smaller learning rate"):
        run(text, tmp_path / "out", mesh=MeshSpec())
    assert not (tmp_path / "out").exists()


# --- the command ---


def command(text: Path, out: Path, *more: str) -> Result:
    app = typer.Typer()
    app.command()(train_command)
    sizes = {"steps": 2, "batch": 4, "length": 8, "hidden": 16, "layers": 1, "heads": 4, "kv-heads": 2, "ffn": 24}
    options = [f"--{name}={size}" for name, size in (sizes | {"vocab": 270}).items()]
    return CliRunner().invoke(app, ["--text", str(text), "--out", str(out), *options, *more])


def test_the_command_trains_profiles_and_reports_in_json(text: Path, tmp_path: Path) -> None:
    result = command(text, tmp_path / "out", "--mesh", "dp=2,tp=2", "--profile", str(tmp_path / "profile"), "--json")
    assert result.exception is None
    report = json.loads(result.stdout)
    assert report["steps"] == 2
    assert report["parameters"] == sum(
        value.size for value in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    assert 0 < report["bits_per_character"] < 8.2
    scopes = {collective["scope"] for collective in report["profile"]["mean"]["collectives"]}
    assert {"gradient:psum", "loss:vocab_parallel", "ffn:psum"} <= scopes
    assert result.stderr == ""


def test_the_command_says_that_the_losses_are_those_before_yarn(text: Path, tmp_path: Path) -> None:
    stretched = command(text, tmp_path / "stretched").stdout
    assert "YaRN stretches the saved model to 1024 tokens; the losses are those before, of 8 tokens." in stretched
    assert "YaRN" not in command(text, tmp_path / "plain", "--context", "8").stdout
    kinds = [read_config(tmp_path / name).rope.rope_type for name in ("stretched", "plain")]
    assert kinds == ["yarn", "default"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hidden", "18"], "--hidden 18 --heads 4"),
        (["--kv-heads", "3"], "--heads 4 --kv-heads 3"),
        (["--context", "7"], "--context 7 --length 8: a model is not trained past its context; use --context 8"),
        (["--layers", "0"], "--layers 0: it must be at least 1"),
        (["--steps", "0"], "steps=0"),
        (["--lr", "-1"], "learning_rate=-1"),
        (["--mesh", "dp=2,xp=2"], "unknown axis"),
        (["--mesh", "pp=2"], "pp=2"),
        (["--mesh", "tp=4"], "copies of the 2 KV heads"),
        (["--mesh", "ep=2"], "ep=2: the model has no experts to split"),
        (["--experts", "-1"], "--experts -1: give at least 1"),
        (["--experts", "4", "--experts-per-token", "5"], "--experts-per-token 5 --experts 4: give from 1 to 4"),
        (["--experts", "4", "--expert-ffn", "0"], "--expert-ffn 0: it must be at least 1"),
        (["--expert-ffn", "8"], "--expert-ffn 8: a dense model has no experts; give --experts too, or leave it out"),
        (["--experts-per-token", "2"], "--experts-per-token 2: a dense model has no experts; give --experts too"),
        (["--aux-loss-coef", "0"], "--aux-loss-coef 0.0: a dense model has no experts; give --experts too"),
        (["--experts", "4", "--aux-loss-coef", "-1"], "aux_loss_coef=-1.0: it must be 0 (no balance) or above"),
        (["--experts", "4", "--experts-over", "xp"], "experts over 'xp': unknown axis"),
        (["--experts", "4", "--mesh", "ep=3"], "batch=4 does not split over ep=3"),
        (
            ["--experts", "4", "--mesh", "ep=2", "--moe-dispatch", "ragged"],
            "moe_dispatch='ragged' is not differentiated",
        ),
        (
            ["--experts", "4", "--mesh", "ep=2", "--moe-dispatch", "two_level", "--devices-per-node", "2"],
            "with devices_per_node=2 experts over ep of mesh ep=2 are on one",
        ),
        (["--vocab", "9999"], "9999"),
        (["--length", "5000"], "a sequence of 5000 needs 5001"),
        (["--text", "/not/there"], "/not/there"),
        (["--out", "/dev/null/model"], "/dev/null/model cannot be written"),
    ],
)
def test_the_command_refuses_what_cannot_be_trained(
    text: Path, tmp_path: Path, options: list[str], complaint: str
) -> None:
    result = command(text, tmp_path / "out", *options)
    assert isinstance(result.exception, JaxparError)
    assert complaint in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "out").exists()


# --- experts ---

OPTIONS = ("--experts=4", "--expert-ffn=6", "--steps=3", "--checkpoint-every=2", "--aux-loss-coef=0.1")


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on ep=2, and what it printed."""
    out = tmp_path_factory.mktemp("run") / "out"
    result = command(text, out, *OPTIONS, "--mesh=ep=2", "--json")
    assert result.exception is None
    return out, json.loads(result.stdout)


def test_the_command_trains_experts_into_a_model_that_runs_on_any_mesh(trained: tuple[Path, dict[str, Any]]) -> None:
    out, report = trained
    config, curve = read_config(out), json.loads((out / "loss.json").read_text())
    assert config.model_type == "qwen3_moe"
    assert config.moe == MoEConfig(4, 6, (True,), RouterConfig(2, norm_topk_prob=True), QWEN3_TENSORS)
    assert (curve["experts"], curve["experts_per_token"], curve["expert_ffn"]) == (4, 2, 6)
    assert curve["aux_loss_coef"] == 0.1
    assert report["parameters"] == sum(value.size for value in load_file(out / "model.safetensors").values())
    # Of the last step alone: no expert has less than the mean, or more than every token.
    assert len(report["max_over_mean_loads"]) == 1
    assert 1 <= report["max_over_mean_loads"][0] <= 2
    ids = [list(range(2, 14))]
    on_mesh = jaxpar.load(out, mesh="dp=2,tp=2", experts_over="dp,tp").logits(ids)
    np.testing.assert_allclose(on_mesh, jaxpar.load(out).logits(ids), atol=1e-4)


def test_a_run_with_experts_that_was_interrupted_goes_on_on_another_mesh(
    text: Path,
    tmp_path: Path,
    trained: tuple[Path, dict[str, Any]],
) -> None:
    model, report = trained
    curve = json.loads((model / "loss.json").read_text())
    settings = dataclasses.replace(RUN, steps=3, learning_rate=0.002, aux_loss_coef=0.1)

    def on_step(done: int, loss: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    spec = MeshSpec()
    with pytest.raises(KeyboardInterrupt):
        train(
            text,
            tmp_path,
            read_config(model),
            Plan(mesh=spec),
            make_mesh(spec, ensure_devices(spec)),
            settings,
            on_step,
        )
    assert (tmp_path / CHECKPOINT_FILE).exists()
    # A dense run is another one, and so is one with another balance.
    for options, complaint in (
        ((), "experts=4, not None"),
        ((*OPTIONS, "--aux-loss-coef=0.2"), "aux_loss_coef=0.1, not 0.2"),
    ):
        refused = command(text, tmp_path, "--steps=3", "--checkpoint-every=2", *options).exception
        assert isinstance(refused, RequestError)
        assert complaint in str(refused)
    result = command(text, tmp_path, *OPTIONS, "--mesh=ep=2", "--json")
    assert result.exception is None
    assert json.loads(result.stdout)["max_over_mean_loads"] == report["max_over_mean_loads"]
    resumed = json.loads((tmp_path / "loss.json").read_text())
    assert resumed["training"] == pytest.approx(curve["training"], abs=2e-5)
