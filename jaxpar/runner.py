"""A model on a mesh, ready to run: what `jaxpar.load` returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.assets import model_dir
from jaxpar.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from jaxpar.checkpoint.load import load_weights
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.engine.generate import collect, stream_tokens
from jaxpar.engine.prompts import Prompt, check_stop, encode_prompts, prompt_list
from jaxpar.engine.requests import Completion, SamplingOptions, SamplingParams, Token
from jaxpar.engine.session import Session
from jaxpar.engine.sizes import groups_of
from jaxpar.errors import PlanError, RequestError
from jaxpar.mesh import MeshSpec
from jaxpar.moe.rebalance import LayerMove, Rebalancer
from jaxpar.moe.stats import ExpertRecord, recorded
from jaxpar.plan import Phase, Plan
from jaxpar.presets import Preset, resolve_mesh
from jaxpar.program import Programs
from jaxpar.values import shown, whole_number

if TYPE_CHECKING:
    from jaxpar.ledger.report import Ledger

MeshLike = str | os.PathLike[str] | Mapping[str, int] | MeshSpec | Preset


def load(
    model: str | os.PathLike[str] | Checkpoint, mesh: MeshLike = "tp=1", platform: str | None = None, **plan: Any
) -> Runner:
    """Load a model onto a mesh.

    Args:
        model: a Hugging Face model directory, a GGUF file, a bundled model's name, or a checkpoint that is open.
        mesh: axis sizes ("dp=2,tp=4"), a preset's name, the path of a mesh TOML, or a mapping of sizes.
        platform: "cpu", "gpu" or "tpu"; None takes the accelerator where there is one.
        plan: the other fields of `jaxpar.plan.Plan`. `dtype` None, the default, is float32 on a CPU and bfloat16 on
            accelerators.

    Raises:
        MeshError, PlanError, CheckpointError: naming what does not fit, before anything is compiled.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model_dir(model))
    reader = checkpoint.require_reader()
    spec, preset = resolve_mesh(mesh)
    dtype = plan.pop("dtype", None)
    fields = preset.plan_fields | plan if preset is not None else plan
    planned = make_plan(spec, fields if dtype is None else fields | {"dtype": dtype})
    # Larger pages would hold nothing, and the cache is made of whole ones.
    largest = max(checkpoint.config.max_position_embeddings, Plan.page_size)
    if planned.page_size > largest:
        raise PlanError(f"page_size={planned.page_size}: the model's context needs pages of at most {largest} tokens")
    devices = ensure_devices(spec, platform)
    if dtype is None and devices[0].platform != "cpu":
        planned = replace(planned, dtype="bfloat16")
    on_devices = make_mesh(spec, devices)
    programs = Programs(checkpoint.config, planned, on_devices)
    weights = load_weights(programs.weights, reader, on_devices)
    return Runner(checkpoint, programs, weights)


def make_plan(spec: MeshSpec, fields: Mapping[str, Any]) -> Plan:
    """A plan from keyword arguments; PlanError names one that does not exist."""
    known = [name for name in Plan.__dataclass_fields__ if name != "mesh"]
    for name in fields:
        if name not in known:
            raise PlanError(f"a plan has no field {name!r}: use {', '.join(known)}")
    return Plan(mesh=spec, **fields)


