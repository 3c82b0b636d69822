"""`jaxpar generate`: text for prompts, from a model on a mesh."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from jaxpar.cli.completions import Timer, completion_json, dropped_rows, echo, print_completions, token_table
from jaxpar.cli.options import (
    Dtype,
    Json,
    Mesh,
    Model,
    Platform,
    PromptFile,
    Prompts,
    RebalanceEvery,
    TokenIds,
)
from jaxpar.cli.output import ERR, OUT, print_json, progress
from jaxpar.cli.plan_options import takes_plan
from jaxpar.cli.prompts import chat_prompts, read_prompts


@takes_plan
def generate(
    model: Model,
    mesh: Mesh = "tp=1",
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    token_ids: TokenIds = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 32,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above it, tokens are drawn.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws; equal prompts with the same seed get the same text.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End a text before this; repeat it for several: the first that is complete counts."
        ),
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Print each token with its log-probability.")] = False,
    dtype: Dtype = None,
    *,
    plan: dict[str, Any],
    rebalance_every: RebalanceEvery = 0,
    max_num_seqs: Annotated[int, typer.Option(help="Most prompts that a replica runs at once.")] = 64,
    platform: Platform = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record a profile in this directory, after a first run that compiles."),
    ] = None,
    moe_stats: Annotated[
        bool,
        typer.Option("--moe-stats", help="Show the loads of experts and the time of dispatch, after a first run."),
    ] = False,
    json: Json = False,
) -> None:
    """Generate text for one or several prompts of any lengths.

    On a terminal one prompt's text appears as it comes. A pipe gets the text alone: a prompt's text, a line break.
    """
    from jaxpar.assets import model_dir
    from jaxpar.checkpoint import open_checkpoint
    from jaxpar.engine.generate import collect
    from jaxpar.engine.prompts import check_stop, encode_prompts
    from jaxpar.engine.requests import SamplingParams
    from jaxpar.presets import resolve_mesh

    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed, tuple(stop or ()), ignore_eos)
    spec, preset = resolve_mesh(mesh)
    prompts, places = read_prompts(prompt, prompt_file, token_ids)
    checkpoint = open_checkpoint(model_dir(model))
    checkpoint.require_reader()
    check_stop(checkpoint, sampling.stop)
    wanted = chat_prompts(checkpoint, prompts, places) if chat else prompts
    ids = encode_prompts(checkpoint, wanted, max_new_tokens, places)

    options = asdict(sampling)
    # One text alone can appear as it comes: those of several prompts would be mixed up.
    streamed = sys.stdout.isatty() and len(ids) == 1 and not (json or logprobs) and checkpoint.tokenizer is not None
    with progress(f"Loading {model}") as status, ExitStack() as temporary:
        from jaxpar.cli.moe_stats import render as stats_tables
        from jaxpar.profile import check_writable, profiled, render, summarize
        from jaxpar.runner import load

        if profile is not None:
            check_writable(profile)
        # The time of dispatch is read from a profile, asked for or not.
        traced = profile
        if moe_stats and profile is None:
            traced = Path(temporary.enter_context(TemporaryDirectory()))
        fields = plan | {"dtype": dtype, "max_num_seqs": max_num_seqs, "rebalance_every": rebalance_every}
        runner = load(checkpoint, preset or spec, platform, **fields)
        recording = runner.record_experts() if moe_stats else nullcontext()
        if traced is not None:
            status.say("Compiling: a first run, which is not profiled")
            collect(runner.stream(ids, **options), len(ids))
            # What is said is of the run that is shown.
            runner.programs.dropped = 0
            if runner.balancer:
                runner.balancer.moved.clear()
        status.say(f"Generating for {len(ids)} prompt{'s' * (len(ids) > 1)}")
        timer = Timer()
        with profiled(traced), recording as recorded:
            tokens = timer.watch(runner.stream(ids, **options))
            completions = collect(echo(tokens, prompts[0], chat, status) if streamed else tokens, len(ids))
        summary = summarize(traced) if traced is not None else None
    stats = None if recorded is None else recorded.stats(summary)
    if json:
        document: dict[str, Any] = {"model": model, "mesh": spec.sizes, "dtype": runner.plan.dtype}
        document["completions"] = [completion_json(*pair) for pair in zip(prompts, completions, strict=True)]
        document["dropped_rows"] = runner.dropped
        if rebalance_every and runner.balancer:
            document["rebalanced"] = [asdict(move) for move in runner.balancer.moved]
        if stats is not None:
            document["moe_stats"] = stats.to_json()
        if profile is not None and summary is not None:
            document["profile"] = summary.to_json()
        print_json(document)
    elif logprobs:
        for pair in zip(prompts, completions, strict=True):
            OUT.print(token_table(*pair, checkpoint.tokenizer))
    elif not streamed:
        print_completions(prompts, completions, checkpoint.tokenizer, chat)
    if runner.dropped:
        ERR.out(dropped_rows(runner), highlight=False)
    if profile is not None and summary is not None and not json:
        ERR.print(render(summary))
    if stats is not None and not json:
        ERR.print(stats_tables(stats))
    if ERR.is_terminal:
        ERR.out(f"{timer}{'' if summary else '; compilation is in it'}", style="dim", highlight=False)
