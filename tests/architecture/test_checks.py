"""An argument is checked in validate/ and nowhere else."""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src/tilewise"
# Who else raises InvalidInput on the way of a call, and for what: no value of an argument by itself.
OTHERS = {
    "masks/mask.py": "how two masks are joined, and lengths that a mask leaves ambiguous",
    "masks/operators.py": "operators that no mask has",
    "problem/length_checks.py": "what lies in a tensor of lengths, a table or an index",
    "distributed/mesh.py": "what ranks do not have alike, which their messages tell",
    "merging.py": "its own arguments, which are results of calls",
    "autograd/transforms.py": "what a transform of torch's makes of a call",
    "autograd/decode_op.py": "gradients and torch.func.vmap, of which the operator alone knows",
}
# Above the calls, or beside them: commands, benchmarks, tests' tools, other libraries' terms, tables of configs.
BESIDE = ("bench", "cli", "compile_ahead", "integrations", "kernels", "testing", "tuning")


def raises(path):
    tree = ast.parse(path.read_text("utf-8"))
    return any(isinstance(node, ast.Raise) and node.exc is not None and "InvalidInput(" in ast.unparse(node.exc)
               for node in ast.walk(tree))


def test_arguments_are_checked_in_one_place():
    found = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if raises(path)}
    assert {name for name in found if name.split("/")[0] not in ("validate", *BESIDE)} == set(OTHERS)
    assert sum(name.startswith("validate/") for name in found) >= 5


def test_no_message_is_written_twice():
    """Of two checks of one thing, one would be forgotten."""
    trees = [ast.parse(path.read_text("utf-8")) for path in sorted((SOURCE / "validate").glob("*.py"))]
    messages = [ast.unparse(node.args[0]) for tree in trees for node in ast.walk(tree)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "InvalidInput"]
    assert len(messages) > 50
    assert [one for one in messages if messages.count(one) > 1] == []
