"""`python -m fullwire.cli` is the command `fullwire` too: scripts call it so."""

from fullwire.cli import main

main()