class Runner:
    """A loaded model. One process can hold several, on meshes of different sizes."""

    def __init__(self, checkpoint: Checkpoint, programs: Programs, weights: dict[str, Any]) -> None:
        """Made by `load`."""
        self.checkpoint, self.programs, self.weights = checkpoint, programs, weights
        moe = programs.config.moe
        self.balancer = Rebalancer(programs, moe, weights) if moe is not None and programs.plan.expert_slots else None
        """Of a plan with `expert_slots`: where experts lie, and what has been moved."""

    @property
    def config(self) -> ModelConfig:
        """The model's shapes and options."""
        return self.programs.config

    @property
    def plan(self) -> Plan:
        """How it runs."""
        return self.programs.plan

    @property
    def dropped(self) -> int:
        """Rows of tokens that the plan's `moe_capacity` has had no room for since the model was loaded."""
        return self.programs.dropped

    def encode(self, prompts: Iterable[Prompt] | str, max_new_tokens: int = 0) -> list[list[int]]:
        """Prompts, each text or token ids -> token ids, checked against the vocabulary and the context.

        Raises:
            RequestError: an empty prompt, an id outside the vocabulary, or more tokens than the context holds.
        """
        return encode_prompts(self.checkpoint, prompts, max_new_tokens)

    def logits(self, token_ids: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Logits of every position, through the prefill program: [B, S] ints -> [B, S, V] float32."""
        prompts = self.encode(token_ids)
        lengths = [len(prompt) for prompt in prompts]
        if len(set(lengths)) > 1:
            raise RequestError(f"token_ids has rows of {sorted(set(lengths))} tokens: give [B, S] ids")
        out = np.empty((len(prompts), len(prompts[0]), self.config.vocab_size), np.float32)
        for group in groups_of(len(prompts), self.plan):
            mine = prompts[group.start : group.stop]
            session = Session(self.programs, self.weights, mine, [len(prompt) for prompt in mine], SamplingParams())
            for chunk in session.prefill(logits=True):
                logits = np.asarray(chunk.output.logits)
                for i, (rows, columns) in enumerate(zip(chunk.rows, chunk.columns, strict=True)):
                    part = out[group[i], chunk.offset : chunk.offset + len(columns)]
                    part[:] = logits[rows, columns, : part.shape[1]]
        return out

    def stream(self, prompts: Iterable[Prompt] | str, **sampling: Unpack[SamplingOptions]) -> Iterator[Token]:
        """Generate, yielding each token as it comes; arguments as `generate`."""
        params = _sampling(sampling)
        check_stop(self.checkpoint, params.stop)
        ids = self.encode(prompts, params.max_new_tokens)
        return stream_tokens(self.programs, self.weights, ids, params, self.checkpoint.tokenizer)

    def generate(self, prompts: Iterable[Prompt] | str, **sampling: Unpack[SamplingOptions]) -> list[Completion]:
        """Generate a completion for each prompt, each text or a list of token ids, of any lengths.

        Args:
            prompts: one or several.
            sampling: max_new_tokens=32, temperature=0.0, top_k=0, top_p=1.0, seed=0, stop=(), ignore_eos=False:
                the fields of `jaxpar.SamplingParams`, which says what they mean.

        Raises:
            RequestError: a prompt or an option that cannot be served.
        """
        prompts = prompt_list(prompts)
        return collect(self.stream(prompts, **sampling), len(prompts))

    def rebalance(self, loads: ArrayLike | None = None) -> list[LayerMove]:
        """Move experts between slots to where loads want them, with copies of the hot ones.

        Logits stay the same up to rounding (sums may be taken in another order), unless `moe_capacity` drops rows.

        Args:
            loads: of the experts [MoE layers, experts], in any unit; None: those of the latest steps, 128 at most.

        Returns:
            of each MoE layer the fullest rank's load over the mean before and after, and what moved.

        Raises:
            PlanError: a plan without `expert_slots`, loads of another model, or None before the first step.
        """
        if self.balancer is None:
            raise PlanError("expert_slots=0 leaves experts in order: load the model with slots for copies to move them")
        return self.balancer.rebalance(loads)

    def record_experts(self) -> AbstractContextManager[ExpertRecord]:
        """Record what the steps in a `with` block load experts with; `jaxpar.moe.stats` says what is made of it.

        Raises:
            PlanError: the model has no experts.
        """
        balancer = self.balancer
        return recorded(self.programs, None if balancer is None else lambda: balancer.slots)

    def ledger(
        self,
        phase: Phase = "decode",
        batch: int = 8,
        seq: int = 1024,
        sampled: bool = False,
        loads: ArrayLike | None = None,
    ) -> Ledger:
        """What one step costs: bytes on every axis, FLOPs and memory of each rank.

        Args:
            phase: "prefill" or "decode".
            batch: requests in all.
            seq: tokens of each request: those that prefill takes, or those cached when a decode step runs.
            sampled: whether tokens are drawn by temperature, top-k and top-p, or greedily.
            loads: of the experts [MoE layers, experts], for the rounds that a dispatch to them takes; None: even.

        Raises:
            PlanError: an unknown phase, numbers that no step can have, or loads of another model.
        """
        from jaxpar.ledger.report import make_ledger

        batch, seq = _whole("batch", batch), _whole("seq", seq)
        mesh = self.programs.mesh
        return make_ledger(self.config, self.plan, phase, batch, seq, mesh=mesh, sampled=sampled, loads=loads)


def _whole(name: str, given: object) -> int:
    value = whole_number(given)
    if value is None or value < 1:
        raise PlanError(f"{name}={shown(given)}: it must be a whole number of at least 1")
    return value


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    known = list(SamplingParams.__dataclass_fields__)
    for name in fields:
        if name not in known:
            raise RequestError(f"no sampling option {name!r}: use {', '.join(known)}")
    stop = fields.get("stop", ())
    several = isinstance(stop, Iterable) and not isinstance(stop, str)
    return SamplingParams(**{**fields, "stop": tuple(stop) if several else (stop,)})
