"""Importing and calling tilewise needs torch and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
OPTIONAL = ("triton", "cudnn", "typer", "rich", "matplotlib", "numpy", "hypothesis", "pytest", "transformers",
            "diffusers", "cuda")


def run(code, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TILEWISE_", "TRITON_"))}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False,
                          env=clean | {"PYTHONPATH": str(SOURCE)} | environment)


# None in sys.modules makes an import fail as if the package were not installed.
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"


def test_import_and_call_work_without_optional_packages():
    done = run(BLOCK + """
import torch, tilewise as tw
q = torch.randn(1, 2, 40, 8, requires_grad=True)
tw.attention(q, q, q, mask=tw.causal()).sum().backward()
assert q.grad.isfinite().all()
print(tw.explain(q, q, q).forward)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("torch", "reference")


def test_import_of_tilewise_loads_no_optional_package_itself():
    # torch's FLOP counter, which the operators register with, imports Triton where it is installed: not our doing.
    done = run(f"""
import sys, torch, torch.utils.flop_counter
before = set(sys.modules)
import tilewise
print([name for name in {OPTIONAL!r} if name in set(sys.modules) - before])
""")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_command_without_its_packages_says_what_to_install():
    done = run(BLOCK + "import runpy; sys.argv[1:] = ['info']; runpy.run_module('tilewise', run_name='__main__')")
    assert done.returncode == 2
    assert "tilewise[bench]" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
