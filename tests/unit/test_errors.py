"""The errors: which built-in error each one also is, and what a refusal carries."""

import pytest

from tilewise.errors import BackendUnavailable, InvalidInput, TilewiseError, UnsupportedProblem


@pytest.mark.parametrize(("error", "builtin"), [
    (BackendUnavailable, RuntimeError), (InvalidInput, ValueError), (UnsupportedProblem, NotImplementedError)])
def test_each_error_is_ours_and_the_builtin_of_its_kind(error, builtin):
    assert issubclass(error, TilewiseError)
    assert issubclass(error, builtin)


def test_refusal_lists_each_backend_with_its_reason():
    error = UnsupportedProblem("no backend takes this", {"triton": "got cpu", "torch": "has no window"})
    assert str(error) == "no backend takes this\n  triton: got cpu\n  torch: has no window"
    assert error.reasons == {"triton": "got cpu", "torch": "has no window"}


def test_refusal_keeps_its_own_copy_of_the_reasons():
    reasons = {"torch": "has no window"}
    error = UnsupportedProblem("refused", reasons)
    reasons.clear()
    assert error.reasons == {"torch": "has no window"}
