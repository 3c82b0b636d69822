"""The command line. Every command takes `--json`; exit status 0: done, 1: a check failed, 2: bad input, 130: Ctrl-C."""


def main() -> None:
    """The `jaxpar` program."""
    from jaxpar.cli.app import main as run

    run()
