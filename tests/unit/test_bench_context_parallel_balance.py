"""benchmarks/context_parallel_balance.py: its rows, its documents, and that it times no wrong result."""

import csv
import sys
from itertools import pairwise

import pytest

from compiled.compile_process import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import context_parallel_balance as balance
finally:
    sys.path.pop(0)

TINY = ["--device", "cpu", "--tokens", "32", "--heads", "4", "2", "--dim", "8", "--window", "9", "--dtype", "float64"]


def test_a_row_has_what_its_ranks_times_say(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    cases = ["causal-zigzag", "window-balanced", "documents-balanced"]
    given = [*TINY, "--ranks", "2", "--cases", *cases, "--schedules", "ring", "--commit", "0123abc", "--out", str(out)]
    assert balance.main(given) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [f"{row['mask']}-{row['layout']} {row['direction']}" for row in rows] == [
        f"{case} {direction}" for case in cases for direction in ("forward", "backward")]
    assert capsys.readouterr().out.count("ring, ") == len(rows)
    for row in rows:
        times = [float(time) for time in row["rank_ms"].split()]
        assert len(times) == int(row["ranks"]) == 2
        assert float(row["slowest_ms"]) == pytest.approx(max(times), rel=1e-4)
        assert float(row["even_ms"]) == pytest.approx(sum(times) / 2, rel=1e-4)
        assert float(row["balance"]) == pytest.approx(sum(times) / 2 / max(times), rel=1e-4)
        assert float(row["overhead"]) == pytest.approx(sum(times) / float(row["unsharded_ms"]) - 1, rel=1e-3, abs=1e-4)
        assert 0.8 < float(row["pairs_balance"]) <= 1
        assert float(row["largest_difference"]) < 1e-12
        assert (row["tokens_per_rank"], row["commit"], row["hq"], row["hk"]) == ("32", "0123abc", "4", "2")


@pytest.mark.parametrize(("schedule", "case"), [
    ("all_gather", "documents-contiguous"), ("all_gather", "window-contiguous"), ("ring", "window-zigzag")])
def test_four_ranks_have_the_results_of_the_unsharded_call(schedule, case):
    options = balance.parsed(TINY)
    found = balance.timings_of(balance.problem_of(case, 4, options, 32), schedule, options, balance.ClockSampler(
        balance.torch.device("cpu")))
    _, timings, difference, _ = next(found)
    found.close()
    assert set(timings) == {balance.WHOLE, "0", "1", "2", "3"}
    assert difference < 1e-12


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(balance, "RECORDINGS", 2)  # sums of gradients then lack what other ranks computed
    with pytest.raises(SystemExit, match=r"ring, .*, layout zigzag, 2 ranks of 32 tokens differ from the unsharded "
                                         r"call by .* of the largest number; allowed is 1e-10\."):
        balance.main([*TINY, "--ranks", "2", "--cases", "causal-zigzag"])


@pytest.mark.parametrize("length", [1, 1000, 64000])
def test_documents_fill_the_sequence_and_are_of_many_lengths(length):
    borders = balance.document_borders(length, 1000)
    lengths = [stop - start for start, stop in pairwise(borders)]
    assert (borders[0], borders[-1]) == (0, length)
    assert all(1 <= one <= 2000 for one in lengths)
    assert length < 64000 or (min(lengths[:-1]) < 100 and max(lengths) > 1000)


def test_help_says_what_a_call_needs(capsys):
    with pytest.raises(SystemExit):
        balance.parsed(["--help"])
    assert "A size that does not fit ends the script with PyTorch's error" in capsys.readouterr().out


def test_calls_are_captured_where_the_host_is_not_to_count(monkeypatch):
    built = []
    monkeypatch.setattr(balance, "graphed", lambda build, device: built.append(device) or build())
    options = balance.parsed([*TINY, "--ranks", "2", "--cases", "causal-zigzag", "--schedules", "ring"])
    assert {row.regime for row in balance.rows_of(options)} == {"turns"}
    assert not built
    options.graph = True
    assert {row.regime for row in balance.rows_of(options)} == {"turns+graph"}
    assert [device.type for device in built] == ["cpu"] * 6  # both passes of two ranks and of the whole


def test_captured_calls_need_a_gpu(capsys):
    with pytest.raises(SystemExit):
        balance.parsed([*TINY, "--graph"])
    assert "--graph with --device cpu; allowed is --device cuda" in capsys.readouterr().err
