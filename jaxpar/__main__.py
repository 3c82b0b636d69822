"""`python -m jaxpar`: the command line, also where the program is not on PATH."""

from jaxpar.cli import main

main()
