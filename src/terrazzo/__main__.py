"""`python -m terrazzo` is the command `terrazzo`."""

from terrazzo.cli import main

main()
