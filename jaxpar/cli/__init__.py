"""The command line. Every command takes `--json`; exit status 0: done, 1: a check failed, 2: bad input, 130: Ctrl-C."""

from jaxpar.cli.app import main

__all__ = ["main"]
