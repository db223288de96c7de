"""``python -m unisono``: the command line."""

from unisono.cli import main

main()
