"""The files that CONTRIBUTING names under "Add an option" are those that an option stands in."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/tilewise"
SECTION = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Add an option\n")[2].partition("\n## ")[0]
OPTION, TENSOR = "softcap", "sinks"
OF_TENSORS = SECTION[SECTION.index("A tensor, such as `sinks`"):SECTION.index("Then its kernels:")]
# What is no part of a call's way to its kernels, or is theirs: each has its own reasons to know an option.
NOT_HOST = ("backends", "bench", "cli", "compile_ahead", "distributed", "integrations", "kernels", "testing", "tuning")


def names(path):
    """Return the names in the code of a file: words of comments and strings are none."""
    text = io.StringIO(path.read_text("utf-8"))
    return {one.string for one in tokenize.generate_tokens(text.readline) if one.type == tokenize.NAME}


def listed(part):
    return re.findall(r"^\| `([\w/.]+)` \|", part, re.MULTILINE)


def test_on_the_host_the_option_stands_in_the_files_listed_and_in_no_other():
    files = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))]
    found = [path.as_posix() for path in files if path.parts[0] not in NOT_HOST and OPTION in names(SOURCE / path)]
    assert sorted(listed(SECTION)) == found


def test_a_call_without_a_cache_asks_for_at_most_four_files_on_the_host():
    of_attention, of_decoding = SECTION.split("If decoding takes it too")
    assert 0 < len(listed(of_attention)) <= 4
    assert all("decode" in name for name in listed(of_decoding))


def test_the_kernels_files_named_know_the_option():
    named = re.findall(r"`((?:kernels|testing)/[\w/]+\.py)`", SECTION.replace(OF_TENSORS, ""))
    assert len(named) >= 6
    # A random configuration draws options by their lines: the name is a string there.
    assert [name for name in named if OPTION not in names(SOURCE / name) and f'"{OPTION}"' not in (
        SOURCE / name).read_text("utf-8")] == []


def test_the_files_named_for_a_tensor_know_the_tensor():
    named = re.findall(r"`([\w/]+\.py)`", OF_TENSORS)
    assert len(named) >= 7
    assert [name for name in named if not any(TENSOR in word for word in names(SOURCE / name))
            and f'"{TENSOR}"' not in (SOURCE / name).read_text("utf-8")] == []


@pytest.mark.parametrize("name", re.findall(r"`(tests/[\w/]+\.py)`", SECTION))
def test_tests_that_the_list_names_exist(name):
    assert (ROOT / name).exists()


def test_the_description_is_where_the_list_says():
    text = (SOURCE / "problem/options.py").read_text("utf-8")
    for one in ("CallOptions", "OperatorOptions", "ScoreSettings", "ScoreOptions"):
        body = re.split(rf"^class {one}\b", text, flags=re.MULTILINE)[1].partition("\n\n\n")[0]
        assert re.search(rf"^    {OPTION}: ", body, re.MULTILINE), one
