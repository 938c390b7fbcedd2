"""What the documents claim beside other libraries is what the committed rows say."""

import csv
import importlib.util
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/nvidia-h200"
PLAIN, PACKED_KV = ("paper", "gqa", "seeds"), ("packed-kv",)
CUDNN = ("sdpa_cudnn", "tilewise:cudnn")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


standing, headline, behind = map(script, ("standing", "headline", "behind"))


@cache
def sides_of(grid):
    return standing.sides_of(RESULTS / f"{grid}.csv")


def sides(grids, direction=None, d=None):
    return [side for grid in grids for side in sides_of(grid)
            if direction in (None, side.first.direction) and d in (None, side.first.d)]


def ratios(grids, peers, direction=None, d=None):
    """How many times ours is as fast as the fastest of the peers, cell by cell."""
    return standing.ratios(sides(grids, direction, d), *peers)


def between(grids, ours, peer, direction, d):
    """From how many times to how many times as fast one provider is as another."""
    times = [(side.rows[peer].ms_p50, side.rows[ours].ms_p50) for side in sides(grids, direction, d)
             if peer in side.rows and ours in side.rows]
    found = [theirs / own for theirs, own in times if theirs and own]
    return f"{min(found):.2f} to {max(found):.2f}"


def ahead(found):
    return sum(ratio > 1 for ratio in found)


def of_cells(found):
    return f"in {ahead(found)} of {len(found)} cells"


def mean_and_least(found, digits=2):
    return f"{standing.mean(found):.{digits}f}", f"{min(found):.{digits}f}"


def queries_behind(grids, peers):
    """Queries of the cells in which one of the peers takes less time."""
    return [side.first.sq for side in sides(grids) if any(ratio < 1 for ratio in standing.ratios([side], *peers))]


def first_paragraph():
    training = [one.ratio for which in headline.LINES.values() if which[0] == PLAIN
                for one in headline.cells(RESULTS, *which)]
    every = [ratio for path in sorted(RESULTS.glob("*.csv")) for *_, ratio in behind.compared(path)]
    mean, least = mean_and_least(training)
    behind_in = len(every) - ahead(every)
    return [f"ahead of the fastest of cuDNN and FlashAttention-2, -3 (forward, bfloat16) and -4 {of_cells(training)} "
            f"of plain training, forward and backward (geometric mean {mean}, least {least}). Of all {len(every)} "
            "cells timed there, options, packed sequences, decoding, float32 and calls on the host among them, another "
            f"library is faster [in {behind_in}](docs/behind.md)"]


def packed_kv():
    found, late = ratios(PACKED_KV, CUDNN), queries_behind(PACKED_KV, CUDNN)
    assert set(late) == {512, 1024}
    return [of_cells(found), *mean_and_least(found), f"The {len(late)} "]


def backend_cudnn():
    peer = ("tilewise:cudnn",)
    found, late = ratios(PACKED_KV, peer), queries_behind(PACKED_KV, peer)
    return [f"{len(late) or 'none'} of the {len(found)} cells of"]


def decoding():
    found = ratios(("decode",), ("sdpa_cudnn", "sdpa_cudnn_folded"))
    return found, len(found) - ahead(found)


def hopper_forward():
    best = ratios(PLAIN, ("sdpa_cudnn", "flash_attn3_fwd", "flash_attn4"), "forward")
    phrases = [f"the mean of all is {standing.mean(best):.3f}", f"the least {min(best):.3f}, at 256, causal, 16384"]
    words = {"sdpa_cudnn": "of cuDNN the geometric mean is {} and the least {}",
             "flash_attn4": "of FlashAttention-4 {} and {}", "flash_attn3_fwd": "in the 40 that it takes, {} and {}"}
    phrases += [text.format(*mean_and_least(ratios(PLAIN, (peer,), "forward"), 3)) for peer, text in words.items()]
    return phrases


def hopper_backward():
    phrases = [f"their geometric mean is {standing.mean(ratios(PLAIN, CUDNN, 'backward')):.2f}",
               "the geometric mean is {} and the least {}".format(
                   *mean_and_least(ratios(PLAIN, ("flash_attn4",), "backward"), 3))]
    for d, text in ((64, "{} at head dim 64"), (128, "{} at 128"), (256, "{} at 256")):
        found = ratios(PLAIN, CUDNN, "backward", d)
        phrases.append(text.format(f"{min(found):.2f} to {max(found):.2f}"))
    for d, text in ((64, "{} in the 18 cells of head dim 64"), (128, "{} in the 16 of 128")):
        found = [1 / ratio for ratio in ratios(PLAIN, ("tilewise:deterministic",), "backward", d)]
        phrases.append(text.format(f"{min(found):.2f} to {max(found):.2f}"))
    return phrases


