"""``tilewise explain``."""


def test_it_agrees_with_the_library_and_gives_reasons(run):
    finished = run("explain", "--b", 2, "--hq", 4, "--hk", 2, "--sq", 16, "--sk", 32, "--d", 48,
                   "--dtype", "bfloat16", "--mask", "causal:bottom_right & window:7,0", "--device", "cpu", "--json")
    assert finished.status == 0
    assert finished.json["problem"].startswith("b2 h4/2 s16x32 d48 bfloat16 causal(alignment='bottom_right')")
    assert finished.json["forward"] == finished.json["backward"] == "reference"
    assert "mask" in finished.json["reasons"]["forward"]["torch"]


def test_lengths_default_to_one_another(run):
    assert " s77x77 " in run("explain", "--sq", 77, "--json").json["problem"]


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
