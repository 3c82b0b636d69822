"""The `jaxpar` program: its commands, and what becomes of an error."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from jaxpar.cli.output import ERR
from jaxpar.errors import JaxparError

# Commands live in modules of their name, imported here; none of them starts JAX before it runs.
_COMMANDS = ("demo", "generate", "verify", "ledger", "mesh", "strategies", "train")

app = typer.Typer(
    name="jaxpar",
    help="LLM inference under any combination of parallel strategies, proved against one device and counted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """LLM inference under any combination of parallel strategies, proved against one device and counted."""
    context.obj = debug


for _name in _COMMANDS:
    app.command(_name)(getattr(importlib.import_module(f"jaxpar.cli.{_name}"), _name))


def main() -> None:
    """Run a command; a user's error is one line and exit status 2."""
    debug = "--debug" in sys.argv[1:]
    # The flag may stand anywhere, so that it can be added to the end of a command that failed.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(args=["--debug", *arguments] if debug else arguments, prog_name="jaxpar")
    except JaxparError as error:
        if debug:
            raise
        ERR.print(f"jaxpar: {error}", style="red", markup=False)
        sys.exit(2)
