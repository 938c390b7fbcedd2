"""Limits that keep functions readable; a breach means that one has more than one subject."""

import ast
import re
from pathlib import Path

import pytest

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
                   "src/tilewise/integrations/flash_attn.py", "src/tilewise/integrations/torch_sdpa.py",
                   "src/tilewise/integrations/transformers.py", "src/tilewise/integrations/sdpa_provider.py",
                   "src/tilewise/integrations/flex.py", "src/tilewise/integrations/flash_attn_interface.py",
                   "src/tilewise/integrations/flash_attn_cute.py", "src/tilewise/integrations/diffusers.py")


def functions(name):
    return [node for node in ast.walk(ast.parse(SOURCES[name]))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def is_kernel(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def length(function):
    """Lines of code from ``def`` to the end, without the docstring: a good docstring is no burden."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - function.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)


def test_guards_see_the_package():
    assert len(PACKAGE) > 15
    assert any(is_kernel(function) for name in PACKAGE for function in functions(name))
    assert {name.split("/")[3] for name in KERNELS} == {"hopper", "triton"}


@pytest.mark.parametrize("name", [name for name in SOURCES if functions(name)])
def test_functions_are_short(name):
    limits = {True: KERNEL_LINES, False: HOST_LINES}
    too_long = {function.name: length(function) for function in functions(name)
                if length(function) > limits[is_kernel(function)]}
    assert too_long == {}


@pytest.mark.parametrize("name", [name for name in PACKAGE if name not in LONG_SIGNATURES and functions(name)])
def test_host_functions_take_at_most_8_parameters(name):
    def count(function):
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return len([argument for argument in names if argument not in ("self", "cls")])

    host = [function for function in functions(name) if not is_kernel(function)]
    assert {function.name: count(function) for function in host if count(function) > PARAMETERS} == {}


KERNELS = [name for name in PACKAGE if name.startswith("src/tilewise/kernels/")
           and any(is_kernel(function) for function in functions(name))]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_their_helpers_take_at_most_15_parameters(name):
    counts = {function.name: len(function.args.args) for function in functions(name) if is_kernel(function)}
    assert {kernel: count for kernel, count in counts.items() if count > KERNEL_PARAMETERS} == {}


@pytest.mark.parametrize("name", PACKAGE)
def test_no_file_holds_both_a_kernel_and_an_autograd_function(name):
    assert not ("@triton.jit" in SOURCES[name] and "autograd.Function" in SOURCES[name])


def test_autograd_functions_live_in_one_folder_and_in_that_which_sends_messages():
    homes = [name for name in PACKAGE if "(torch.autograd.Function)" in SOURCES[name]]
    assert homes
    assert [name for name in homes if name.split("/")[2] not in ("autograd", "distributed")] == []


def test_environment_variables_of_ours_are_read_in_settings_alone():
    def reads(name):
        constants = (node.value for node in ast.walk(ast.parse(SOURCES[name]))
                     if isinstance(node, ast.Constant) and isinstance(node.value, str))
        # A whole name: `tilewise info` lists what is set by the bare prefix.
        return any(re.fullmatch(r"TILEWISE_\w+", text) for text in constants)

    assert [name for name in PACKAGE if reads(name)] == ["src/tilewise/settings.py"]
