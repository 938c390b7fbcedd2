"""How a run ends: one sentence about ours and the fastest of the others, made of the rows and of nothing else."""

import pytest

from tilewise.bench.standing import closing_sentence, standings
from unit.bench_rows import grid_rows, row


def cell(s, ours, *, direction="forward", **peers):
    """The rows of one cell, by milliseconds; None has no time."""
    return [row(name.replace("__", ":"), s, direction, ms_p50=ms, status="ok" if ms else "failed")
            for name, ms in {"tilewise": ours, **peers}.items()]


def test_each_cell_is_held_against_its_own_fastest_peer():
    rows = cell(512, 1.0, naive=9.0, sdpa_flash=2.0) + cell(1024, 2.0, naive=3.0, sdpa_flash=8.0)
    assert [(one.peer.provider, one.ratio) for one in standings(rows)] == [("sdpa_flash", 2.0), ("naive", 1.5)]


def test_ahead_everywhere():
    assert closing_sentence(grid_rows()) == (
        "On a device, for these shapes: tilewise has 4.00× the speed of the fastest other implementation (geometric "
        "mean), ahead in 4 of 4 cells.")


def test_behind_somewhere_names_where_and_whom():
    rows = cell(512, 1.0, naive=4.0) + cell(1024, 2.0, naive=9.0, flex=1.0) + cell(512, 1.0, naive=1.0,
                                                                                    direction="backward")
    assert closing_sentence(rows) == (
        "On a device, for these shapes: tilewise has 1.26× the speed of the fastest other implementation (geometric "
        "mean), ahead in 1 of 3 cells; furthest behind at 0.50× of flex in b1 h8 s1024 d64 float32 causal, forward.")


def test_behind_everywhere_is_said():
    assert closing_sentence(cell(512, 4.0, naive=2.0)) == (
        "On a device, for these shapes: tilewise has 0.50× the speed of the fastest other implementation (geometric "
        "mean), ahead in 0 of 1 cell; furthest behind at 0.50× of naive in b1 h8 s512 d64 float32 causal, forward.")


def test_a_cell_that_ours_has_no_time_of_is_told():
    rows = cell(512, 1.0, naive=4.0) + cell(1024, None, naive=4.0) + cell(2048, None, naive=None)
    assert closing_sentence(rows).endswith(
        "ahead in 1 of 1 cell; not counted: 1 cell where others have a time and tilewise has none.")


@pytest.mark.parametrize("rows", [cell(512, 1.0), cell(512, None, naive=1.0), cell(512, 1.0, naive=None),
                                  cell(512, 1.0, copy=0.1), []],
                         ids=["alone", "ours_failed", "peer_failed", "a_copy_is_no_attention", "no_rows"])
def test_nothing_to_compare_is_said(rows):
    assert closing_sentence(rows) == (
        "No cell has a time of tilewise and of another implementation, so nothing is compared.")


def test_our_own_backends_are_no_peers_but_cudnns_engines_are():
    assert not standings(cell(512, 1.0, tilewise__triton=0.5, tilewise__deterministic=0.5))
    ((one),) = standings(cell(512, 1.0, tilewise__triton=0.5, tilewise__cudnn=0.8))
    assert (one.peer.provider, one.ratio) == ("tilewise:cudnn", 0.8)


def test_without_the_automatic_choice_the_backend_that_was_timed_is_named():
    rows = [row("tilewise:reference", ms_p50=1.0), row("naive", ms_p50=2.0)]
    assert "shapes: tilewise:reference has 2.00× the speed" in closing_sentence(rows)


def test_host_times_are_no_speed():
    assert not standings([row("tilewise", regime="host"), row("naive", regime="host")])
