"""Run a command in this process and read what it wrote."""

import json
from dataclasses import dataclass

import pytest

from tilewise.cli import main


@dataclass
class Finished:
    status: int
    output: str
    errors: str

    @property
    def json(self):
        return json.loads(self.output)


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch):
    """A width is what a test sets: processes that share the tests have one of their own."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys):
    def command(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(exit_info.value.code or 0, captured.out, captured.err)

    return command
