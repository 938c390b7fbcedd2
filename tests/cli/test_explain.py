"""``tilewise explain``."""

import re
from html.parser import HTMLParser

import pytest

from tilewise.bench.support import supported
from tilewise.support.names import BACKENDS, DTYPES


class Page(HTMLParser):
    """Tables as lists of rows of cells, with the sentence that a cell shows when pointed at."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.titles, self.links, self.refusals, self._open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        facts = dict(attributes)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag == "tbody":
            self.tables.append([])
        elif tag == "tr" and "tbody" in self._open:
            self.tables[-1].append([])
        elif tag == "td":
            self.tables[-1][-1].append("")
            self.titles.append(facts.get("title"))
        elif tag == "li":
            self.refusals.append("")
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "td" in self._open:
            self.tables[-1][-1][-1] += data
        elif "li" in self._open:
            self.refusals[-1] += data


def test_it_agrees_with_the_library_and_gives_reasons(run):
    finished = run("explain", "--b", 2, "--hq", 4, "--hk", 2, "--sq", 16, "--sk", 32, "--d", 48,
                   "--dtype", "bfloat16", "--mask", "causal:bottom_right & window:7,0", "--device", "cpu", "--json")
    assert finished.status == 0
    assert finished.json["problem"].startswith("b2 h4/2 s16x32 d48 bfloat16 causal(alignment='bottom_right')")
    assert finished.json["forward"] == finished.json["backward"] == "reference"
    assert "mask" in finished.json["reasons"]["forward"]["torch"]


def test_lengths_default_to_one_another(run):
    assert " s77x77 " in run("explain", "--sq", 77, "--json").json["problem"]


@pytest.mark.parametrize(("flags", "said"), [
    (("--bias", "1hqk"), "bias 1x8x1024x1024"), (("--alibi",), "alibi"), (("--sinks",), "sinks"),
    (("--softcap", 30), "softcap 30"), (("--dropout", 0.125), "dropout 0.125")], ids=str)
def test_options_of_a_call_are_asked_about(run, flags, said):
    assert said in run("explain", *flags, "--json").json["problem"]
    assert said not in run("explain", "--json").json["problem"]


def test_options_decide_which_backend_serves_a_pass_on_a_gpu_that_is_not_here(run):
    call = ("explain", "--arch", "sm_90", "--dtype", "bfloat16", "--sq", 4096, "--d", 128, "--mask", "causal", "--json",
            "--bias", "1hqk")
    of_bias = run(*call).json
    assert (of_bias["forward"], of_bias["backward"]) == ("gluon", "gluon")
    assert run(*call, "--deterministic").json["backward"] == "triton"
    in_order = run(*call, "--deterministic").json["reasons"]["backward"]["gluon"]
    assert in_order.startswith("takes, in its backward pass, a bias at head dims up to 64 where deterministic=True")


@pytest.mark.parametrize(("flags", "message"), [
    (("--bias", "hqk"), "bias is 'hqk'; allowed is 'bhqk', with 1 in place of a letter, or '' for none."),
    (("--softcap", -1), "softcap is -1.0"), (("--dropout", 1.5), "dropout_p is 1.5")])
def test_an_option_that_no_call_has_is_refused(run, flags, message):
    finished = run("explain", *flags)
    assert finished.status == 2
    assert message in " ".join(finished.errors.split())


def test_a_backend_that_refuses_gives_status_1(run):
    finished = run("explain", "--backend", "torch", "--mask", "window:7,0", "--json")
    assert finished.status == 1
    assert finished.json["forward"] is None


def test_people_read_the_choice(run):
    output = run("explain", "--dtype", "float64", "--mask", "window:7,7").output
    chosen = [line for line in output.splitlines() if "chosen" in line]
    assert len(chosen) == 2
    assert all("reference" in line for line in chosen)


def test_an_ambiguous_mask_shows_both_pictures(run):
    finished = run("explain", "--sq", 3, "--sk", 5, "--mask", "causal")
    assert finished.status == 2
    assert "top_left" in finished.errors
    assert "■" in finished.errors


def test_html_is_a_page_of_what_each_backend_answers_and_loads_nothing(run, tmp_path):
    file = tmp_path / "new" / "support.html"
    finished = run("explain", "--html", file, "--device", "cpu")
    assert (finished.status, finished.output) == (0, f"wrote {file}\n")
    page = Page(file.read_text(encoding="utf-8"))
    assert all(link.startswith("#r") for link in page.links)
    found = supported("cpu")
    dims, *calls = page.tables
    by_dtype = {(one.name, one.dtype): one.answer for one in found if one.group == "head dims"}
    for name, *cells in dims:
        assert cells == [served or "none" for dtype in DTYPES for answer in [by_dtype[name, dtype]]
                         for served in (answer.forward, answer.backward)]
    for dtype, table in zip(DTYPES, calls, strict=True):
        answers = {one.name: one.answer for one in found if one.group == dtype}
        assert [name for name, *_ in table] == list(answers)
        for name, *cells in table:
            answer = answers[name]
            for i, (backend, direction) in enumerate((b, d) for b in BACKENDS for d in ("forward", "backward")):
                reason = answer.reasons[direction, backend]
                if reason is not None:
                    assert page.refusals[int(cells[i]) - 1] == reason
                else:
                    serves = getattr(answer, direction) == backend
                    assert cells[i] == (backend if serves else "yes")


def test_a_call_on_an_architecture_that_is_not_here(run):
    pytest.importorskip("triton")
    arguments = ("explain", "--json", "--dtype", "bfloat16", "--sq", "8192", "--d", "128", "--mask", "causal")
    finished = run(*arguments, "--arch", "sm_90")
    assert (finished.status, finished.json["forward"], finished.json["backward"]) == (0, "gluon", "gluon")
    assert run(*arguments, "--arch", "sm_80").json["forward"] == "triton"


def test_html_for_an_architecture_that_is_not_here(run, tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "sm_90.html"
    assert run("explain", "--html", file, "--arch", "sm_90").status == 0
    text = file.read_text(encoding="utf-8")
    assert "On a GPU of architecture sm_90, as if every optional package were installed" in text
    (plain,) = [cells for name, *cells in Page(text).tables[2] if name == "no mask, no option"]
    assert plain[:2] == ["gluon", "gluon"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--html", "{}", "--dtype", "float32"), "--dtype is given beside --html, which asks about every call; allowed is "
                                             "one of them."),
    (("--html", "{}", "--sq", "64", "--mask", "causal"), "--sq and --mask are given beside --html"),
    (("--html", "{}", "--json"), "--json is given beside --html, which writes a page; allowed is one of them."),
    (("--html", "{}", "--arch", "sm_90", "--device", "cpu"), "--device is given beside --arch"),
    (("--html", "{}", "--arch", "pascal"), "arch is 'pascal'; allowed are NVIDIA's from sm_75 on"),
    (("--arch", "sm_90", "--device", "cpu"), "--device is given beside --arch"),
    (("--device", "cuda:77"), "device is 'cuda:77', and torch sees"),
])
def test_flags_that_a_page_cannot_heed_exit_with_2(run, tmp_path, arguments, message):
    finished = run("explain", *(word.format(tmp_path / "page.html") for word in arguments))
    assert finished.status == 2
    assert re.match(f"tilewise: {re.escape(message)}", finished.errors)
    assert not list(tmp_path.iterdir())
