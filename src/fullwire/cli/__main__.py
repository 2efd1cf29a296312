"""`python -m fullwire.cli` is the command `fullwire`."""

from fullwire.cli import main

main()
