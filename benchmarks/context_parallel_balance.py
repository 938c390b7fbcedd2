"""Time what each rank of context parallel attention computes, one rank after another on one GPU.

    python benchmarks/context_parallel_balance.py --out context-parallel-balance.csv
    python benchmarks/context_parallel_balance.py --device cpu --ranks 2 --tokens 64 --heads 4 2 --dim 16 --window 32

No process group is needed, and nothing is sent: in place of each message a rank finds the very tensor that the other
rank packed for it, made before anything is timed. All else that a rank does in a call is there: its local kernels, the
packing of what it would send, the merging of partial results, the sums of gradients. Plans are made and arguments
checked before. Results are held against those of the unsharded call first; a wrong one ends the script.

A row is one call. *slowest_ms* is the median of the rank that takes longest, *even_ms* the sum of all ranks' medians
divided by their number, *balance* the second divided by the first: what of the ranks' time is work where all wait for
the slowest one. *overhead* is the sum of all ranks' medians divided by the median of the unsharded call, less 1: what
cutting the pairs into blocks costs. *pairs_balance* is what balance would be were each visible pair as long as another.
The backward pass is timed alone. Ranks and the unsharded call take turns, as ``tilewise bench`` has it.

Calls are waited for one by one, so that the host is part of short ones. With ``--graph`` each is captured and its
replays are timed: what the GPU alone needs.

Documents are packed sequences, whose lengths are drawn between 1/32 and twice a rank's tokens, equally often between
each and its double; they are the same at every call.

The unsharded tensors, those of all ranks and their messages are in memory at once. By default a call has up to 8 ranks
of 32768 tokens, which is meant for a GPU of 80 GB. A size that does not fit ends the script with PyTorch's error, and
the rows before it are kept: name fewer --ranks or --tokens.
"""

import argparse
import csv
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import tilewise as tw
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.provenance import provenance
from tilewise.bench.timing import REGIMES, Call, Timing, graphed, measure, regime_named
from tilewise.distributed import (
    Layout,
    balanced,
    call_plan,
    context_parallel_attention,
    context_parallel_attention_varlen,
    function,
)
from tilewise.distributed.arguments import Arguments, arguments_of, packed_arguments_of
from tilewise.distributed.cost_model import Links, estimates
from tilewise.distributed.exchange import Message, Transfer, empty_message
from tilewise.distributed.layouts import named_layout
from tilewise.distributed.schedules import run_steps

