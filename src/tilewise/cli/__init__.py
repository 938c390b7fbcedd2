"""The command line: ``tilewise``, or ``python -m tilewise``."""

import importlib.util
import sys
from collections.abc import Sequence

from tilewise.errors import TilewiseError

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; ``arguments`` default to the process's own.

    Exit status: 0 = done; 1 = something checked was found wrong; 2 = bad usage or input.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"tilewise: the command line needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} "
              "not installed; the extra 'bench' has all it needs: pip install 'tilewise[bench]'", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)
    from tilewise.cli.app import app

    try:
        app(args=arguments)
    except TilewiseError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from error
