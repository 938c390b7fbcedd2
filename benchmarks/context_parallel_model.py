"""Model the share of ideal of context parallel calls on GPUs that were not there: counted from plans, not measured.

Usage: ``python benchmarks/context_parallel_model.py benchmarks/results/nvidia-h200/context-parallel.csv`` prints the
table. From those rows come the rates of attention: of their longest causal call on one GPU, forward and backward. The
bytes that a rank receives, its pairs, and the rows that it merges are those of the plans, which the library computes
calls by; what a pass takes of them is said in src/tilewise/distributed/cost_model.py, whose estimate this is. *Ideal*
is an even share of the pairs at the same rate.
"""

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import tilewise as tw
from tilewise.distributed.cost_model import BACKWARD, Estimate, Links, Sizes, estimates, estimates_of_rows
from tilewise.distributed.layouts import layout_of_rows, named_layout
from tilewise.distributed.plan import Problem

HEADS, KV_HEADS, DIM, ITEMSIZE = 32, 8, 128, 2
SIZES = Sizes(1, HEADS, KV_HEADS, DIM, DIM, ITEMSIZE)
NVLINK, NETWORK = 450e9, 50e9  # bytes a second and direction: of one GPU's NVLink, and of 400 Gb/s
HOST = 8  # GPUs that NVLink joins
WINDOW, DOCUMENT = 4096, 8192
CALLS = (  # ranks and tokens of each
    (2, 8192), (2, 32768), (8, 8192), (8, 32768), (8, 131072), (64, 8192), (64, 16384))
KINDS = ("causal", "window", "documents")


@dataclass(frozen=True)
class Rates:
    """Of attention on one GPU, operations a second; a backward pass has 2.5 times those of the forward pass."""

    forward: float
    backward: float


def rows_at(path: Path) -> list[dict[str, str]]:
    """Return the rows of calls that were waited for one by one, without those that were refused."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["share_of_ideal"] and (row.get("queue") or "1") == "1"]


def rates_of(path: Path) -> Rates:
    """Return the rates of the longest causal call that the rows have on one GPU, in both passes."""
    rows = [row for row in rows_at(path) if row["mask"] == "causal"]
    passes: dict[int, dict[str, float]] = {}
    for row in rows:
        passes.setdefault(int(row["tokens_per_rank"]), {})[row["direction"]] = float(row["ideal_ms"])
    longest = max(length for length, ms in passes.items() if len(ms) == 2)
    rows, ms = [row for row in rows if int(row["tokens_per_rank"]) == longest], passes[longest]
    # An even share of the pairs of all.
    operations = 4 * int(rows[0]["hq"]) * int(rows[0]["d"]) * longest ** 2 * int(rows[0]["ranks"]) / 2
    forward = ms["forward"] / 1e3
    return Rates(operations / forward, BACKWARD * operations / (ms["forward + backward"] / 1e3 - forward))


def problem_of(kind: str, ranks: int, tokens: int) -> Problem:
    """Return a call: a causal mask in zigzag, or contiguously a window, or documents that cross the ranks' borders."""
    length = ranks * tokens
    layout = named_layout("zigzag" if kind == "causal" else "contiguous", length, ranks)
    mask = tw.causal("top_left")
    if kind == "window":
        mask &= tw.window(WINDOW - 1, 0)
    sequences = None
    if kind == "documents":
        ends = [0, *range(DOCUMENT // 2, length, DOCUMENT), length]
        sequences = tuple((start, stop, start, stop) for start, stop in pairwise(ends))
    return Problem(layout, layout, mask, True, KV_HEADS, sequences=sequences)


def shares_of(problem: Problem, rates: Rates) -> dict[str, float]:
    """Return the share of ideal of both passes, by schedule; within a host NVLink's rate, else the network's.

    Across hosts there is a schedule more: a ring of hosts, whose GPUs exchange heads.
    """
    bandwidth = NVLINK if problem.ranks <= HOST else NETWORK

    def both(estimate: Callable[[Links], dict[str, Estimate]]) -> dict[str, float]:
        """Return the seconds of both passes, each at its rate of attention."""
        forward, backward = (estimate(Links(rate, bandwidth)) for rate in (rates.forward, rates.backward))
        return {name: own.seconds + backward[name].backward_seconds for name, own in forward.items()}

    pairs = estimates(problem, SIZES, Links())["ulysses"].pairs
    seconds = both(lambda links: estimates(problem, SIZES, links))
    if problem.ranks > KV_HEADS:
        del seconds["ulysses"]
    if problem.ranks > HOST:
        seconds["ring of hosts"] = both(lambda links: {"ring": _of_hosts(problem, links)})["ring"]
    ideal = _compute(pairs, SIZES, rates)
    return {name: ideal / own for name, own in seconds.items()}


def _of_hosts(problem: Problem, links: Links) -> Estimate:
    """Estimate a mesh of two dims: the exchange of heads by NVLink, and a ring of hosts."""
    layout = layout_of_rows(problem.queries, HOST)
    rows = replace(problem, queries=layout, keys=layout)
    in_host = replace(links, bandwidth=NVLINK)
    whole = estimates_of_rows(rows, problem.queries, SIZES, in_host)["ring"]
    sizes = replace(SIZES, hq=HEADS // HOST, hk=KV_HEADS // HOST)
    near, across = (estimates(replace(rows, kv_heads=sizes.hk), sizes, own)["ring"] for own in (in_host, links))
    return replace(across, seconds=whole.seconds - near.seconds + across.seconds,
                   backward_seconds=whole.backward_seconds - near.backward_seconds + across.backward_seconds)


def _compute(pairs: int, sizes: Sizes, rates: Rates) -> float:
    """Return the seconds of both passes of a rank's pairs, of one head, in all heads."""
    return sizes.of_pair * pairs * (1 / rates.forward + BACKWARD / rates.backward)


def measured(path: Path) -> dict[tuple[str, int, int, str], str]:
    """Return the measured shares of both passes, by mask, ranks, tokens of a rank and schedule.

    Without those of documents, which have other lengths there.
    """
    rows = [row for row in rows_at(path) if row["direction"] == "forward + backward"]
    return {(row["mask"], int(row["ranks"]), int(row["tokens_per_rank"]), row["schedule"]):
            f" ({float(row['share_of_ideal']):.2f})" for row in rows if row["mask"] != "documents"}


def table(path: Path) -> str:
    """Return the modelled shares as Markdown, each beside the measured one where there is one."""
    rates, known = rates_of(path), measured(path)
    lines = [f"| GPUs | tokens a rank | in all | {' | '.join(KINDS)} |", "|---:|---:|---:|" + "---|" * len(KINDS)]
    for ranks, tokens in CALLS:
        cells = []
        for kind in KINDS:
            shares = shares_of(problem_of(kind, ranks, tokens), rates)
            cells.append(", ".join(f"{name} {share:.2f}{known.get((kind, ranks, tokens, name), '')}"
                                   for name, share in shares.items()))
        lines.append(f"| {ranks} | {tokens} | {_in_k(ranks * tokens)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _in_k(tokens: int) -> str:
    return f"{tokens // 1024}k"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    print(table(parser.parse_args().path))