MASKS, LAYOUTS = ("causal", "window", "documents"), ("contiguous", "zigzag", "balanced")
CASES = ("causal-zigzag", "window-contiguous", "window-balanced", "documents-balanced")
WHOLE = "unsharded"
# Of the largest number, by dtype: what results may differ from those of the unsharded call.
ERRORS = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4, "float64": 1e-10}
RECORDINGS = 3  # keys and values are right in the second one, and sums of gradients in the third one
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """A call's times in one pass; ``rank_ms``: every rank's median."""

    schedule: str
    layout: str
    mask: str
    direction: str
    ranks: int
    tokens_per_rank: int
    hq: int
    hk: int
    d: int
    dtype: str
    slowest_ms: float
    slowest_ms_p20: float
    slowest_ms_p80: float
    even_ms: float
    balance: float
    pairs_balance: float
    unsharded_ms: float
    overhead: float
    rank_ms: str
    regime: str
    sm_mhz: float | None
    largest_difference: float
    device_name: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens of each rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries, and of keys")
    parser.add_argument("--dim", type=int, default=128, help="head dim")
    parser.add_argument("--cases", nargs="+", default=CASES, help="mask and layout of each call",
                        choices=[f"{mask}-{layout}" for mask in MASKS for layout in LAYOUTS])
    parser.add_argument("--window", type=int, default=4096, help="keys that a query sees under the mask 'window'")
    parser.add_argument("--schedules", nargs="+", default=["ring", "all_gather"], choices=["ring", "all_gather"])
    parser.add_argument("--dtype", default="bfloat16", choices=list(ERRORS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--regime", choices=[name for name in REGIMES if name != "cold"],
                        help="of timing, as of `tilewise bench`; default: duty on a GPU, turns on a CPU")
    parser.add_argument("--graph", action="store_true", help="time replays of CUDA graphs, without the host")
    parser.add_argument("--commit", help="what is measured, where git does not tell")
    parser.add_argument("--out", type=Path, help="CSV, appended to; rows are printed as well")
    options = parser.parse_args(arguments)
    if options.graph and options.device != "cuda":
        parser.error(f"--graph with --device {options.device}; allowed is --device cuda")
    return options


@dataclass(frozen=True)
class Problem:
    """One unsharded call: q, k, v and dout, (1, h, s, d).

    borders: of packed sequences, on the CPU, where ranks read them; whole_borders: as the unsharded call takes them.
    """

    tensors: Tensors
    mask: Any
    layout: Layout
    ranks: int
    borders: torch.Tensor | None
    whole_borders: torch.Tensor | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return out of the unsharded call."""
        if self.whole_borders is None:
            return tw.attention(q, k, v, mask=self.mask)
        return _batch(tw.attention_varlen(_rows(q), _rows(k), _rows(v), mask=self.mask, cu_seqlens_q=self.whole_borders,
                                          cu_seqlens_k=self.whole_borders))

    def shard(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a rank's rows of (1, h, s, d), in memory as the whole tensor is."""
        return torch.cat([tensor[:, :, piece.start:piece.stop] for piece in self.layout.pieces[rank]], 2)

    def arguments(self, rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Arguments:
        """Return what a rank's call is given, checked as there."""
        length = self.layout.length
        given = {"mask": self.mask, "layout": self.layout, "lengths": (length, length), "seed": None}
        if self.borders is None:
            own = _defaults(context_parallel_attention) | given | {"q": q, "k": k, "v": v}
            return arguments_of(own, rank, self.ranks)
        own = _defaults(context_parallel_attention_varlen) | given | {
            "q": _rows(q), "k": _rows(k), "v": _rows(v), "cu_seqlens_q": self.borders, "dropout_p": 0}
        return packed_arguments_of(own, rank, self.ranks)


def problem_of(case: str, ranks: int, options: argparse.Namespace, tokens: int) -> Problem:
    """Draw one case's tensors."""
    mask_name, layout_name = case.split("-")
    length, causal = ranks * tokens, tw.causal("top_left")
    mask = causal & tw.window(options.window - 1, 0) if mask_name == "window" else causal
    borders, whole_mask = None, mask
    if mask_name == "documents":
        borders = torch.tensor(document_borders(length, tokens))
        whole_mask = mask & tw.documents(torch.repeat_interleave(torch.arange(len(borders) - 1), borders.diff()))
    layout = balanced(whole_mask, length, ranks) if layout_name == "balanced" else named_layout(
        layout_name, length, ranks)
    hq, hk = options.heads
    make = torch.Generator(options.device).manual_seed(0)
    dtype = getattr(torch, options.dtype)
    shapes = [(1, heads, length, options.dim) if borders is None else (length, heads, options.dim)
              for heads in (hq, hk, hk, hq)]
    drawn = [torch.randn(shape, generator=make, device=options.device, dtype=dtype) for shape in shapes]
    whole_borders = None if borders is None else borders.to(options.device, torch.int32)
    return Problem(tuple(drawn if borders is None else map(_batch, drawn)), mask, layout, ranks, borders, whole_borders)


def document_borders(length: int, tokens: int) -> list[int]:
    """Return where packed sequences begin and end, whose lengths are tokens · 2^x with x even between -5 and 1."""
    make, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < length:
        drawn = round(tokens * 2 ** (6 * torch.rand((), generator=make).item() - 5))
        lengths.append(min(max(1, drawn), length - sum(lengths)))
    return list(accumulate(lengths, initial=0))


class Messages:
    """What ranks send one another, kept and handed to the receiver when it makes room for it.

    All ranks of a plan exchange equally often and in one order, so that a message's sender, receiver and number tell
    it. Of messages that a rank has not sent yet, the receiver reads zeros.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, str, int], Message] = {}  # from, to, pass, number of the exchange
        self._from: dict[tuple[int, str, int], tuple[int, int, str, int]] = {}  # of a receiver's message the key above
        self._rank, self._pass, self._rooms, self._exchanges, self._records = 0, "", [], 0, False

    def begin(self, rank: int, direction: str, *, records: bool) -> None:
        """Let a rank begin a pass; ``records``: whether what it sends is kept."""
        self._rank, self._pass, self._rooms, self._exchanges, self._records = rank, direction, [], 0, records

    def empty_message(self, forms: Any, device: torch.device) -> Message:
        """Return what has been sent, in place of the room for it."""
        key = self._from.get((self._rank, self._pass, len(self._rooms)))
        sent = None if key is None else self._sent.get(key)
        if sent is None:
            sent = tuple([own.zero_() for own in empty_message(forms, device)])
        self._rooms.append(sent)
        return sent

    def start(self, group: None, sends: dict[int, Message], receives: dict[int, Message]) -> Transfer:
        """Keep what is sent, and note which exchange each received message belongs to."""
        if self._records:
            for peer, message in sends.items():
                self._sent[self._rank, peer, self._pass, self._exchanges] = message
            for peer, message in receives.items():
                room = next(number for number, room in enumerate(self._rooms) if room is message)
                self._from[self._rank, self._pass, room] = peer, self._rank, self._pass, self._exchanges
        self._exchanges += 1
        return Transfer((), (), {})


class Rank:
    """One rank's call: both passes, and what came of them."""

    def __init__(self, problem: Problem, rank: int, schedule: str, messages: Messages) -> None:
        self._problem, self._rank, self._schedule, self._messages = problem, rank, schedule, messages
        *self._inputs, self._dout = (problem.shard(rank, tensor) for tensor in problem.tensors)
        self._leaves: Tensors = ()
        self._arguments: Arguments
        self._out = torch.empty(0)

    def forward(self, *, records: bool = False, with_graph: bool = False) -> torch.Tensor:
        """Return out."""
        self._messages.begin(self._rank, "forward", records=records)
        with torch.set_grad_enabled(with_graph):
            return run_steps(self._schedule, self._arguments, None, self._rank)[0]

    def record(self) -> Tensors:
        """Run both passes, keep what is sent; return out and the gradients."""
        self._begin(records=True)
        return self._out.detach(), *self.backward(records=True)

    def _begin(self, *, records: bool = False) -> None:
        """Run the forward pass, and keep its graph.

        Leaves are new ones each time: the nodes of a graph keep the stream on which they were made.
        """
        self._leaves = tuple([tensor.detach().requires_grad_() for tensor in self._inputs])
        self._arguments = self._problem.arguments(self._rank, *self._leaves)
        self._out = self.forward(records=records, with_graph=True)

    def backward(self, *, records: bool = False) -> Tensors:
        """Return the gradients."""
        self._messages.begin(self._rank, "backward", records=records)
        return torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    def call(self, direction: str) -> Call:
        """Return a pass to be repeated, on the stream that is current; what other ranks sent stays where it is."""
        if direction == "forward":
            return self.forward
        self._begin()
        return self.backward

    def pairs_balance(self) -> float:
        """Return an even share of the visible pairs divided by the largest one."""
        found = estimates(self._arguments.problem, self._arguments.sizes, Links())
        return found["ulysses"].pairs / found["ring"].pairs


def timings_of(problem: Problem, schedule: str, options: argparse.Namespace,
               clocks: ClockSampler) -> Iterator[tuple[str, dict[str, Timing], float, float]]:
    """Yield of each pass the times of the unsharded call and of the ranks, the largest difference and pairs_balance."""
    messages = Messages()
    # A plan's tensors on the device live as long as its rank's arguments, so longer than the graphs that read them. To
    # make them anew is a copy from the host, which cannot be captured.
    with (patch.object(function, "start", messages.start),
          patch.object(function, "empty_message", messages.empty_message),
          patch.object(call_plan, "is_capturing", lambda device: False)):
        ranks = [Rank(problem, rank, schedule, messages) for rank in range(problem.ranks)]
        for _ in range(RECORDINGS - 1):
            for rank in ranks:
                rank.record()
        *inputs, dout = problem.tensors
        leaves = tuple([tensor.requires_grad_() for tensor in inputs])
        out = problem.attend(*leaves)
        whole = out.detach(), *torch.autograd.grad(out, leaves, dout)
        difference = max(_difference(problem, number, rank.record(), whole) for number, rank in enumerate(ranks))
        del whole, out  # with its graph
        if not difference <= ERRORS[options.dtype]:
            tokens = problem.layout.length // problem.ranks
            raise SystemExit(f"{schedule}, {problem.mask}, layout {problem.layout.name}, {problem.ranks} ranks of "
                             f"{tokens} tokens differ from the unsharded call by {difference:.1e} of the largest "
                             f"number; allowed is {ERRORS[options.dtype]}.")
        device = torch.device(options.device)
        for direction in ("forward", "backward"):
            builds = {WHOLE: partial(_whole_call, problem, leaves, direction),
                      **{str(number): partial(rank.call, direction) for number, rank in enumerate(ranks)}}
            calls = {name: graphed(build, device) if options.graph else build() for name, build in builds.items()}
            for call in calls.values():
                call()
            found = measure(calls, regime_named(options.regime, device), device, clocks)
            yield direction, found, difference, ranks[0].pairs_balance()


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Time every combination."""
    device = torch.device(options.device)
    origin = provenance(device, "", options.commit)
    with ClockSampler(device) as clocks:
        for tokens, ranks, case, schedule in ((tokens, ranks, case, schedule) for tokens in options.tokens
                                              for ranks in options.ranks for case in options.cases
                                              for schedule in options.schedules):
            problem = problem_of(case, ranks, options, tokens)
            mask, layout = case.split("-")
            for direction, found, difference, pairs_balance in timings_of(problem, schedule, options, clocks):
                whole = found.pop(WHOLE)
                slowest = max(found.values(), key=lambda own: own.p50)
                total = sum(own.p50 for own in found.values())
                yield Row(schedule, layout, mask, direction, ranks, tokens, *options.heads, options.dim, options.dtype,
                          slowest.p50, slowest.p20, slowest.p80, total / ranks, total / ranks / slowest.p50,
                          pairs_balance, whole.p50, total / whole.p50 - 1,
                          " ".join(f"{own.p50:.6g}" for own in found.values()),
                          regime_named(options.regime, device).name + ("+graph" if options.graph else ""),
                          whole.clocks.sm_mhz, difference,
                          origin.device_name, origin.driver, origin.torch, origin.triton, origin.commit, origin.date)


def write(row: Row, out: Path | None) -> None:
    """Print a row, and add it to a file."""
    print(f"{row.schedule}, {row.mask} {row.layout}, {row.direction}, {row.ranks} ranks of {row.tokens_per_rank} "
          f"tokens: slowest {row.slowest_ms:.3f} ms, even share {row.even_ms:.3f} ms, balance {row.balance:.3f}, "
          f"overhead {row.overhead:.1%}", flush=True)
    if out is None:
        return
    is_new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([field.name for field in fields(Row)])
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in asdict(row).values()])


def table(path: Path) -> str:
    """Return rows as Markdown: of each call its slowest rank, balance and overhead."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines = ["| call | ranks | slowest rank | balance | by pairs | overhead |", "|---|" + "---:|" * 5]
    lines += [f"| {row['schedule']}, {row['mask']}, {row['layout']}, {row['direction']} | {row['ranks']} of "
              f"{row['tokens_per_rank']} | {float(row['slowest_ms']):.2f} ms | {float(row['balance']):.2f} | "
              f"{float(row['pairs_balance']):.2f} | {100 * float(row['overhead']):.0f} % |" for row in rows]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Time, print and write."""
    options = parsed(arguments)
    for row in rows_of(options):
        write(row, options.out)
    return 0


def _whole_call(problem: Problem, leaves: Tensors, direction: str) -> Call:
    """Return a pass of the unsharded call, as ``Rank.call`` does of a rank's."""
    if direction == "forward":
        return torch.no_grad()(partial(problem.attend, *leaves))
    return partial(torch.autograd.grad, problem.attend(*leaves), leaves, problem.tensors[-1], retain_graph=True)


def _difference(problem: Problem, rank: int, made: Tensors, whole: Tensors) -> float:
    """Return the largest difference of a rank's results from its rows of the whole ones, of their largest number."""
    return max(float((got - problem.shard(rank, wanted)).abs().max() / wanted.abs().max())
               for got, wanted in zip(made, whole, strict=True))


def _defaults(call: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's arguments that have a default."""
    return {name: own.default for name, own in inspect.signature(call).parameters.items()
            if own.default is not inspect.Parameter.empty}


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(0).transpose(0, 1)


def _batch(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1).unsqueeze(0)


if __name__ == "__main__":
    sys.exit(main())
