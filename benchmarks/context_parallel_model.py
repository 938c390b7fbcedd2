"""Model the share of ideal of context parallel calls on GPUs that were not there: counted from plans, not measured.

Usage: ``python benchmarks/context_parallel_model.py benchmarks/results/nvidia-h100/context-parallel.csv`` prints the
table. From those rows come the rates of attention: of their longest causal call on one GPU, forward and backward. The
bytes that a rank receives, its pairs, and the rows that it merges are those of the plans (cost_model.py), which the
library computes calls by. A pass takes

    ring        max(compute, received / bandwidth) + merging + a latency for each step with messages
    all_gather  max(compute, received / bandwidth) + the first group of heads' keys + a latency a group
    ulysses     compute + exchanged / bandwidth + two latencies + copies

and what calls take beside their work. A backward pass receives keys and values once more, and dK and dV in float32:
three times the bytes, but for Ulysses, which exchanges as much as in the forward. Of a ring that is an upper bound: the
keys of its last step are kept. *Ideal* is an even share of the pairs
at the same rate.
"""

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import tilewise as tw
from tilewise.distributed.cost_model import Estimate, Links, Sizes, estimates, estimates_of_rows, groups_of
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


def rates_of(path: Path) -> Rates:
    """Return the rates of the longest causal call that the rows have on one GPU."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mask"] == "causal"]
    longest = max(int(row["tokens_per_rank"]) for row in rows)
    rows = [row for row in rows if int(row["tokens_per_rank"]) == longest]
    ms = {row["direction"]: float(row["ideal_ms"]) for row in rows}
    # One rank's share of the pairs of all: a causal call of sqrt(ranks) times the tokens.
    operations = 4 * int(rows[0]["hq"]) * int(rows[0]["d"]) * longest ** 2 * int(rows[0]["ranks"]) / 2
    forward = ms["forward"] / 1e3
    return Rates(operations / forward, 2.5 * operations / (ms["forward + backward"] / 1e3 - forward))


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
    links = Links(rates.forward, NVLINK if problem.ranks <= HOST else NETWORK)
    found = estimates(problem, SIZES, links)
    ideal = _compute(found["ulysses"].pairs, SIZES, rates)
    seconds = {name: sum(_passes(name, found[name], SIZES, links, rates)) for name in ("ring", "all_gather")}
    if problem.ranks <= KV_HEADS:
        seconds["ulysses"] = ideal + 2 * (found["ulysses"].seconds - _compute(found["ulysses"].pairs, SIZES, rates,
                                                                              backward=False))
    if problem.ranks > HOST:
        seconds["ring of hosts"] = _of_hosts(problem, links, rates)
    return {name: ideal / own for name, own in seconds.items()}


def _of_hosts(problem: Problem, links: Links, rates: Rates) -> float:
    """Return the seconds of a mesh of two dims: the exchange of heads by NVLink, and a ring of hosts."""
    layout = layout_of_rows(problem.queries, HOST)
    rows = replace(problem, queries=layout, keys=layout)
    whole = estimates_of_rows(rows, problem.queries, SIZES, replace(links, bandwidth=NVLINK))["ring"]
    sizes = replace(SIZES, hq=HEADS // HOST, hk=KV_HEADS // HOST)
    in_host, across = (estimates(replace(rows, kv_heads=sizes.hk), sizes, own)["ring"]
                       for own in (replace(links, bandwidth=NVLINK), links))
    return 2 * (whole.seconds - in_host.seconds) + sum(_passes("ring", across, sizes, links, rates))


def _passes(schedule: str, found: Estimate, sizes: Sizes, links: Links, rates: Rates) -> Iterator[float]:
    """Yield the seconds of the forward and of the backward pass."""
    forward, both = _compute(found.pairs, sizes, rates, backward=False), _compute(found.pairs, sizes, rates)
    received = found.bytes_received / links.bandwidth
    yield found.seconds
    beside = found.seconds - max(forward, received)  # merging and latencies, or the first group of heads too
    yield max(both - forward, 3 * received) + beside + (2 * received / groups_of(sizes.hk)
                                                        if schedule == "all_gather" else 0.0)


def _compute(pairs: int, sizes: Sizes, rates: Rates, *, backward: bool = True) -> float:
    """Return the seconds of a rank's pairs, of one head, in all heads."""
    operations = 4 * sizes.hq * DIM * pairs
    return operations / rates.forward + (2.5 * operations / rates.backward if backward else 0.0)


def measured(path: Path) -> dict[tuple[str, int, int, str], str]:
    """Return the measured shares of both passes, by mask, ranks, tokens of a rank and schedule.

    Without those of documents, which have other lengths there.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == "forward + backward"]
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
