"""Which score functions the Hopper kernels inline, by each Triton: its compiler is asked, for sm_90."""

from itertools import product
from pathlib import Path

import pytest

from compiled.compile_process import BETWEEN, NEWEST, OLDEST, Compiler

pytestmark = pytest.mark.aot
SCRIPT = Path(__file__).with_name("inlining_ahead.py")
INLINED = ("relative", "damped", "squashed", "singular", "calling", "of_every_kind", "constant")


@pytest.fixture(scope="module", params=[OLDEST, BETWEEN, NEWEST])
def asked(request):
    """Asks about a function in a pass; returns the reason against it, and the name that messages show."""
    process = Compiler(request.param, SCRIPT, {})

    def ask(function, *, backward, int64=False):
        row = process.answer({"function": function, "backward": backward, "int64": int64})
        return row["reason"], row["name"]

    yield ask
    process.close()


@pytest.mark.parametrize("function", INLINED)
def test_functions_that_compute_pair_by_pair_are_inlined(asked, function):
    for backward, int64 in product((False, True), (False, True)):
        assert asked(function, backward=backward, int64=int64)[0] is None


@pytest.mark.parametrize(("function", "line", "passes"), [
    ("numbered", "return score + tl.arange(0, 64)", (False, True)),
    ("in_float64", "v2 = v1 * tl.full([], 0.1, tl.float64)", (False, True)),
    ("numbered_derivative", "return dscore + tl.arange(0, 64)", (True,))], ids=lambda value: str(value)[:12])
def test_a_function_that_makes_tiles_is_refused_by_its_line(asked, function, line, passes):
    for backward in (False, True):
        reason, name = asked(function, backward=backward)
        expected = (f"needs score functions that Gluon compiles, got {name}, of which it does not compile '{line}'; "
                    "backend='triton' may compile it")
        assert reason == (expected if backward in passes else None)


def test_a_function_of_which_the_compiler_fails_is_refused_by_what_it_says(asked):
    reason, name = asked("scanned", backward=False)
    assert reason.startswith(f"needs score functions that Gluon compiles, got {name}, of which it ")
    assert reason.endswith("; backend='triton' may compile it")


def test_tensors_of_numbers_that_triton_has_not_are_refused(asked):
    reason, name = asked("complex", backward=False)
    assert reason == (f"needs score functions that read numbers which Triton has, got {name}, which reads "
                      "torch.complex64")


def test_a_whole_call_hands_the_functions_tensors_over():
    process = Compiler(OLDEST, SCRIPT, {})
    try:
        kernels = process.answer({"function": "relative", "call": True})["kernels"]
    finally:
        process.close()
    assert {"hopper_forward_kernel", "hopper_backward_kernel"} <= set(kernels)
