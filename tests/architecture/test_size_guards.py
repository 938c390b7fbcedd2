"""Limits that keep functions readable; a breach means that one has more than one subject."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
           for folder in ("src", "tests", "examples", "docs") for path in sorted((ROOT / folder).rglob("*.py"))
           if "_build" not in path.parts}
PACKAGE = [name for name in SOURCES if name.startswith("src/")]
HOST_LINES, KERNEL_LINES, PARAMETERS, KERNEL_PARAMETERS = 60, 120, 8, 15
# The calls that users see, other libraries' among them, the op boundary, which mirrors their arguments, and commands,
# where a flag is a parameter.
LONG_SIGNATURES = ("src/tilewise/api.py", "src/tilewise/decode.py", "src/tilewise/autograd/op.py",
                   "src/tilewise/autograd/function.py",
                   "src/tilewise/cli/app.py", "src/tilewise/distributed/context_parallel.py",
                   "src/tilewise/integrations/flash_attn.py", "src/tilewise/integrations/flash_attn_passes.py",
                   "src/tilewise/integrations/torch_sdpa.py",
                   "src/tilewise/integrations/transformers.py",
                   "src/tilewise/integrations/transformers_context_parallel.py",
                   "src/tilewise/integrations/sdpa_provider.py",
                   "src/tilewise/integrations/flex.py", "src/tilewise/integrations/flash_attn_interface.py",
                   "src/tilewise/integrations/flash_attn_cute.py", "src/tilewise/integrations/diffusers.py",
                   "src/tilewise/integrations/ring_flash_attn.py")


class Function(NamedTuple):
    """What the limits are about; ``lines`` are those from ``def`` to the end without the docstring, which is no burden.

    ``positional`` parameters are those that a kernel has, ``named`` all but self and cls.
    """

    name: str
    is_kernel: bool
    lines: int
    positional: int
    named: int


@cache
def functions():
    """Return the functions of each file; a syntax tree is not kept, since all files' slow every later collection."""
    return {name: [described(node) for node in ast.walk(ast.parse(text))
                   if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))] for name, text in SOURCES.items()}


def described(node):
    is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    docstring = node.body[0] if ast.get_docstring(node) else None
    lines = node.end_lineno - node.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)
    arguments = node.args
    named = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return Function(node.name, is_kernel, lines, len(arguments.args),
                    len([name for name in named if name not in ("self", "cls")]))


def package_functions(is_kernel):
    """Return (file, function) of the package's kernels, or of all else."""
    return [(name, function) for name in PACKAGE for function in functions()[name] if function.is_kernel is is_kernel]


# A test is of all files: each process of the suite collects every test, and would parse them all to do so.
def test_guards_see_the_package():
    assert len(PACKAGE) > 15
    assert len(package_functions(False)) > 1000
    assert {name.split("/")[3] for name, _ in package_functions(True)
            if name.startswith("src/tilewise/kernels/")} == {"hopper", "triton"}


def test_functions_are_short():
    limits = {True: KERNEL_LINES, False: HOST_LINES}
    assert [(name, function) for name, own in functions().items() for function in own
            if function.lines > limits[function.is_kernel]] == []


def test_host_functions_take_at_most_8_parameters():
    assert [(name, function) for name, function in package_functions(False)
            if name not in LONG_SIGNATURES and function.named > PARAMETERS] == []


def test_kernels_and_their_helpers_take_at_most_15_parameters():
    assert [(name, function) for name, function in package_functions(True)
            if name.startswith("src/tilewise/kernels/") and function.positional > KERNEL_PARAMETERS] == []


def test_no_file_holds_both_a_kernel_and_an_autograd_function():
    assert [name for name in PACKAGE if "@triton.jit" in SOURCES[name] and "autograd.Function" in SOURCES[name]] == []


def test_autograd_functions_live_in_one_folder_and_in_that_which_sends_messages():
    homes = [name for name in PACKAGE if "(torch.autograd.Function)" in SOURCES[name]]
    assert homes
    assert [name for name in homes if name.split("/")[2] not in ("autograd", "distributed")] == []


def test_environment_variables_of_ours_are_read_in_settings_alone():
    def reads(name):
        constants = (node.value for node in ast.walk(ast.parse(SOURCES[name]))
                     if isinstance(node, ast.Constant) and isinstance(node.value, str))
        # A whole name: `tilewise info` lists what is set by the bare prefix.
        return "TILEWISE_" in SOURCES[name] and any(re.fullmatch(r"TILEWISE_\w+", text) for text in constants)

    assert [name for name in PACKAGE if reads(name)] == ["src/tilewise/settings.py"]
