"""Time context parallel attention on real ranks, beside one rank's time for its share of the pairs.

    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --tokens 8192 32768 131072 --out context-parallel.csv
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --head-ranks 2 --schedules ring all_gather
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --passes both --peers torch_allgather_flash
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --device cpu --tokens 64 --heads 4 2 --dim 16

On GPUs ranks speak NCCL, on CPUs gloo. A cell is a mask, a layout, a length and a pass; its calls are timed in turns,
so that all of them have the same clocks, and its rows are written once it is done: a run that was cut off goes on with
the cells that are left. Each row is one call of all ranks: its time is that of the slowest rank, the median of the
repetitions with their 20th and 80th percentiles; with ``--queue N``, of N calls behind one another, divided by N: as
in a model of N layers all forward passes come first, and then their backward passes.

*Ideal* is the time that one GPU alone takes, by our kernels and without messages, for an even share of all visible
pairs: the call of the whole on one GPU, divided by the number of ranks ("whole / ranks" in the row); or where the whole
is longer than ``--whole-tokens``, a shorter call, times an even share of the pairs over those of that call ("by
pairs"). It is the mean over the ranks' GPUs. *Share of ideal* is that time divided by the row's. Rows without a column
"ideal" are older: theirs is a call of sqrt(ranks) times a rank's tokens, of windows and documents one of the first
rank's tokens. Results are compared with the whole call's where there is one.

``--peers`` are timed beside ours on the same shards, after their results have been compared with ours
(context_parallel_torch.py); a peer that does not take a cell has a row that says why.
"""

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import context_parallel_torch as peer_of_torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise as tw
from tilewise.distributed import context_parallel_attention, positions, shard

FIELDS = ("schedule", "layout", "mask", "direction", "ranks", "head_ranks", "tokens_per_rank", "hq", "hk", "d", "dtype",
          "median_ms", "p20_ms", "p80_ms", "ideal_ms", "share_of_ideal", "largest_difference", "ideal", "queue",
          "repetitions", "note", "device_name", "torch", "commit", "date")
MASKS = ("causal", "window", "documents", "full")
LAYOUTS = {"causal": "zigzag", "full": "zigzag", "window": "contiguous", "documents": "contiguous"}
PASSES = {"forward": "forward", "both": "forward + backward"}
IDEAL = "ideal"  # the name of that call among those of a cell
SPREAD = (0.2, 0.8)
LEAST = 3  # repetitions, however long they take
Calls = dict[str, Callable[..., tuple[torch.Tensor, ...]]]  # each takes a count, as ``step`` does


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens of each rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries, and of keys")
    parser.add_argument("--dim", type=int, default=128, help="head dim")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "window", "documents"])
    parser.add_argument("--window", type=int, default=4096, help="keys that a query sees under the mask 'window'")
    parser.add_argument("--schedules", nargs="+", default=["ring", "all_gather", "ulysses"])
    parser.add_argument("--layouts", nargs="+", help="default: contiguous for windows and documents, else zigzag")
    parser.add_argument("--passes", nargs="+", choices=list(PASSES), default=list(PASSES), help="forward, or forward "
                        "and backward")
    parser.add_argument("--peers", nargs="*", choices=peer_of_torch.PEERS, default=[], help="torch's context parallel "
                        "attention: how keys come, and which kernel computes")
    parser.add_argument("--head-ranks", type=int, default=0, help="ranks that exchange heads: those of the second dim "
                        "of a mesh of two, whose first dim has the schedule; default: a mesh of one dim")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--repetitions", type=int, default=20, help="of each call, at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a cell's repetitions, about: they are fewer, "
                        f"but {LEAST} at least, where calls are long")
    parser.add_argument("--queue", type=int, default=1, help="calls behind one another, without a wait between them")
    parser.add_argument("--whole-tokens", type=int, default=262144, help="tokens of all ranks up to which one GPU "
                        "computes the whole, for the ideal and to compare results")
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="CSV, appended to after each cell; default: rows are "
                        "printed")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Cell:
    """What is timed together: a mask by name, a layout, tokens of a rank, and whether there is a backward pass."""

    mask: str
    layout: str
    tokens: int
    has_backward: bool


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that were asked for, those of a length one behind the other."""
    return [Cell(mask, layout, tokens, passes == "both") for tokens in options.tokens for mask in options.masks
            for layout in options.layouts or [LAYOUTS[mask]] for passes in PASSES if passes in options.passes]


def mask_of(cell: Cell, length: int, options: argparse.Namespace) -> Any:
    """Return the mask of a sequence of so many tokens.

    Documents have half of a rank's tokens, and cross the borders of all pieces. Ids are on the CPU.
    """
    if cell.mask == "full":
        return None
    if cell.mask == "causal":
        return tw.causal("top_left")
    if cell.mask == "window":
        return tw.causal("top_left") & tw.window(options.window - 1, 0)
    return tw.causal("top_left") & tw.documents(_ids(cell, length))


def _ids(cell: Cell, length: int) -> torch.Tensor:
    each = max(1, cell.tokens // 2)
    return (torch.arange(length) + each // 2) // each


def pairs_of(cell: Cell, length: int, options: argparse.Namespace) -> int:
    """Return how many pairs of a sequence of so many tokens are visible."""
    if cell.mask == "full":
        return length ** 2
    if cell.mask == "causal":
        return length * (length + 1) // 2
    if cell.mask == "window":
        inside = min(options.window, length)
        return inside * (inside + 1) // 2 + (length - inside) * inside
    return sum(own * (own + 1) // 2 for own in torch.bincount(_ids(cell, length)).tolist())


def on_device(mask: Any, device: torch.device) -> Any:
    """Return a mask for one device, whose ids lie there."""
    if not isinstance(mask, tw.masks.TensorMask):
        return mask
    ids = mask.documents.q[:, 0].to(device)
    return mask.band & tw.documents(ids)


def timed(calls: Calls, device: torch.device, options: argparse.Namespace,
          together: dist.ProcessGroup) -> dict[str, list[float]]:
    """Return the milliseconds of each call's repetitions, which take turns, ascending.

    Of the calls of all ranks it is the slowest rank's time, all of them starting at once; of the ideal the mean.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    repetitions, done = options.repetitions, -2  # the first ones compile, plan and agree
    while done < repetitions:
        for name, call in calls.items():
            found[name].append(_once(call, device, options.queue, together, averages=name == IDEAL))
        done += 1
        if done == 0:
            round_s = sum(own[-1] for own in found.values()) * options.queue / 1e3
            repetitions = max(min(LEAST, repetitions), min(repetitions, int(options.seconds / round_s)))
            found = {name: [] for name in calls}
    return {name: sorted(own) for name, own in found.items()}


