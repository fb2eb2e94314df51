"""`python -m plait`."""

from .cli.app import main

main()
