"""Which backend name is in force: the scope, then the environment, then none."""

import contextlib
import gc
import warnings
from pathlib import Path

import pytest

from tilewise import use_backend
from tilewise.settings import BackendScope, cache_folder, checks_lengths, default_backend, takes_fast_path


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("TILEWISE_BACKEND", raising=False)


def test_nothing_is_set_by_default():
    assert default_backend() is None


def test_environment_names_the_default(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "torch")
    assert default_backend() == "torch"


def test_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "")
    assert default_backend() is None


def test_scope_outranks_the_environment_and_ends(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "torch")
    with BackendScope("reference"):
        assert default_backend() == "reference"
    assert default_backend() == "torch"


def test_scopes_nest():
    with BackendScope("reference"):
        with BackendScope("torch"):
            assert default_backend() == "torch"
        assert default_backend() == "reference"


def test_scope_ends_with_an_error_too():
    with pytest.raises(KeyError), BackendScope("reference"):
        raise KeyError
    assert default_backend() is None


NEVER_ENTERED = (
    "use_backend('triton') was called and its with block never entered, so it changed nothing; write "
    "'with use_backend('triton'):' around the calls, pass backend='triton' to each, or set TILEWISE_BACKEND=triton for "
    "the process.")


def test_a_scope_that_is_never_entered_warns_where_it_is_dropped():
    with pytest.warns(RuntimeWarning) as caught:
        use_backend("triton")
    assert [str(one.message) for one in caught] == [NEVER_ENTERED]
    assert caught[0].filename == __file__
    assert default_backend() is None


def test_a_scope_that_is_kept_and_never_entered_warns_when_it_is_let_go():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [use_backend("triton")]
    kept.append(kept)  # a cycle, which the collector alone finds
    del kept
    with pytest.warns(RuntimeWarning, match="never entered"):
        gc.collect()


def test_a_scope_that_was_entered_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with use_backend("reference"):
            assert default_backend() == "reference"
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_backend("torch"))
            assert default_backend() == "torch"
        gc.collect()
    assert default_backend() is None


def test_a_scope_decorates_a_function_and_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @use_backend("reference")
        def named(depth=0):
            return named(depth - 1) if depth else default_backend()

        assert named(2) == named() == "reference"
        use_backend("torch")(named)  # never called
        gc.collect()
    assert default_backend() is None


def test_a_scope_shows_how_it_is_entered():
    scope = BackendScope("torch")
    assert repr(scope) == "<use_backend('torch'): in force inside a with block>"
    with scope:
        pass


@pytest.mark.parametrize(("value", "taken"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_fast_paths_are_taken_unless_the_variable_is_0(monkeypatch, value, taken):
    monkeypatch.setenv("TILEWISE_FAST_PATH", value or "")
    if value is None:
        monkeypatch.delenv("TILEWISE_FAST_PATH")
    assert takes_fast_path() is taken


@pytest.mark.parametrize(("value", "looks"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_lengths_on_a_gpu_are_looked_at_where_the_variable_is_1(monkeypatch, value, looks):
    monkeypatch.setenv("TILEWISE_CHECK", value or "")
    if value is None:
        monkeypatch.delenv("TILEWISE_CHECK")
    assert checks_lengths() is looks


def test_compiled_kernels_are_kept_where_the_variable_says_else_with_the_users_caches(monkeypatch):
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "tilewise"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/tilewise")
    monkeypatch.setenv("TILEWISE_CACHE", "/kernels")
    assert cache_folder() == Path("/kernels")
