"""``python -m tilewise``."""

from tilewise.cli import main

main()
