"""Write the checks of the torture suite into torture.md.

Usage: ``python docs/torture_checks.py`` rewrites the block between the markers.
"""

from pathlib import Path

from tilewise.testing.torture import CHECKS, Check
from tilewise.testing.torture.issues import short

PAGE = Path(__file__).with_name("torture.md")
BEGIN, END = "<!-- checks -->\n", "<!-- /checks -->\n"


def render() -> str:
    """Return the generated block, without its markers: a table for each group."""
    groups = dict.fromkeys(check.group for check in CHECKS)
    return "\n".join(_table(group, [check for check in CHECKS if check.group == group]) for group in groups)


def _table(group: str, checks: list[Check]) -> str:
    lines = [f"### {group}", ""]
    only = dict.fromkeys(check.gpu_only for check in checks)
    if all(only):
        lines += [f"On GPUs alone: {', '.join(only)}.", ""]
    lines += ["| check | what it does and demands | reported in |", "|---|---|---|",
              *(f"| `{check.name}` | {check.about} | {_link(check.issue)} |" for check in checks)]
    return "\n".join(lines) + "\n"


def _link(issue: str | None) -> str:
    return "" if issue is None else f"[{short(issue)}]({issue})"


def main() -> None:
    """Rewrite the block in the page."""
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{render()}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
