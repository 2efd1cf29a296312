"""`python -m fullwire` is the command `fullwire`."""

from fullwire.cli import main

main()
