"""A training run, from a text file to a model directory. Interrupt it at any time: it goes on from its checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.save import collect_tensors, staged, write_model
from jaxpar.errors import JaxparError
from jaxpar.moe.balance import over_mean
from jaxpar.plan import Plan
from jaxpar.program import Weights
from jaxpar.train.checkpoint import (
    CHECKPOINT_FILE,
    ArrayReader,
    RunCheckpoint,
    fresh_tensors,
    read_checkpoint,
    write_checkpoint,
)
from jaxpar.train.curve import write_curve
from jaxpar.train.data import batches, encode, read_documents, split
from jaxpar.train.settings import TrainSettings
from jaxpar.train.step import TrainPrograms, TrainState
from jaxpar.train.tokenizer import save_tokenizer, train_bpe


@dataclass(frozen=True)
class TrainReport:
    """A finished run: losses in nats a token, `seconds` and `tokens` of this process (less after an interruption).

    `max_over_mean_loads` are the largest loads of an expert against the mean, layer by layer, over the steps since the
    last validation loss but one; empty where there are no experts.
    """

    parameters: int
    losses: list[float]
    validation: list[tuple[int, float]]
    bits_per_character: float
    tokens: int
    seconds: float
    max_over_mean_loads: list[float]


def train(
    text: Path,
    out: Path,
    config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    settings: TrainSettings,
    on_step: Callable[[int, float], None],
) -> TrainReport:
    """Train a tokenizer and a model of `config` on a text file, and leave them in `out` with the loss curve.

    Until it is done, `out` holds one checkpoint; a call with the same arguments goes on from there and gives the losses
    that an unbroken run would give. The mesh may be another one: then they agree up to rounding.

    Args:
        text: a UTF-8 file; form feeds separate documents.
        out: a directory, made if need be.
        config: of the model as it is saved, dtype included. Where its rope stretches the context, training goes
            without: `settings.length` tokens are what it has seen, YaRN (arXiv:2309.00071) adds the rest.
        plan: over dp, ep and tp, float32.
        mesh: devices of the plan's mesh.
        settings: of the run.
        on_step: called after every step with the number of steps done and the batch's loss.

    Raises:
        RequestError: the text is unusable, or `out` holds a checkpoint of another run.
        PlanError: a mesh that cannot train the model.
        CheckpointError: `out` holds a finished model, or cannot be written.
        JaxparError: the loss is not finite.
    """
    run = _Run(text, out, config, plan, mesh, settings)
    begin, first = time.perf_counter(), len(run.losses)
    stream = batches(run.training, settings.batch, settings.length, settings.seed, start_step=first)
    for done in range(first + 1, settings.steps + 1):
        run.step(next(stream))
        on_step(done, run.losses[-1])
        if done % settings.checkpoint_every == 0 or done == settings.steps:
            run.evaluate()
            if done < settings.steps:
                run.save_checkpoint()
    tokens = (settings.steps - first) * settings.batch * settings.length
    report = run.report(tokens, time.perf_counter() - begin)
    run.finish(report)
    return report


class _Run:
    """A run's data and state; `losses` and `validation` grow with it."""

    def __init__(
        self, text: Path, out: Path, config: ModelConfig, plan: Plan, mesh: Mesh, settings: TrainSettings
    ) -> None:
        unstretched = dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))
        self._programs = TrainPrograms(unstretched, plan, mesh, settings)
        self._out, self._config, self._mesh, self._settings = out, config, mesh, settings
        with staged(out):
            pass  # whether `out` can be written is better found out now than after the training
        documents = read_documents(text)
        self._recipe = recipe(documents, config, settings)
        self._tokenizer = train_bpe(documents, config.vocab_size)
        self.training, self._held_out = split(encode(documents, self._tokenizer), settings.length)
        self._tokens = NamedSharding(mesh, self._programs.batch_spec)
        self._file = out / CHECKPOINT_FILE
        self.losses: list[float] = []
        self.validation: list[float] = []
        self._loads: list[np.ndarray] = []  # of the steps since the latest validation loss
        self._imbalance: list[float] = []
        weights = self._programs.programs.weights
        if self._file.exists():
            checkpoint = read_checkpoint(self._file, self._recipe)
            self.losses, self.validation = checkpoint.losses, checkpoint.validation
            state = self._programs.start(self._load(checkpoint.weights))
            mu, nu = self._load(checkpoint.mu), self._load(checkpoint.nu)
            optimizer = self._programs.optimizer.restore(state.optimizer, mu, nu, len(self.losses))
            self._state = TrainState(state.weights, optimizer)
        else:
            self._state = self._programs.start(self._load(fresh_tensors(weights, settings.seed)))

    def step(self, batch: np.ndarray) -> None:
        """Train on tokens [batch, length + 1]."""
        self._state, loss = self._programs.step(self._state, jax.device_put(batch, self._tokens))
        self.losses.append(float(loss.cross_entropy))
        if loss.loads is not None:
            self._loads.append(np.asarray(loss.loads))
        if not math.isfinite(self.losses[-1]):
            raise JaxparError(f"the loss of step {len(self.losses)} is {self.losses[-1]}: use a smaller learning rate")

    def evaluate(self) -> None:
        """Take the loss on the validation part, cut into sequences without overlap; the rest at its end is left out."""
        batch, length = self._settings.batch, self._settings.length
        count = (len(self._held_out) - 1) // length
        rows = np.arange(-(-count // batch) * batch) % count
        windows = self._held_out[rows[:, None] * length + np.arange(length + 1)[None, :]]
        losses = [
            np.asarray(
                self._programs.evaluate(self._state.weights, jax.device_put(windows[i : i + batch], self._tokens))
            )
            for i in range(0, len(windows), batch)
        ]
        mean = np.concatenate(losses)[:count].mean(dtype=np.float64)
        self.validation.append(float(np.float32(mean)))  # as a checkpoint keeps it
        if self._loads:
            loads = np.stack(self._loads).sum(axis=0, dtype=np.float64)
            self._imbalance, self._loads = over_mean(loads).max(axis=1).tolist(), []

    def save_checkpoint(self) -> None:
        """Replace the checkpoint by one of the state as it is now."""
        mu, nu = map(self._collect, self._programs.optimizer.moments(self._state.optimizer))
        checkpoint = RunCheckpoint(self._collect(self._state.weights), mu, nu, self.losses, self.validation)
        write_checkpoint(self._file, checkpoint, self._recipe)

    def report(self, tokens: int, seconds: float) -> TrainReport:
        """What came out."""
        every, steps = self._settings.checkpoint_every, self._settings.steps
        validation = [(min((i + 1) * every, steps), loss) for i, loss in enumerate(self.validation)]
        characters = len(self._tokenizer.decode(self._held_out.tolist()))
        bits = self.validation[-1] / math.log(2) * len(self._held_out) / characters
        weights = self._programs.programs.weights.values()
        parameters = sum(math.prod(shape) for weight in weights for shape in weight.tensors.values())
        return TrainReport(parameters, self.losses, validation, bits, tokens, seconds, self._imbalance)

    def finish(self, report: TrainReport) -> None:
        """Write the model, its tokenizer and its curve, and remove the checkpoint."""
        summary = {**self._recipe, "parameters": report.parameters, "bits_per_character": report.bits_per_character}
        if report.max_over_mean_loads:
            summary["max_over_mean_loads"] = [round(ratio, 3) for ratio in report.max_over_mean_loads]
        with staged(self._out) as folder:
            write_model(folder, self._config, self._collect(self._state.weights))
            save_tokenizer(self._tokenizer, folder)
            write_curve(folder, report.losses, report.validation, summary)
        self._file.unlink(missing_ok=True)

    def _load(self, tensors: Mapping[str, np.ndarray]) -> Weights:
        return load_weights(self._programs.programs.weights, ArrayReader(tensors, self._file), self._mesh)

    def _collect(self, arrays: Weights) -> dict[str, np.ndarray]:
        return collect_tensors(self._programs.programs.weights, arrays)


def recipe(documents: list[str], config: ModelConfig, settings: TrainSettings) -> dict[str, Any]:
    """All that decides a run's result but the mesh, in JSON types."""
    digest = hashlib.sha256("\f".join(documents).encode()).hexdigest()
    shape = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "ffn": config.intermediate_size,
        "context": config.max_position_embeddings,
    }
    values = dataclasses.asdict(settings)
    if config.moe is None:
        del values["aux_loss_coef"]  # which no loss of a dense model depends on
    else:
        shape |= {
            "experts": config.moe.num_experts,
            "experts_per_token": config.moe.router.top_k,
            "expert_ffn": config.moe.intermediate_size,
        }
    return {"text_sha256": digest, **shape, **values}
