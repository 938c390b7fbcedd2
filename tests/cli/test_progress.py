"""What a command tells while it runs: a bar on a terminal, lines where its output goes to a file."""

import io
import re
import sys
import time

import pytest

from tilewise.cli import session


def test_lines_tell_how_far_a_run_is_on_standard_error_alone(capsys, monkeypatch):
    monkeypatch.setattr(session, "_BETWEEN_LINES", 0.05)
    with session.progress(4) as bar:
        bar.describe("the first")
        time.sleep(0.12)
        bar.advance(3)
        bar.describe("the last")
        time.sleep(0.12)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert re.fullmatch(r"tilewise: 0% after \d+ s, now the first", lines[0])
    assert re.fullmatch(r"tilewise: 75% after \d+ s, now the last", lines[-1])
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_a_run_shorter_than_ten_seconds_tells_nothing(capsys):
    assert session._BETWEEN_LINES == 10.0
    with session.progress(1) as bar:
        bar.describe("soon done")
    assert capsys.readouterr().err == ""


def test_lines_end_with_a_run_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(session, "_BETWEEN_LINES", 0.05)

    def fail():
        with session.progress(1):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with session.progress(2) as bar:
        bar.describe("a step")
        bar.advance()
    assert "50 %" in terminal.getvalue()
    assert "after" not in terminal.getvalue()