def host(*directions):
    return [f"{1 / ratio:.2f} times" for direction in directions
            for ratio in ratios(("host",), ("sdpa_cudnn",), direction)]


def limits():
    found, _ = decoding()
    efficient = [text.format(*(between(("fp32",), ours, "sdpa_efficient", direction, d) for direction, d in cells))
                 for ours, cells, text in (
        ("tilewise:cuda", (("forward", None), ("backward", None)),
         "{} times as fast as torch's memory-efficient operator forward, {} times backward"),
        ("tilewise:cuda_ieee", (("forward", 64), ("backward", 64), ("forward", 128), ("backward", 128)),
         "{} times as fast as that operator forward and {} times backward at head dim 64; {} and {} times at 128"),
        ("tilewise:triton", (("forward", None), ("backward", None)), "{} times as fast forward, {} times backward"))]
    ieee_over_triton = between(("fp32",), "tilewise:cuda_ieee", "tilewise:triton", None, None)
    (slowest,) = [ratio for ratio in ratios(("paper-triton",), ("sdpa_flash",)) if ratio < 1]
    of_packed = ratios(PACKED_KV, ("varlen_attn",), "backward")
    behind = len(of_packed) - ahead(of_packed)
    mean, least = mean_and_least(found)
    return [*packed_kv(), f"{of_cells(found)}; geometric mean {mean}, least {least}", *efficient,
            f"and {ieee_over_triton} times as fast as `triton`",
            *host("forward", "forward_backward"), f"under a causal mask: {slowest:.3f} times as fast",
            f"the backward pass of {behind} of the {len(of_packed)} packed cells", *on_an_h100()]


def on_an_h100():
    of_h100 = [side for grid in PLAIN for side in standing.sides_of(RESULTS.parent / "nvidia-h100" / f"{grid}.csv")]
    forward, backward = (standing.ratios([side for side in of_h100 if side.first.direction == direction],
                                         "sdpa_cudnn", "flash_attn3_fwd", "flash_attn4")
                         for direction in ("forward", "backward"))
    assert ahead(forward) == len(forward)
    return [f"On an H100 FlashAttention-4's backward pass is ahead in {len(backward) - ahead(backward)} of the "
            f"{len(backward)} cells of the grids `paper`, `gqa` and `seeds`: tilewise is {min(backward):.3f} times"]


def how_fast_is_decoding():
    found, behind = decoding()
    return [f"takes {min(found):.2f} to {max(found):.2f} times as long, and is ahead in {behind} of {len(found)} cells"]


def over_two_gpus():
    """Of each length, the fastest of torch's ways beside the fastest schedule; not of calls behind one another."""
    times = defaultdict(dict)
    with (ROOT / "benchmarks/results/nvidia-h200/context-parallel.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["mask"], row["direction"], row["queue"]) == ("causal", "forward + backward", "1"):
                times[int(row["tokens_per_rank"])][row["schedule"]] = float(row["median_ms"] or "inf")
    found = {}
    for tokens, of_call in times.items():
        theirs, ours = ([ms for name, ms in of_call.items() if name.startswith("torch_") == is_torch]
                        for is_torch in (True, False))
        if theirs:
            found[tokens] = min(theirs) / min(ours)
    return [f"{min(found)} to {max(found)} tokens a rank",
            f"takes {min(found.values()):.2f} to {max(found.values()):.2f} times as long"]


CLAIMS = {
    "README.md": lambda: [*first_paragraph(), *over_two_gpus()],
    "docs/limits.md": limits,
    "docs/results.md": lambda: [*packed_kv(), *host("forward_no_grad", "forward", "forward_backward")],
    "docs/backends.md": backend_cudnn,
    "docs/decoding.md": how_fast_is_decoding,
    "docs/hopper-forward.md": hopper_forward,
    "docs/hopper-backward.md": hopper_backward,
    "src/tilewise/dispatch.py": backend_cudnn,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_of_a_document_are_what_the_rows_say(name):
    """The README said "in every cell timed" of cuDNN, which is ahead in 17 cells of the grid packed-kv."""
    text = re.sub(r"\s+(# )?", " ", (ROOT / name).read_text("utf-8"))
    assert [phrase for phrase in CLAIMS[name]() if phrase not in text] == []


def test_the_readme_is_short():
    """It had grown to 592 lines, of which a newcomer needs few; tables of rows are in docs/results.md."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120
