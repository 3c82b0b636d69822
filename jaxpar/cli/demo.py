"""`jaxpar demo`: the main job on the bundled model, from text to proof to bill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from jaxpar.cli.completions import completion_json, join_ids
from jaxpar.cli.options import Json
from jaxpar.cli.output import OUT, human_bytes, print_json, progress, table
from jaxpar.cli.prompts import builtin_prompts
from jaxpar.cli.verify import RESULT_COLUMNS, load_both, verdict, verification_json
from jaxpar.cli.verify_all import wrong_and_ties

if TYPE_CHECKING:
    from jaxpar.engine.prompts import Prompt
    from jaxpar.engine.requests import Completion
    from jaxpar.ledger.report import Ledger
    from jaxpar.runner import Runner
    from jaxpar.verify import Verification

# Five over four replicas: a number that they do not divide, of lengths that nothing divides. None comes near a tie.
_PROMPTS: tuple[Prompt, ...] = (
    "It is a truth universally acknowledged",
    "She",
    "Nothing could be more",
    "The morning was so very fine",
    "I cannot think so well of him, said Emma",
)
_NEW_TOKENS = 24
# One page holds any of these requests, so that one width of page table, and one program, serves all steps.
_PAGE_SIZE = 64


def demo(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Any model; the bundled one is small enough for two minutes.")
    ] = "tiny-moe",
    mesh: Annotated[str, typer.Option(help="The mesh, faked on a CPU.")] = "dp=2,ep=2,tp=2",
    json: Json = False,
) -> None:
    """Run the main job on the bundled model, in under two minutes.

    Generates text on a mesh of faked CPU devices, compares every logit and token of every rank with one device, and
    counts what a step costs; a model with experts once more with those over all devices. Exit status 1 if anything
    differs.
    """
    from jaxpar.assets import model_dir
    from jaxpar.checkpoint import open_checkpoint
    from jaxpar.engine.prompts import encode_prompts
    from jaxpar.presets import resolve_mesh

    begin = time.perf_counter()
    spec, preset = resolve_mesh(mesh)
    checkpoint = open_checkpoint(model_dir(model))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    prompts = _PROMPTS if tokenizer is not None else builtin_prompts(config, len(_PROMPTS), _NEW_TOKENS)
    ids = encode_prompts(checkpoint, prompts, _NEW_TOKENS)
    show = _silent if json else OUT.print

    with progress(f"Loading {model} onto {spec} and onto one device") as status:
        from jaxpar.ledger.render import render, render_sent
        from jaxpar.runner import load
        from jaxpar.verify import verify as compare

        fields: dict[str, Any] = {"page_size": min(_PAGE_SIZE, config.max_position_embeddings)}
        runner, single = load_both(checkpoint, preset or spec, "cpu", fields)
        status.say(f"Generating on {spec}")
        completions = runner.generate(ids, max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    pairs = list(zip(prompts, completions, strict=True))
    show(Text(f"1. {model} goes on with {len(prompts)} prompts, on {spec.size} faked CPU devices ({spec})\n", "bold"))
    for pair in pairs:
        show(_text(*pair, has_text=tokenizer is not None))

    with progress("Running the same on one device") as status:
        verification = compare(runner, single, ids, _NEW_TOKENS, progress=status.say)
    show(Text("\n2. The same on one device: every logit and token of every rank compared\n", "bold"))
    show(_condensed(verification, ids))
    show(f"\n{verdict(verification, runner)}")

    with progress("Counting what a step costs"):
        ledger = _decode_step(runner)
    show(Text("\n3. The ledger: what a decode step costs\n", "bold"))
    show(render(ledger))

    proved, everywhere = [(verification, ledger)], spec.active(("dp", "ep", "cp", "tp"))
    if config.moe is not None and runner.plan.experts != everywhere:
        with progress("Running the same with experts over all devices") as status:
            wide = load(checkpoint, preset or spec, "cpu", **fields | {"experts_over": everywhere})
            proved.append((compare(wide, single, ids, _NEW_TOKENS, progress=status.say), _decode_step(wide)))
        show(Text(f"\n4. Wide EP: the same with experts over {', '.join(everywhere)}\n", "bold"))
        show(f"{verdict(proved[-1][0], wide)}\n")
        show(render_sent(proved[-1][1]))

    seconds = time.perf_counter() - begin
    passed = all(verification.passed and not ledger.differences for verification, ledger in proved)
    show(
        f"\n{'Done' if passed else 'FAILED'} in {seconds:.0f} s: {len(prompts)} texts from {spec.size} devices, every "
        f"rank held against one device, and {' or '.join(human_bytes(ledger.sent_bytes) for _, ledger in proved)} that "
        f"each rank sends in a step, counted by closed form and in the program"
    )
    if json:
        document: dict[str, Any] = {"model": model, "mesh": spec.sizes, "dtype": runner.plan.dtype, "passed": passed}
        document["completions"] = [completion_json(*pair) for pair in pairs]
        names = ("", "wide_ep_")
        for name, (verification, ledger) in zip(names, proved, strict=False):
            document |= {f"{name}verification": verification_json(verification), f"{name}ledger": ledger.to_json()}
        print_json(document | {"seconds": seconds})
    raise typer.Exit(0 if passed else 1)


def _decode_step(runner: Runner) -> Ledger:
    return runner.ledger("decode", batch=32, seq=min(256, runner.config.max_position_embeddings))


def _text(prompt: Prompt, completion: Completion, has_text: bool) -> Text:
    if isinstance(prompt, str):
        return Text.assemble((prompt, "dim"), completion.text)
    return Text.assemble(
        (join_ids(prompt), "dim"), " -> ", completion.text if has_text else join_ids(completion.token_ids)
    )


def _condensed(verification: Verification, prompts: Sequence[Sequence[int]]) -> Table:
    """A row for every prompt, its ranks taken together."""
    rows = []
    for prompt, ids in enumerate(prompts):
        results = [result for result in verification.results if result.prompt == prompt]
        rows.append(
            (
                prompt,
                len(ids),
                ",".join(str(result.rank) for result in results),
                f"{max(result.max_difference for result in results):.2e}",
                sum(result.compared for result in results),
                *wrong_and_ties(verification, results),
            )
        )
    return table("", ("prompt", "tokens", "ranks", *RESULT_COLUMNS), rows, left=0)


def _silent(*shown: object) -> None:
    """With --json, the document alone is printed."""
