"""Time context parallel attention on real ranks, beside one rank's time for its share of the pairs.

    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --tokens 8192 32768 131072 --out context-parallel.csv
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --head-ranks 2 --schedules ring all_gather
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --device cpu --tokens 64 --heads 4 2 --dim 16

On GPUs ranks speak NCCL, on CPUs gloo. Each row is one call of all ranks: its time is that of the slowest rank, the
median of the repetitions with their 20th and 80th percentiles. Its results are compared with the one-device call first
where the whole sequence is short enough. *Ideal* is what one rank needs alone, in the same process and on the same
device, for as many pairs as its share: a causal call of sqrt(ranks) times the tokens; of windows and documents the
tokens of one rank. *Share of ideal* is that time divided by the row's.
"""

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise as tw
from tilewise.distributed import context_parallel_attention, positions, shard

FIELDS = ("schedule", "layout", "mask", "direction", "ranks", "head_ranks", "tokens_per_rank", "hq", "hk", "d", "dtype",
          "median_ms", "p20_ms", "p80_ms", "ideal_ms", "share_of_ideal", "largest_difference", "device_name", "torch",
          "commit", "date")
MASKS = ("causal", "window", "documents", "full")
CHECKED = 16384  # tokens of all ranks up to which results are compared with one device's
SPREAD = (0.2, 0.8)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens of each rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries, and of keys")
    parser.add_argument("--dim", type=int, default=128, help="head dim")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "window", "documents"])
    parser.add_argument("--window", type=int, default=4096, help="keys that a query sees under the mask 'window'")
    parser.add_argument("--schedules", nargs="+", default=["ring", "all_gather", "ulysses"])
    parser.add_argument("--layouts", nargs="+", default=["zigzag"])
    parser.add_argument("--head-ranks", type=int, default=0, help="ranks that exchange heads: those of the second dim "
                        "of a mesh of two, whose first dim has the schedule; default: a mesh of one dim")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="CSV, appended to; default: rows are printed")
    return parser.parse_args(arguments)


