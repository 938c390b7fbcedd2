"""One group of processes for all tests of the folder."""

from pathlib import Path

import pytest

from distributed.workers import Workers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def workers():
    started = Workers([str(ROOT / "src"), str(ROOT / "tests")])
    yield started
    started.close()