def _once(call: Callable[..., Any], device: torch.device, queue: int, together: dist.ProcessGroup, *,
          averages: bool) -> float:
    """Return the milliseconds of a call, of so many behind one another: alike on every rank."""
    dist.barrier(together)
    synchronize(device)
    begin = time.perf_counter()
    call(count=queue)
    synchronize(device)
    taken = torch.tensor([(time.perf_counter() - begin) * 1e3 / queue], dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.SUM if averages else dist.ReduceOp.MAX, group=together)
    return taken.item() / (dist.get_world_size(together) if averages else 1)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step(attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], dout: torch.Tensor | None,
         count: int = 1) -> tuple[torch.Tensor, ...]:
    """Call so many times, then go back through all of them where there is a dout; return out and gradients of one."""
    if dout is None:
        with torch.no_grad():
            return tuple([attend(*tensors) for _ in range(count)][-1:])
    leaves = [tensor.detach().requires_grad_() for _ in range(count) for tensor in tensors]
    outs = [attend(*leaves[first:first + len(tensors)]) for first in range(0, len(leaves), len(tensors))]
    gradients = torch.autograd.grad(outs, leaves, [dout] * count)
    return outs[-1].detach(), *gradients[-len(tensors):]


def drawn(tokens: int, options: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and dout of so many tokens, alike on every rank: drawn on its device, of which all are alike."""
    make = torch.Generator(device).manual_seed(0)
    heads = (options.heads[0], options.heads[1], options.heads[1], options.heads[0])
    dtype = getattr(torch, options.dtype)
    return tuple([torch.randn(1, count, tokens, options.dim, generator=make, device=device).to(dtype)
                  for count in heads])


@dataclass(frozen=True)
class Ideal:
    """The call of one GPU alone.

    Attributes:
        tokens: of its sequence.
        times: its time times this is the ideal.
        how: the word of the rows for it.
    """

    tokens: int
    times: float
    how: str

    @classmethod
    def of(cls, cell: Cell, options: argparse.Namespace, ranks: int) -> "Ideal":
        """Choose the whole, or where that is too long, a call with about as many pairs as an even share."""
        length = cell.tokens * ranks
        if length <= options.whole_tokens:
            return cls(length, 1 / ranks, "whole / ranks")
        tokens = cell.tokens
        if cell.mask in ("causal", "full"):
            tokens = max(1, round(tokens * math.sqrt(ranks) / 128) * 128 or tokens)
        share = pairs_of(cell, length, options) / ranks
        return cls(tokens, share / pairs_of(cell, tokens, options), "by pairs")


def difference(made: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], own: torch.Tensor) -> float:
    """Return the largest difference of this rank's results from its part of the whole ones."""
    wide = torch.promote_types(made[0].dtype, torch.float32)
    return max(float((got.to(wide) - whole[:, :, own].to(wide)).abs().max()) for got, whole in zip(
        made, wanted, strict=True))


def rows_of(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time every cell, all ranks together; yield a cell's rows once it is done."""
    ranks, together = mesh.size(), mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    whole: tuple[torch.Tensor, ...] = ()
    for cell in cells_of(options):
        if not whole or whole[0].shape[2] != cell.tokens * ranks:
            whole = ()  # two lengths at once may not fit
            whole = drawn(cell.tokens * ranks, options, device)
        yield from Timing(cell, options, mesh, device, together).rows(whole)


@dataclass(frozen=True)
class Timing:
    """A cell on these ranks."""

    cell: Cell
    options: argparse.Namespace
    mesh: DeviceMesh
    device: torch.device
    together: Any

    def rows(self, whole: tuple[torch.Tensor, ...]) -> Iterator[dict[str, Any]]:
        """Compare results, time all calls in turns, and yield a row for each, and for each peer that refuses."""
        cell, options = self.cell, self.options
        with ExitStack() as stack:
            ideal, calls = Ideal.of(cell, options, self.mesh.size()), self._ours(whole)
            wrong, notes = self._differences(calls, whole, ideal), dict.fromkeys(calls, "")
            reason = peer_of_torch.why_not(cell.mask, cell.layout, self.mesh, self.device) if options.peers else None
            if options.peers and reason is None:
                shards = stack.enter_context(peer_of_torch.sharded(self.mesh, whole))
                self._add_peers(shards, calls, wrong, notes)
            notes |= {name: f"refused: {reason}" for name in options.peers if reason is not None}
            calls[IDEAL] = self._alone(whole, ideal)
            times = timed(calls, self.device, options, self.together)
            alone = statistics.median(times.pop(IDEAL)) * ideal.times
            for name, note in notes.items():
                yield row(options, cell, name, times.get(name), {
                    "ranks": self.mesh.size(), "ideal_ms": f"{alone:.3f}", "ideal": ideal.how, "note": note,
                    "largest_difference": "" if wrong.get(name) is None else f"{wrong[name]:.1e}"})

    def _ours(self, whole: tuple[torch.Tensor, ...]) -> Calls:
        """Return a call for each schedule, on this rank's shards."""
        cell, found = self.cell, {}
        mask = mask_of(cell, whole[0].shape[2], self.options)
        *parts, dout = (shard(one, self.mesh, dim=2, layout=cell.layout).contiguous() for one in whole)
        for schedule in self.options.schedules:
            attend = partial(context_parallel_attention, mesh=self.mesh, layout=cell.layout, mask=mask,
                             schedule=schedule)
            found[schedule] = partial(step, attend, tuple(parts), dout if cell.has_backward else None)
        return found

    def _alone(self, whole: tuple[torch.Tensor, ...], ideal: Ideal) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the call of one GPU."""
        own = whole if ideal.tokens == whole[0].shape[2] else drawn(ideal.tokens, self.options, self.device)
        mask = on_device(mask_of(self.cell, ideal.tokens, self.options), self.device)
        return partial(step, partial(tw.attention, mask=mask), own[:3], own[3] if self.cell.has_backward else None)

    def _differences(self, calls: Calls, whole: tuple[torch.Tensor, ...], ideal: Ideal) -> dict[str, float | None]:
        """Return each call's largest difference from the whole one, on any rank; None where that is too long."""
        if ideal.tokens != whole[0].shape[2]:
            return dict.fromkeys(calls)
        expected = self._alone(whole, ideal)()
        own = positions(self.mesh, length=ideal.tokens, layout=self.cell.layout, device=self.device)
        found = torch.tensor([difference(call(), expected, own) for call in calls.values()], dtype=torch.float64,
                             device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.together)
        return dict(zip(calls, found.tolist(), strict=True))

    def _add_peers(self, shards: list[torch.Tensor], calls: Calls, wrong: dict[str, float | None],
                   notes: dict[str, str]) -> None:
        """Add the peers whose results are ours, and say of all what there is to say."""
        ours = next(iter(calls.values()))()
        *parts, dout = shards

        def run(attend: Callable[..., torch.Tensor], count: int = 1) -> tuple[torch.Tensor, ...]:
            return step(attend, tuple(parts), dout if self.cell.has_backward else None, count)

        for name in self.options.peers:
            attend, wrong[name], said = peer_of_torch.checked(name, run, ours, self.together)
            notes[name] = said if attend is not None else f"refused: {said}"
            if attend is not None:
                calls[name] = partial(run, attend)


def row(options: argparse.Namespace, cell: Cell, schedule: str, times: list[float] | None,
        found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the table: of times, or None of a call that was refused, and of what else was found."""
    made: dict[str, Any] = dict.fromkeys(FIELDS, "") | {
        "schedule": schedule, "layout": cell.layout, "mask": cell.mask,
        "direction": PASSES["both" if cell.has_backward else "forward"], "head_ranks": options.head_ranks or "",
        "tokens_per_rank": cell.tokens, "hq": options.heads[0], "hk": options.heads[1], "d": options.dim,
        "dtype": options.dtype, "queue": options.queue, "torch": torch.__version__, "commit": options.commit,
        "device_name": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "date": datetime.now(UTC).date().isoformat()} | found
    if times is not None:
        median = statistics.median(times)
        low, high = (times[min(len(times) - 1, int(part * len(times)))] for part in SPREAD)
        made |= {"median_ms": f"{median:.3f}", "p20_ms": f"{low:.3f}", "p80_ms": f"{high:.3f}",
                 "share_of_ideal": f"{float(made['ideal_ms']) / median:.3f}", "repetitions": len(times)}
    return made


@contextmanager
def group(options: argparse.Namespace) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Join the ranks that torchrun started."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    by_nccl = options.device == "cuda" and dist.is_nccl_available()
    dist.init_process_group("nccl" if by_nccl else "gloo", device_id=device if by_nccl else None)
    try:
        ranks, size = dist.get_world_size(), options.head_ranks
        if size:
            yield init_device_mesh(options.device, (ranks // size, size), mesh_dim_names=("steps", "heads")), device
        else:
            yield init_device_mesh(options.device, (ranks,), mesh_dim_names=("cp",)), device
    finally:
        dist.destroy_process_group()


def write(found: dict[str, Any], out: Path | None) -> None:
    """Add a row to a file, or print it; a file with other columns is refused, whose rows mean something else."""
    if out is None:
        print(", ".join(f"{name} {value}" for name, value in found.items() if value != ""), flush=True)
        return
    is_new = not out.exists()
    if not is_new:
        with out.open(newline="") as file:
            if tuple(next(csv.reader(file), ())) != FIELDS:
                raise SystemExit(f"{out} has other columns than these rows: {', '.join(FIELDS)}; name a new file.")
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(found)


def table(path: Path) -> str:
    """Return a file's rows as Markdown, see :func:`table_of`."""
    with path.open(newline="") as file:
        return table_of(csv.DictReader(file))


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as Markdown: of each call and schedule its time, and what share of ideal that is."""
    rows = [row for row in rows if row["median_ms"]]  # without those that were refused
    schedules = list(dict.fromkeys(row["schedule"] for row in rows))
    calls: dict[str, dict[str, str]] = {}
    for row in rows:
        queued = "" if str(row.get("queue") or 1) == "1" else f", {row['queue']} behind one another"
        name = f"{row['mask']}, {row['layout']}, {row['tokens_per_rank']} tokens a rank, {row['direction']}{queued}"
        cell = f"{float(row['median_ms']):.2f} ms, {float(row['share_of_ideal']):.2f}"
        calls.setdefault(name, {"ideal": f"{float(row['ideal_ms']):.2f} ms"})[row["schedule"]] = cell
    lines = [f"| call | ideal | {' | '.join(schedules)} |", "|---|" + "---:|" * (1 + len(schedules))]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells.get(column, '') for column in ('ideal', *schedules))} |"
                              for name, cells in calls.items()])


def main(arguments: list[str] | None = None) -> int:
    """Time, and let the first rank write each row, and print this run's table at the end."""
    options, rows = parsed(arguments), []
    with group(options) as (mesh, device):
        is_first = dist.get_rank() == 0
        for found in rows_of(options, mesh, device):
            rows.append(found)
            if is_first:
                write(found, options.out)
    if is_first:
        print(table_of(rows), flush=True)
        for found in rows:
            if found["note"]:
                print(f"{found['mask']}, {found['tokens_per_rank']} tokens a rank, {found['direction']}, "
                      f"{found['schedule']}: {found['note']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