def mask_of(name: str, tokens: int, options: argparse.Namespace, shift: bool = True) -> Any:
    """Return the mask of a sequence of so many tokens.

    Documents have half of a rank's tokens, and with ``shift`` they cross the borders of all pieces. Ids are on the CPU.
    """
    if name == "full":
        return None
    if name == "causal":
        return tw.causal("top_left")
    if name == "window":
        return tw.causal("top_left") & tw.window(options.window - 1, 0)
    each = max(1, options.tokens_now // 2)
    return tw.causal("top_left") & tw.documents((torch.arange(tokens) + each // 2 * shift) // each)


def on_device(mask: Any, device: torch.device) -> Any:
    """Return a mask for one device, whose ids lie there."""
    if not isinstance(mask, tw.masks.TensorMask):
        return mask
    ids = mask.documents.q[:, 0].to(device)
    return mask.band & tw.documents(ids)


def timed(call: Callable[[], Any], device: torch.device, repetitions: int,
          together: dist.ProcessGroup | None) -> list[float]:
    """Return the milliseconds of each repetition; ``together``: of these ranks' slowest one, started at once."""
    found = []
    for repetition in range(repetitions + 2):
        if together is not None:
            dist.barrier(together)
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        taken = torch.tensor([(time.perf_counter() - begin) * 1e3], dtype=torch.float64, device=device)
        if together is not None:
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=together)
        if repetition >= 2:  # the first ones compile, plan and agree
            found.append(taken.item())
    return sorted(found)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step(attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...],
         dout: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return out and, where there is a dout, the gradients."""
    if dout is None:
        with torch.no_grad():
            return (attend(*tensors),)
    leaves = tuple([tensor.detach().requires_grad_() for tensor in tensors])
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def drawn(tokens: int, options: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and dout of so many tokens, alike on every rank."""
    make = torch.Generator().manual_seed(0)
    heads = (options.heads[0], options.heads[1], options.heads[1], options.heads[0])
    dtype = getattr(torch, options.dtype)
    return tuple([torch.randn(1, count, tokens, options.dim, generator=make).to(dtype).to(device) for count in heads])


def ideal(name: str, options: argparse.Namespace, device: torch.device, ranks: int, with_gradient: bool) -> float:
    """Return the milliseconds of one rank's share of the pairs on one device."""
    tokens = options.tokens_now
    if name in ("causal", "full"):
        tokens = max(1, round(tokens * math.sqrt(ranks) / 128) * 128 or tokens)
    q, k, v, dout = drawn(tokens, options, device)
    mask = on_device(mask_of(name, tokens, options, shift=False), device)
    call = partial(step, partial(tw.attention, mask=mask), (q, k, v), dout if with_gradient else None)
    times = timed(call, device, options.repetitions, None)
    return statistics.median(times)


def difference(made: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], own: torch.Tensor) -> float:
    """Return the largest difference of this rank's results from its part of the whole ones."""
    return max(float((got.double() - whole[:, :, own].double()).abs().max()) for got, whole in zip(
        made, wanted, strict=True))


def rows_of(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time every combination; all ranks together."""
    ranks, together = mesh.size(), mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    for tokens in options.tokens:
        options.tokens_now = tokens
        whole = drawn(tokens * ranks, options, device)
        for name in options.masks:
            mask = mask_of(name, tokens * ranks, options)
            for with_gradient in (False, True):
                expected = None
                if tokens * ranks <= CHECKED:
                    local = on_device(mask, device)
                    expected = step(partial(tw.attention, mask=local), whole[:3], whole[3] if with_gradient else None)
                alone = ideal(name, options, device, ranks, with_gradient)
                for layout in options.layouts:
                    own = positions(mesh, length=tokens * ranks, layout=layout, device=device)
                    *parts, dout = (shard(one, mesh, dim=2, layout=layout).contiguous() for one in whole)
                    for schedule in options.schedules:
                        attend = partial(context_parallel_attention, mesh=mesh, layout=layout, mask=mask,
                                         schedule=schedule)
                        call = partial(step, attend, tuple(parts), dout if with_gradient else None)
                        wrong = None if expected is None else difference(call(), expected, own)
                        times = timed(call, device, options.repetitions, together)
                        yield row(options, (schedule, layout, name, with_gradient), ranks, times, (alone, wrong))


def row(options: argparse.Namespace, what: tuple[str, str, str, bool], ranks: int, times: list[float],
        beside: tuple[float, float | None]) -> dict[str, Any]:
    """Return a line of the table."""
    schedule, layout, mask, with_gradient = what
    median, (alone, wrong) = statistics.median(times), beside
    low, high = (times[min(len(times) - 1, int(part * len(times)))] for part in SPREAD)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    values = (schedule, layout, mask, "forward + backward" if with_gradient else "forward", ranks,
              options.head_ranks or "", options.tokens_now, *options.heads, options.dim, options.dtype,
              f"{median:.3f}", f"{low:.3f}", f"{high:.3f}", f"{alone:.3f}",
              f"{alone / median:.3f}", "" if wrong is None else f"{wrong:.1e}", name, torch.__version__, options.commit,
              datetime.now(UTC).date().isoformat())
    return dict(zip(FIELDS, values, strict=True))


@contextmanager
def group(options: argparse.Namespace) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Join the ranks that torchrun started."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo",
                            device_id=device if options.device == "cuda" else None)
    try:
        ranks, size = dist.get_world_size(), options.head_ranks
        if size:
            yield init_device_mesh(options.device, (ranks // size, size), mesh_dim_names=("steps", "heads")), device
        else:
            yield init_device_mesh(options.device, (ranks,), mesh_dim_names=("cp",)), device
    finally:
        dist.destroy_process_group()


def write(found: dict[str, Any], out: Path | None) -> None:
    """Add a row to a file, or print it."""
    if out is None:
        print(", ".join(f"{name} {value}" for name, value in found.items() if value != ""), flush=True)
        return
    is_new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(found)


def table(path: Path) -> str:
    """Return rows as Markdown: of each call and schedule its time, and what share of ideal that is."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    schedules = list(dict.fromkeys(row["schedule"] for row in rows))
    calls: dict[str, dict[str, str]] = {}
    for row in rows:
        name = f"{row['mask']}, {row['layout']}, {row['tokens_per_rank']} tokens a rank, {row['direction']}"
        cell = f"{float(row['median_ms']):.2f} ms, {float(row['share_of_ideal']):.2f}"
        calls.setdefault(name, {"ideal": f"{float(row['ideal_ms']):.2f} ms"})[row["schedule"]] = cell
    lines = [f"| call | ideal | {' | '.join(schedules)} |", "|---|" + "---:|" * (1 + len(schedules))]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells.get(column, '') for column in ('ideal', *schedules))} |"
                              for name, cells in calls.items()])


def main(arguments: list[str] | None = None) -> int:
    """Time, and let the first rank write."""
    options = parsed(arguments)
    with group(options) as (mesh, device):
        for found in rows_of(options, mesh, device):
            if dist.get_rank() == 0:
                write(found, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
