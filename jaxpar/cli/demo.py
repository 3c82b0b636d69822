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

if TYPE_CHECKING:
    from jaxpar.engine.prompts import Prompt
    from jaxpar.engine.requests import Completion
    from jaxpar.verify import Verification

# Five over two replicas: a number that dp does not divide, of lengths that nothing divides. None comes near a tie.
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
    ] = "tiny",
    mesh: Annotated[str, typer.Option(help="The mesh, faked on a CPU.")] = "dp=2,cp=2,tp=2",
    json: Json = False,
) -> None:
    """Run the main job on the bundled model, in under two minutes.

    Generates text on a mesh of faked CPU devices, compares every logit and token of every rank with one device, and
    counts what a step costs. Exit status 1 if anything differs.
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
        from jaxpar.ledger.render import render
        from jaxpar.verify import verify as compare

        runner, single = load_both(
            checkpoint, preset or spec, "cpu", {"page_size": min(_PAGE_SIZE, config.max_position_embeddings)}
        )
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
        ledger = runner.ledger("decode", batch=8, seq=min(256, config.max_position_embeddings))
    show(Text("\n3. The ledger: what a decode step costs\n", "bold"))
    show(render(ledger))

    seconds, passed = time.perf_counter() - begin, verification.passed and not ledger.differences
    show(
        f"\n{'Done' if passed else 'FAILED'} in {seconds:.0f} s: {len(prompts)} texts from {spec.size} devices, every "
        f"rank held against one device, and {human_bytes(ledger.sent_bytes)} that each rank sends in a step, "
        f"counted by closed form and in the program"
    )
    if json:
        document: dict[str, Any] = {"model": model, "mesh": spec.sizes, "dtype": runner.plan.dtype, "passed": passed}
        document["completions"] = [completion_json(*pair) for pair in pairs]
        document |= {"verification": verification_json(verification), "ledger": ledger.to_json(), "seconds": seconds}
        print_json(document)
    raise typer.Exit(0 if passed else 1)


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
                sum(result.wrong_tokens for result in results),
                sum(result.ties for result in results),
            )
        )
    return table("", ("prompt", "tokens", "ranks", *RESULT_COLUMNS), rows, left=0)


def _silent(*shown: object) -> None:
    """With --json, the document alone is printed."""
