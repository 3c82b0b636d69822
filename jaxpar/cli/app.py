"""The `jaxpar` program: its commands, and what becomes of an error."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any

import typer

import jaxpar
from jaxpar.cli.output import ERR
from jaxpar.errors import JaxparError

# Commands live in modules of their name, imported here; none of them imports JAX before it runs.
_COMMANDS = (
    "demo",
    "generate",
    "verify",
    "ledger",
    "compile",
    "mesh",
    "layout",
    "pipeline",
    "balance",
    "strategies",
    "train",
    "doctor",
    "calibrate",
)

# Typer exports only the leaf of its usage errors, and newer versions no longer use click's.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="jaxpar",
    help="LLM inference under any combination of parallel strategies, proved against one device and counted.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jaxpar {jaxpar.__version__} (JAX {version('jax')}, Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LLM inference under any combination of parallel strategies, proved against one device and counted."""


for _name in _COMMANDS:
    app.command(_name)(getattr(importlib.import_module(f"jaxpar.cli.{_name}"), _name))


def main() -> None:
    """Run a command and exit with its status; a user's error is one line on standard error."""
    # The flag may stand anywhere, so that it can be added to the end of a command that failed.
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that the terminal lacks ends nothing
    try:
        status = _run(arguments or ["--help"], debug)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Python flushes once more on its way out: into nothing.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())
        status = 141
    sys.exit(status)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        command = typer.main.get_command(app)
        with command.make_context("jaxpar", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except JaxparError as error:
        if debug:
            traceback.print_exc()
        _print_error(str(error))
        return 2
    except _USAGE_ERROR as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _print_error(error.format_message() + hint)
        return 2
    return 0


def _print_error(message: str) -> None:
    """One line; names from a model's files may hold line breaks and terminal commands, which are shown escaped."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    ERR.out(f"jaxpar: {line}", style="red", highlight=False)
