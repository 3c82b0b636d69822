"""`jaxpar train`: from a text file to a model directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxpar.cli.options import Json, Mesh, Platform
from jaxpar.cli.output import ERR, OUT, print_json, table
from jaxpar.cli.plan_options import takes
from jaxpar.errors import RequestError

if TYPE_CHECKING:
    from jaxpar.checkpoint.config import ModelConfig
    from jaxpar.train.loop import TrainReport


@takes("experts_over", "moe_dispatch", "devices_per_node")
def train(
    text: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text; form feeds separate documents.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the model goes, and checkpoints before it.")],
    mesh: Mesh = "tp=1",
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 1600,
    batch: Annotated[int, typer.Option(help="Sequences of a step, over all replicas.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the model may see; past --length by YaRN; default: 1024, or --length if larger."
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 192,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 6,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 4,
    ffn: Annotated[int, typer.Option(help="Width of the feed-forward network.")] = 512,
    experts: Annotated[
        int, typer.Option(help="Experts of each layer in place of its feed-forward network; 0: none.")
    ] = 0,
    experts_per_token: Annotated[int | None, typer.Option(help="Experts that a token goes to; default: 2.")] = None,
    expert_ffn: Annotated[
        int | None,
        typer.Option(help="Width of an expert; default: --ffn shared by the experts of a token."),
    ] = None,
    aux_loss_coef: Annotated[
        float | None,
        typer.Option(help="Weight of the loss that balances the experts of a layer; 0: none; default: 0.001."),
    ] = None,
    *,
    plan: dict[str, Any],
    vocab: Annotated[int, typer.Option(help="Tokens of the BPE vocabulary that is learnt from the text.")] = 1024,
    lr: Annotated[float, typer.Option(help="Highest learning rate, after the warm-up.")] = 0.002,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the text.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints and validation losses.")] = 200,
    platform: Platform = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record a profile of the run in this directory.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a small model and its tokenizer over dp, ep and tp.

    It is a llama, or with --experts a qwen3_moe. --out gets a Hugging Face directory (bfloat16), loss.json and, with
    matplotlib, loss.png. Where --context is larger than --length, YaRN stretches the model as it is saved; losses are
    those before, of --length tokens. Run the same command again after an interruption: it goes on from the last
    checkpoint, to the same losses.
    """
    from jaxpar.devices import ensure_devices, make_mesh
    from jaxpar.plan import Plan
    from jaxpar.presets import resolve_mesh
    from jaxpar.profile import profiled, render, summarize
    from jaxpar.train.checkpoint import CHECKPOINT_FILE
    from jaxpar.train.curve import can_draw
    from jaxpar.train.loop import train as run
    from jaxpar.train.settings import TrainSettings

    of_experts = {
        "experts-per-token": experts_per_token,
        "expert-ffn": expert_ffn,
        "aux-loss-coef": aux_loss_coef,
    }
    for name, value in of_experts.items():
        if not experts and value is not None:
            raise RequestError(f"--{name} {value}: a dense model has no experts; give --experts too, or leave it out")
    coef = {} if aux_loss_coef is None else {"aux_loss_coef": aux_loss_coef}
    settings = TrainSettings(steps, batch, length, lr, seed, checkpoint_every, **coef)
    context = max(1024, length) if context is None else context
    config = _model_config(vocab, hidden, layers, heads, kv_heads, ffn, length, context)
    if experts:
        config = _with_experts(config, experts, 2 if experts_per_token is None else experts_per_token, expert_ffn)
    spec, preset = resolve_mesh(mesh)
    planned = Plan(mesh=spec, **((preset.plan_fields if preset else {}) | plan))
    devices = make_mesh(spec, ensure_devices(spec, platform))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=ERR, disable=not ERR.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("training", total=steps)

        def on_step(done: int, loss: float) -> None:
            progress.update(task, completed=done, description=f"loss {loss:.3f}")

        try:
            with profiled(profile):
                report = run(text, out, config, planned, devices, settings, on_step)
        except KeyboardInterrupt:
            if (out / CHECKPOINT_FILE).exists():
                ERR.print("interrupted: the same command goes on from the last checkpoint", markup=False)
            raise
    if not can_draw():
        ERR.print("loss.png was not drawn: it needs matplotlib (pip install 'jaxpar[plot]')", markup=False)
    summary = summarize(profile) if profile else None
    if json:
        print_json(_document(report, out) | ({"profile": summary.to_json()} if summary else {}))
        return
    OUT.print(_table(report, out))
    if context > length:
        OUT.print(
            f"YaRN stretches the saved model to {context} tokens; the losses are those before, of {length} tokens."
        )
    if summary:
        OUT.print(render(summary))


