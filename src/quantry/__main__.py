"""`python -m quantry` is the command `quantry`."""

from quantry.cli import main

main()
