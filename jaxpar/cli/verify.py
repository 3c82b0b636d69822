"""`jaxpar verify`: a model on a mesh, or in every way there is, against the same model on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from jaxpar.cli.completions import dropped_rows
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
from jaxpar.cli.output import OUT, print_json, progress, table
from jaxpar.cli.plan_options import takes_plan
from jaxpar.cli.prompts import builtin_prompts, read_prompts
from jaxpar.cli.verify_all import lossy, tokens_of_lossy, verify_all, wrong_and_ties
from jaxpar.errors import RequestError
from jaxpar.tables import counted

if TYPE_CHECKING:
    from jaxpar.checkpoint import Checkpoint
    from jaxpar.mesh import MeshSpec
    from jaxpar.presets import Preset
    from jaxpar.runner import Runner
    from jaxpar.verify import Verification

RESULT_COLUMNS = ("max |difference|", "logits compared", "wrong tokens", "ties")


@takes_plan
def verify(
    model: Model,
    mesh: Mesh | None = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every strategy, on meshes of --devices devices, in place of one mesh.")
    ] = False,
    devices: Annotated[int | None, typer.Option(help="With --all: how many devices; default: 8.")] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --all: start no further plan after so many seconds.")
    ] = None,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    token_ids: TokenIds = None,
    max_new_tokens: Annotated[int, typer.Option(help="Greedy tokens to compare after each prompt.")] = 8,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="On logits; default: 1e-4 in float32, 0.25 in bfloat16, 0.03 in float16; more for large logits and "
            "for lossy strategies, such as int8, of which tokens prove nothing."
        ),
    ] = None,
    dtype: Dtype = None,
    *,
    plan: dict[str, Any],
    rebalance_every: RebalanceEvery = 0,
    platform: Platform = None,
    json: Json = False,
) -> None:
    """Compare a model on a mesh with one device, rank by rank.

    Every logit of prefill and decode and every greedy token is compared. Without prompts, some of awkward lengths are
    made from the vocabulary. With --all every strategy that the model can run is compared, and a table shows equality,
    bytes and time of each. Exit status 1 if anything differs, or if nothing ran.
    """
    from jaxpar.assets import model_dir
    from jaxpar.checkpoint import open_checkpoint
    from jaxpar.engine.prompts import encode_prompts
    from jaxpar.engine.requests import SamplingParams
    from jaxpar.presets import resolve_mesh

    SamplingParams(max_new_tokens)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise RequestError(f"tolerance={tolerance}: it must be 0 or above, and finite")
    if mesh is None and not all_:
        raise RequestError("verify needs --mesh, such as --mesh dp=2,tp=4, or --all for every strategy")
    if mesh is not None and (all_, devices, budget) != (False, None, None):
        raise RequestError("--mesh is one mesh, and --all, --devices and --budget are for every strategy: give either")
    count = 8 if devices is None else devices
    spec, preset = (None, None) if mesh is None else resolve_mesh(mesh)
    prompts, places = read_prompts(prompt, prompt_file, token_ids)
    checkpoint = open_checkpoint(model_dir(model))
    checkpoint.require_reader()
    # Each replica gets one at least: a rank without a prompt proves nothing.
    replicas = count if spec is None else spec.dp * spec.ep
    prompts = prompts or builtin_prompts(checkpoint.config, max(4, replicas), max_new_tokens)
    ids = encode_prompts(checkpoint, prompts, max_new_tokens, places)
    if spec is None:
        fields = plan | ({} if dtype is None else {"dtype": dtype}) | {"rebalance_every": rebalance_every}
        of_all = verify_all(model, checkpoint, count, fields, ids, max_new_tokens, tolerance, platform, budget, json)
        raise typer.Exit(of_all)

    with progress(f"Loading {model}") as status:
        from jaxpar.verify import verify as compare

        runner, single = load_both(
            checkpoint, preset or spec, platform, plan | {"dtype": dtype, "rebalance_every": rebalance_every}
        )
        verification = compare(runner, single, ids, max_new_tokens, tolerance, status.say)
    if json:
        document = {"model": model, "mesh": spec.sizes, "dtype": runner.plan.dtype, "prompts": ids}
        print_json(document | {"dropped_rows": runner.dropped} | verification_json(verification))
    else:
        OUT.print(render(verification, runner, ids), markup=False)
    raise typer.Exit(0 if verification.passed else 1)


def load_both(
    checkpoint: Checkpoint, mesh: MeshSpec | Preset, platform: str | None, plan: dict[str, Any]
) -> tuple[Runner, Runner]:
    """The model on the mesh and, with the same plan otherwise, on its first device, each expert once and in order."""
    from jaxpar.runner import load

    # The larger mesh comes first: it decides how many devices are faked.
    runner = load(checkpoint, mesh, platform, **plan)
    alone = {"dtype": runner.plan.dtype, "expert_slots": 0, "rebalance_every": 0}
    return runner, load(checkpoint, "tp=1", platform, **plan | alone)


def verification_json(verification: Verification) -> dict[str, Any]:
    """Every result, and what they come to, as JSON types."""
    return asdict(verification) | {"max_difference": verification.max_difference, "passed": verification.passed}


def render(verification: Verification, runner: Runner, prompts: Sequence[Sequence[int]]) -> Group:
    """A row for every prompt and rank, and the verdict."""
    rows = [
        (
            r.prompt,
            len(prompts[r.prompt]),
            r.rank,
            f"{r.max_difference:.2e}",
            r.compared,
            *wrong_and_ties(verification, [r]),
        )
        for r in verification.results
    ]
    return Group(
        table("", ("prompt", "tokens", "rank", *RESULT_COLUMNS), rows, left=0), "", verdict(verification, runner)
    )


def verdict(verification: Verification, runner: Runner) -> str:
    """What the results come to, in a sentence."""
    ranks = len({result.rank for result in verification.results})
    tokens = sum(map(len, verification.tokens))
    wrong, ties = wrong_and_ties(verification, verification.results)
    mesh = runner.plan.mesh
    idle = mesh.size // mesh.pp - ranks
    remedy = "" if verification.passed else "; verify's --tolerance sets another"
    return (
        f"{'PASSED' if verification.passed else 'FAILED'}: {mesh} against one device in "
        f"{runner.plan.dtype}, {tokens} tokens on {counted(ranks, 'rank')}{' of the last stage' * (mesh.pp > 1)}"
        + (f" ({idle} idle: fewer prompts than replicas)" if idle else "")
        + f"; logits differ by at most {verification.max_difference:.2e} "
        f"(tolerance {verification.tolerance:g}{lossy(verification)}{remedy}), "
        f"{tokens_of_lossy(verification) if verification.lossy else f'{wrong} wrong tokens, {ties} ties'}, "
        f"smallest margin {verification.margin:.2e}" + (f"; {lost}" if (lost := dropped_rows(runner)) else "")
    )
