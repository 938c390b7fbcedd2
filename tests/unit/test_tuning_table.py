"""Table files: what is written is read back, and what is broken is named."""

import json
import re
from pathlib import Path

import pytest

from tilewise.errors import InvalidInput
from tilewise.kernels.triton.config import DkdvConfig, ForwardConfig
from tilewise.tuning import table
from tilewise.tuning.kinds import ALL_KINDS
from tilewise.tuning.table import Bucket, load_rows, make_row, read_table, table_file, write_table

ROOT = Path(__file__).resolve().parents[2]
BUCKET = Bucket(width=128, itemsize=2, masked=True, length=2048)
ROW = make_row(BUCKET, ForwardConfig(64, 64, 4, 3, True), ms=0.25, heuristic_ms=0.5, candidates=40)
PROVENANCE = {"device": "a GPU", "date": "2026-11-21T00:00:00Z"}


def file_with(folder, text):
    path = folder / "forward.json"
    path.write_text(text, encoding="utf-8")
    return path


def file_of(folder, *rows):
    return file_with(folder, json.dumps({"provenance": PROVENANCE, "rows": list(rows)}))


def test_a_row_is_flat_and_holds_bucket_tile_and_measurements():
    assert ROW == {"width": 128, "itemsize": 2, "masked": True, "length": 2048, "block_m": 64, "block_n": 64,
                   "num_warps": 4, "num_stages": 3, "descriptors": True, "ms": 0.25, "heuristic_ms": 0.5,
                   "candidates": 40}


def test_what_is_written_is_read_back_a_row_a_line(tmp_path):
    path = tmp_path / "a-device" / "forward.json"
    fault = make_row(BUCKET, ForwardConfig(256, 256, 8, 1)) | {"reason": "out of shared memory"}
    write_table(path, PROVENANCE, [ROW, ROW | {"length": 512}], [fault])
    assert read_table(path, "forward") == (ROW, ROW | {"length": 512})
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {"provenance": PROVENANCE, "rows": [ROW, ROW | {"length": 512}], "faults": [fault]}
    assert len([line for line in text.splitlines() if '"width"' in line]) == 3
    write_table(path, PROVENANCE, [])
    assert read_table(path, "forward") == ()


def test_a_device_reads_its_own_tables(tmp_path, monkeypatch):
    write_table(tmp_path / "tables" / "some-device" / "dkdv.16bit.json", PROVENANCE,
                [row := make_row(BUCKET, DkdvConfig(32, 64, 4, 2))])
    monkeypatch.setattr(table.resources, "files", lambda package: tmp_path)
    load_rows.cache_clear()
    assert load_rows("some-device", table_file("dkdv", 2), "dkdv") == (row,)
    assert load_rows("some-device", table_file("dkdv", 4), "dkdv") == ()
    assert load_rows("some-device", table_file("dq", 2), "dq") == ()
    load_rows.cache_clear()


@pytest.mark.parametrize(("text", "words"), [
    ("{", "is not JSON"), ("[]", "is no table"), ('{"rows": []}', "is no table"),
    ('{"provenance": {}, "rows": {}}', "is no table"),
])
def test_a_file_that_is_no_table_is_named(tmp_path, text, words):
    path = file_with(tmp_path, text)
    with pytest.raises(InvalidInput, match=f"{re.escape(str(path))}.*{words}.*allowed is"):
        read_table(path, "forward")


@pytest.mark.parametrize(("change", "words"), [
    ({"masked": None}, "masked is None; allowed is bool"),
    ({"width": "128"}, "width is '128'; allowed is int"),
    ({"num_stages": True}, "num_stages is True; allowed is int"),
    ({"length": 0}, "length is 0; allowed is 1 or more"),
    ({"block_m": 48}, "block_m=48; allowed are the powers of two"),
    ({"num_warps": 3}, "num_warps=3; allowed are"),
])
def test_a_broken_row_is_named_with_its_file_and_place(tmp_path, change, words):
    path = file_of(tmp_path, ROW, ROW | change)
    with pytest.raises(InvalidInput, match=f"{re.escape(str(path))}, row 1: {re.escape(words)}"):
        read_table(path, "forward")


def test_a_row_without_a_field_or_without_fields_is_named(tmp_path):
    with pytest.raises(InvalidInput, match="row 0: descriptors is None; allowed is bool"):
        read_table(file_of(tmp_path, {name: value for name, value in ROW.items() if name != "descriptors"}), "forward")
    with pytest.raises(InvalidInput, match="row 0: it is 7; allowed is an object with width, itemsize"):
        read_table(file_of(tmp_path, 7), "forward")


def test_every_table_of_the_package_is_legal():
    paths = list((ROOT / "src/tilewise/tuning/tables").rglob("*.json"))
    assert paths
    for path in paths:
        kernel, bits, _ = path.name.split(".")
        assert kernel in ALL_KINDS
        assert bits in ("16bit", "32bit")
        assert {8 * row["itemsize"] for row in read_table(path, kernel)} == {int(bits.removesuffix("bit"))}
