"""The record of compiled kernels: what is on it is not compiled, but for a sample, which has to become the same."""

import json
import zlib
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import cache

from compiled import compile_record
from compiled.compile_process import BETWEEN
from compiled.compile_record import SAMPLE, Prepared, Record, key_of

FACTS = {"registers": 40, "unset": {}}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def hash_of(name):
    """Triton's hash of a kernel, in hexadecimal."""
    return name.encode().hex().ljust(64, "0")


def of_sample(sampled):
    """Name a kernel that is in the sample, or one that is not."""
    return next(name for name in map(str, range(10 * SAMPLE))
                if (zlib.crc32(key_of(hash_of(name)).encode()) % SAMPLE == 0) == sampled)


class Kernel:
    """Stands for a kernel; like Triton, it asks the cache before it compiles, and once in its life."""

    def __init__(self, record, name, facts=FACTS, limit=64):
        self.record, self.hash, self.facts, self.limit, self.compiled = record, hash_of(name), facts, limit, 0

    def compile(self):
        if not self.compiled:
            self.record.manager()(cache._base32(self.hash))
            self.compiled += 1
            print("Used 40 registers")
        return SimpleNamespace(hash=self.hash)

    def row(self):
        return self.record.facts_of(Prepared({"limit": self.limit}, self.compile,
                                             lambda _compiled, log: self.facts | {"logged": "Used" in log}))


def recorded(path, name):
    """Return a record on a file that says what became of the kernel of this name."""
    Kernel(Record(path, anew=True), name).row()
    return Record(path)


def test_a_kernel_that_is_on_record_is_not_compiled_and_the_facts_of_its_launch_are_those_of_today(tmp_path):
    path = tmp_path / "compiled" / "triton.jsonl"
    name = of_sample(sampled=False)
    known = Kernel(recorded(path, name), name, limit=32)
    assert known.row() == known.row() == {"limit": 32, **FACTS, "logged": True, "key": key_of(known.hash)}
    assert known.compiled == 0


def test_one_of_the_sample_is_compiled_all_the_same_and_has_to_become_what_the_record_says(tmp_path):
    path = tmp_path / "triton.jsonl"
    name = of_sample(sampled=True)
    same = Kernel(recorded(path, name), name)
    assert (same.row()["registers"], same.row()["logged"], same.compiled) == (40, True, 1)
    with pytest.raises(ValueError, match=r"triton\.jsonl says of kernel .*40.*; it became .*41.* Run make compiled\."):
        Kernel(Record(path), name, FACTS | {"registers": 41}).row()


def test_what_is_not_on_record_is_compiled_once_and_not_recorded_unasked(tmp_path):
    path = tmp_path / "triton.jsonl"
    record = Record(path)
    kernel = Kernel(record, "new")
    assert kernel.row() == kernel.row()
    assert (kernel.compiled, path.exists()) == (1, False)


def test_to_compile_anew_passes_over_the_record_and_appends_to_it(tmp_path):
    path = tmp_path / "triton.jsonl"
    name = of_sample(sampled=False)
    recorded(path, name)
    anew = Kernel(Record(path, anew=True), name, FACTS | {"registers": 50})
    anew.row()
    assert anew.compiled == 1
    assert [json.loads(line)["registers"] for line in path.read_text().splitlines()] == [40, 50]


def test_each_version_has_its_record_with_a_kernel_once():
    files = sorted(compile_record.FOLDER.glob("triton-*.jsonl"))
    assert len(files) == 4
    for file in files:
        keys = [json.loads(line)["key"] for line in file.read_text().splitlines()]
        assert len(keys) == len(set(keys)) > (15 if BETWEEN in file.name else 50)
        assert set(keys) == set(Record(file).rows)


def test_a_functions_hash_is_the_same_whatever_was_hashed_before():
    from tilewise.kernels.hopper import mask_ranges
    from tilewise.kernels.hopper.backward import dq_accum

    compile_record.forget_hashes()
    alone = dq_accum._ends_of.cache_key
    compile_record.forget_hashes()
    assert mask_ranges.rank_of.cache_key
    assert dq_accum._ends_of.cache_key != alone, "Triton no longer needs forget_hashes"
    compile_record.forget_hashes()
    assert dq_accum._ends_of.cache_key == alone
