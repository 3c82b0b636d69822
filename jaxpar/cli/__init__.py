"""The command line. Every command takes `--json`; exit status 0: done, 1: a check failed, 2: bad input, 130: Ctrl-C."""

import sys


def main() -> None:
    """The `jaxpar` program."""
    try:
        from jaxpar.cli.app import main as run

        run()
    except KeyboardInterrupt:  # also while commands are imported
        sys.exit(130)
