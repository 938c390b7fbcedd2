"""What tests of several integrations share."""

import importlib.util
import sys

import pytest

from tilewise.integrations import flash_attn


@pytest.fixture
def without_flash_attn():
    """Whatever ``flash_attn`` this process knows is unknown in the test, and back behind it."""
    def known():
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flash_attn"}

    flash_attn.uninstall()
    before = known()
    for name in before:
        del sys.modules[name]
    yield
    flash_attn.uninstall()
    for name in known():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def flash_attn_nowhere(without_flash_attn):
    """No flash_attn is imported, nor is one installed."""
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("a flash_attn is installed here: it answers in tilewise's place")
