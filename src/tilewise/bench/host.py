"""Cost of a call on the host: what a user of short sequences waits for."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from tilewise.bench.checking import Checker, Prepared
from tilewise.bench.grids import Cell
from tilewise.bench.options import make_tensors
from tilewise.bench.plan import Plan, blank_row
from tilewise.bench.rows import Row
from tilewise.bench.shapes import FULL, shape_case
from tilewise.bench.timing import HOST, Timing, host_samples

_TURNS = 9
_CALLS = 200
_WARMUPS = 20


def host_cell(device: torch.device) -> Cell:
    """Return the tiny problem; on a GPU its kernels are shorter than any host's launch."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Cell("host", shape_case(1, (8, 8), (128, 128), (64, 64), FULL, "bshd"), dtype)


def run_host(cell: Cell, plan: Plan) -> Iterator[Row]:
    """Yield three rows of a cell for each provider: forward without and with gradients, and forward with backward.

    Providers are called in turns: the first seconds of a process are slower than the rest, whoever has them. The device
    is not waited for between calls. What a provider is to be called in (torch's choice of an SDPA backend, which costs
    the host as much as a call) is entered once a turn, untimed. On a CPU a call computes before it returns, so its
    numbers hold the computation too.
    """
    tensors = make_tensors(cell, plan.device)
    checker = Checker(cell, tensors, plan.device)
    entries: dict[Row, Prepared] = {}
    for provider in plan.providers:
        row = blank_row(cell, provider.name, "forward_backward", HOST, plan.origin)
        checked = [checker.checked(row, provider, "forward"), checker.checked(row, provider, "backward")]
        unfit = next((one for one in checked if one.status != "ok"), None)
        if unfit is not None:
            yield unfit
        else:
            entries[checked[0]] = Prepared(provider, cell, tensors, plan.device, in_context=True)
    samples: dict[tuple[Row, str], list[float]] = defaultdict(list)
    for turn in range(_TURNS):
        plan.on_step(f"{cell}: host cost, turn {turn + 1} of {_TURNS}")
        for row, entry in entries.items():
            for direction, call in (("forward_no_grad", entry.forward_without_grad), ("forward", entry.forward),
                                    ("forward_backward", entry.training_step)):
                with entry.provider.context() or nullcontext():
                    samples[row, direction] += host_samples(call, plan.device, _CALLS, _WARMUPS)
    for (row, direction), times in samples.items():
        timing = Timing.of(times)
        yield replace(row, direction=direction, ms_p20=timing.p20, ms_p50=timing.p50, ms_p80=timing.p80,
                      samples=timing.samples, host_us=timing.p50 * 1e3)
