"""Which backend name is in force: the scope, then the environment, then none."""

from pathlib import Path

import pytest

from tilewise.settings import backend_scope, cache_folder, default_backend, short_ways


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
    with backend_scope("reference"):
        assert default_backend() == "reference"
    assert default_backend() == "torch"


def test_scopes_nest():
    with backend_scope("reference"):
        with backend_scope("torch"):
            assert default_backend() == "torch"
        assert default_backend() == "reference"


def test_scope_ends_with_an_error_too():
    with pytest.raises(KeyError), backend_scope("reference"):
        raise KeyError
    assert default_backend() is None


@pytest.mark.parametrize(("value", "taken"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_short_ways_are_taken_unless_the_variable_is_0(monkeypatch, value, taken):
    monkeypatch.setenv("TILEWISE_SHORT_WAYS", value or "")
    if value is None:
        monkeypatch.delenv("TILEWISE_SHORT_WAYS")
    assert short_ways() is taken


def test_compiled_kernels_are_kept_where_the_variable_says_else_with_the_users_caches(monkeypatch):
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "tilewise"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/tilewise")
    monkeypatch.setenv("TILEWISE_CACHE", "/kernels")
    assert cache_folder() == Path("/kernels")
