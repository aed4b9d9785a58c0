"""`python -m pdtx`."""

from pdtx.cli import main

main()