def _model_config(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, length: int, context: int
) -> ModelConfig:
    from jaxpar.checkpoint.config import ModelConfig, RopeConfig
    from jaxpar.train.tokenizer import BOS_ID, EOS_ID

    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv-heads": kv_heads, "ffn": ffn}
    for name, size in sizes.items():
        if size < 1:
            raise RequestError(f"--{name} {size}: it must be at least 1")
    if hidden % (2 * heads):
        raise RequestError(f"--hidden {hidden} --heads {heads}: give an even number of values for each head")
    if heads % kv_heads:
        raise RequestError(f"--heads {heads} --kv-heads {kv_heads}: the first must be a multiple of the second")
    if context < length:
        raise RequestError(
            f"--context {context} --length {length}: a model is not trained past its context; use --context {length}"
        )
    yarn = RopeConfig("yarn", factor=context / length, original_max_position_embeddings=length)
    return ModelConfig(
        model_type="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=yarn if context > length else RopeConfig(),
        windows=(None,) * layers,
        bos_token_id=BOS_ID,
        eos_token_ids=(EOS_ID,),
        dtype="bfloat16",
    )


def _with_experts(config: ModelConfig, experts: int, per_token: int, width: int | None) -> ModelConfig:
    """A qwen3_moe of the same sizes: every layer has `experts`, without shared ones."""
    from jaxpar.checkpoint.config import MoEConfig, RouterConfig
    from jaxpar.checkpoint.hf_moe import QWEN3_TENSORS

    if experts < 1:
        raise RequestError(f"--experts {experts}: give at least 1, or 0 for a dense model")
    if not 1 <= per_token <= experts:
        raise RequestError(f"--experts-per-token {per_token} --experts {experts}: give from 1 to {experts} for a token")
    width = max(1, config.intermediate_size // per_token) if width is None else width
    if width < 1:
        raise RequestError(f"--expert-ffn {width}: it must be at least 1")
    layers = (True,) * config.num_hidden_layers
    moe = MoEConfig(experts, width, layers, RouterConfig(per_token, norm_topk_prob=True), QWEN3_TENSORS)
    return replace(config, model_type="qwen3_moe", qk_norm=True, moe=moe)


def _document(report: TrainReport, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "parameters": report.parameters,
        "steps": len(report.losses),
        "training_loss": report.losses[-1],
        "validation_loss": report.validation[-1][1],
        "bits_per_character": report.bits_per_character,
        "max_over_mean_loads": report.max_over_mean_loads,
        "seconds": report.seconds,
        "tokens_per_second": report.tokens / report.seconds,
    }


def _table(report: TrainReport, out: Path) -> Any:
    rows = [
        ("parameters", f"{report.parameters:,}"),
        ("steps", len(report.losses)),
        ("loss of the last batch, nats a token", f"{report.losses[-1]:.3f}"),
        ("validation loss, nats a token", f"{report.validation[-1][1]:.3f}"),
        ("validation, bits a character", f"{report.bits_per_character:.3f}"),
        *_balance_rows(report),
        ("tokens a second", f"{report.tokens / report.seconds:,.0f}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    return table(f"Trained {out}", ("", ""), rows)


def _balance_rows(report: TrainReport) -> list[tuple[str, str]]:
    ratios = " ".join(f"{ratio:.2f}" for ratio in report.max_over_mean_loads)
    return [("largest load of an expert over the mean, by layer", ratios)] if ratios else []
