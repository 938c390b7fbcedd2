"""The rate of each kind of mask: visible pairs a second, as a share of what our dense causal call has.

    PYTHONPATH=src python benchmarks/mask_rates.py measure --out mask-rates.csv
    python benchmarks/mask_rates.py table mask-rates.csv

The dense call has the same sequences as batch entries where the mask splits into sequences, else as many pairs in one.
Calls take turns in one process, each behind a pause that hides what the host does; every result is first held against
the portable kernels'. A mask object serves all calls, as it does all layers of a model: what is built of it once is not
in the times, but for a plain boolean tensor, of which it is built in every call.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise.masks import Mask, TensorMask

TOKENS, HEADS, DIMS = 12288, 16, (64, 128)
ROUNDS, PAUSE = 15, 1_500_000  # of timed calls; cycles of the GPU
_ERRORS = 2e-2  # of bfloat16, of the largest number
OURS, PORTABLE, FLEX = "tilewise", "tilewise:triton", "flex"


@dataclass(frozen=True)
class Kind:
    """A mask, what FlexAttention decides the same by, and the dense call beside it: batch entries and their length."""

    name: str
    mask: Mask | TensorMask | torch.Tensor
    function: Callable[..., torch.Tensor]
    batch: int
    length: int
    pairs: int
    dense: Mask


@dataclass(frozen=True)
class Row:
    """A mask's time in one pass; ``share``: its rate over that of the dense call in the same process."""

    kind: str
    d: int
    direction: str
    provider: str
    us_p50: float
    pairs: int
    share: float
    device_name: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def kinds(device: torch.device, tokens: int = TOKENS) -> Iterator[Kind]:
    """Yield the masks."""
    at = torch.arange(tokens, device=device)
    causal = tilewise.causal()

    def splits(name: str, mask: Any, function: Any, length: int, dense: Mask) -> Kind:
        pairs = length * length if dense == Mask() else length * (length + 1) // 2
        return Kind(name, mask, function, tokens // length, length, tokens // length * pairs, dense)

    def whole(name: str, mask: Any, visible: torch.Tensor, function: Any = None) -> Kind:
        pairs = int(visible.sum())
        length = max(128, round(math.sqrt(2 * pairs) / 128) * 128)
        return Kind(name, mask, function or (lambda b, h, i, j: visible[i, j]), 1, length, pairs, causal)

    for parts in (3, 6, 24):
        ids = at // (tokens // parts)
        yield splits(f"documents of {tokens // parts}, causal", causal & tilewise.documents(ids),
                     lambda b, h, i, j, ids=ids: (i >= j) & (ids[i] == ids[j]), tokens // parts, causal)
    ids = at // 128 % 6
    yield splits(f"documents of {tokens // 6}, in pieces of 128", tilewise.documents(ids),
                 lambda b, h, i, j, ids=ids: ids[i] == ids[j], tokens // 6, Mask())
    chunk, first, window = tokens // 3, tokens // 4, tokens // 3
    yield splits(f"chunks of {chunk}, causal", causal & tilewise.chunk(chunk),
                 lambda b, h, i, j: (i >= j) & (i // chunk == j // chunk), chunk, causal)
    yield whole(f"prefix of {first}", tilewise.prefix(first), (at[:, None] >= at) | (at < first),
                lambda b, h, i, j: (i >= j) | (j < first))
    near = (at[:, None] >= at) & ((at[:, None] - at < window) | (at < 4))
    yield whole(f"window of {window}, 4 sink tokens", causal & tilewise.window(window - 1, 0) & tilewise.sink_tokens(4),
                near, lambda b, h, i, j: (i >= j) & ((i - j < window) | (j < 4)))
    shared, rollouts = tokens // 3, 16
    owner = torch.where(at < shared, -1, (at - shared) // ((tokens - shared) // rollouts))
    tree = (at[:, None] >= at) & ((owner == -1) | (owner[:, None] == owner))
    yield whole(f"{rollouts} rollouts behind {shared} shared tokens, tiled", tiled(tree), tree)
    image = torch.where(at // 512 % 3 == 1, at // 512, -1 - at)
    images = (at[:, None] >= at) | (image[:, None] == image)
    yield whole("images of 512 in causal text, tiled", tiled(images), images)
    generator = torch.Generator(device).manual_seed(0)
    blocks = torch.rand(tokens // 128, tokens // 128, device=device, generator=generator) < 0.25
    chosen = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    yield whole("random blocks of 128, a quarter, tiled", tiled(chosen), chosen)
    yield whole("random blocks of 128, a quarter, plain tensor", chosen, chosen)


def tiled(visible: torch.Tensor) -> TensorMask:
    """A boolean tensor with lists of its tiles."""
    return (Mask() & visible).tiled(*visible.shape)


def measure(out: Path, commit: str | None, device: torch.device, dims: tuple[int, ...] = DIMS,
            tokens: int = TOKENS) -> None:
    """Check and time every kind; write the rows."""
    from tilewise.bench.provenance import provenance

    origin = provenance(device, "", commit)
    rows: list[Row] = []
    for d in dims:
        for kind in kinds(device, tokens):
            for direction, provider, us in times_of(kind, d, device, tokens):
                rows.append(Row(kind.name, d, direction, provider, round(us, 2), kind.pairs, 0.0, origin.device_name,
                                origin.driver, origin.torch, origin.triton, origin.commit, origin.date))
            print(kind.name, d, {(row.direction, row.provider): row.us_p50 for row in rows[-8:]}, flush=True)
            write(with_shares(rows, tokens), out)  # a run that is cut short keeps what it has
    print(table(out))


def with_shares(rows: list[Row], tokens: int = TOKENS) -> list[Row]:
    """Put each row's rate beside that of the dense call of its kind, whose own rows are left out."""
    dense = {(row.kind, row.d, row.direction): row.pairs / row.us_p50 for row in rows if row.provider == "dense"}
    return [Row(**asdict(row) | {"share": round(row.pairs / row.us_p50 / dense[row.kind, row.d, row.direction], 4)})
            for row in rows if row.provider != "dense"]


def times_of(kind: Kind, d: int, device: torch.device, tokens: int) -> Iterator[tuple[str, str, float]]:
    """Yield (direction, provider, microseconds), those of the dense call scaled to the mask's pairs."""
    q, k, v = drawn(1, tokens, d, device)
    dense = drawn(kind.batch, kind.length, d, device)
    calls = {OURS: lambda *own: tilewise.attention(*own, mask=kind.mask),
             PORTABLE: lambda *own: tilewise.attention(*own, mask=kind.mask, backend="triton"),
             FLEX: flex_call(kind, tokens, device)}
    made: dict[str, tuple[Any, ...]] = {name: (call, (q, k, v)) for name, call in calls.items()}
    made["dense"] = (lambda *own: tilewise.attention(*own, mask=kind.dense), dense)
    outs = {name: call(*own) for name, (call, own) in made.items()}
    douts = {name: torch.randn_like(out) if name == "dense" else torch.ones_like(out) for name, out in outs.items()}
    gradients = {name: torch.autograd.grad(outs[name], made[name][1], douts[name], retain_graph=True) for name in outs}
    for name in (OURS, FLEX):
        check(f"{name}, {kind.name}, d {d}", (outs[name], *gradients[name]), (outs[PORTABLE], *gradients[PORTABLE]))
    each = kind.length * kind.length if kind.dense == Mask() else kind.length * (kind.length + 1) // 2
    scale = kind.pairs / (kind.batch * each)
    passes: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {name: lambda call=call, own=own: call(*(one.detach() for one in own))
                    for name, (call, own) in made.items()},
        "backward": {name: lambda name=name: torch.autograd.grad(outs[name], made[name][1], douts[name],
                                                                  retain_graph=True) for name in made}}
    for direction, functions in passes.items():
        for name, us in interleaved(functions).items():
            yield direction, name, us * scale if name == "dense" else us


def check(name: str, got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    """Hold results and gradients against those of the portable kernels."""
    for what, one, other in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        error = float((one.float() - other.float()).abs().max() / other.float().abs().max())
        if not error <= _ERRORS:
            raise AssertionError(f"{name}: {what} differs by {error:.2g} of the largest number; allowed is {_ERRORS}.")


def interleaved(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median microseconds of each function, called one after another, round after round."""
    for function in functions.values():
        function()
        function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    event: Any = torch.cuda.Event  # untyped in torch
    for _ in range(ROUNDS):
        for name, function in functions.items():
            begin, end = event(enable_timing=True), event(enable_timing=True)
            torch.cuda._sleep(PAUSE)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(own) for name, own in found.items()}


def flex_call(kind: Kind, tokens: int, device: torch.device) -> Callable[..., torch.Tensor]:
    """FlexAttention with the mask as a block mask, which is built before."""
    import importlib

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Its backward frees buffers that a second backward over the same graph, as it is timed here, reads again.
    functorch_config: Any = importlib.import_module("torch._functorch.config")
    functorch_config.donated_buffer = False
    importlib.import_module("torch._dynamo").reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(kind.function, None, None, tokens, tokens, device=str(device))
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def drawn(batch: int, length: int, d: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Draw q, k and v, (b, h, s, d) as views of (b, s, h, d)."""
    return tuple(torch.randn(batch, length, HEADS, d, device=device, dtype=torch.bfloat16).transpose(1, 2)
                 .requires_grad_() for _ in range(3))


def write(rows: list[Row], path: Path) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def table(path: Path) -> str:
    """Return the rows as Markdown: shares of the dense rate, and how many times tilewise is as fast as the others."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = ["| mask | head dim | pass | share of the dense rate | over `triton` | over FlexAttention |",
             "|---|---:|---|---:|---:|---:|"]
    for key in dict.fromkeys((row["kind"], row["d"], row["direction"]) for row in rows):
        own = {row["provider"]: row for row in rows if (row["kind"], row["d"], row["direction"]) == key}
        ours = own[OURS]
        ratios = " | ".join(f"{float(own[name]['us_p50']) / float(ours['us_p50']):.2f}×" if name in own else "–"
                            for name in (PORTABLE, FLEX))
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {float(ours['share']):.2f} | {ratios} |")
    made_by = dict.fromkeys((row["device_name"], row["torch"], row["triton"], row["commit"]) for row in rows)
    return "\n".join([*lines, "", "; ".join(f"{device}, torch {torch}, Triton {triton}, commit {commit}"
                                           for device, torch, triton, commit in made_by) + "."])


def main() -> None:
    """Measure, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, default=Path("mask-rates.csv"))
    measuring.add_argument("--commit")
    commands.add_parser("table").add_argument("rows", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.commit, torch.device("cuda", 0))
    else:
        print(table(given.rows))


if __name__ == "__main__":
    main()
