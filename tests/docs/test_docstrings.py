"""Examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import tilewise

# Kernels are device code: importing them imports Triton, and they cannot be called from a prompt.
HOST_MODULES = [module.name for module in pkgutil.walk_packages(tilewise.__path__, "tilewise.")
                if not module.name.startswith("tilewise.kernels.triton") and not module.name.endswith("__main__")]


def examples_of(name):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("name", [name for name in HOST_MODULES if examples_of(name)])
def test_examples_in_docstrings_run(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report = []
    for test in examples_of(name):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_public_functions_show_an_example():
    functions = {name: getattr(tilewise, name) for name in ("attention", "attention_varlen", "explain", "merge",
                                                             "use_backend")}
    assert [name for name, function in functions.items() if ">>>" not in function.__doc__] == []
