"""Time a training step of Llama-shaped layers on packed documents and padded batches, with each way to attend.

    PYTHONPATH=src python benchmarks/training_step.py --out benchmarks/results/nvidia-h200/training-step.csv
    python benchmarks/training_step.py --device cpu --dtype float32 --tokens 96 --batch 3 --documents 4 --hidden 64 \
        --heads 4 2 --dim 16 --mlp 96 --layers 2 --repetitions 2

A step is the forward and the backward pass of all layers on random hidden states, with ``--optimizer`` AdamW too. What
an implementation makes of positions or padding (a mask, documents, lengths read by the host) is made once in each step,
as a model makes it once for all its layers. SDPA gets a boolean mask, and heads of k and v repeated, as Transformers
does it; packages that take packed sequences alone get the tokens that are no padding.

All have the same weights and take turns in one process. Before that, each one's output and gradients are held against
the same step in float32 (float64 where float32 is timed): errors may be twice those of SDPA in the tested dtype,
three times for gradients.
"""

import argparse
import copy
import csv
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llama_layers import Attend, Layers
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

import tilewise as tw
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.peers import FlashAttentionProvider, ForwardWheelProvider, peer_providers
from tilewise.bench.provenance import Provenance, provenance
from tilewise.bench.timing import Regime, measure
from tilewise.bench.torture_rows import version_of

WORKLOADS = ("packed", "padded-right", "padded-left")
SDPA = "sdpa"
FACTORS = {"out": 2.0, "dx": 3.0, "dw_q": 3.0, "dw_o": 3.0}
LARGEST = 0.1  # error of SDPA itself, relative to the wider step


@dataclass(frozen=True)
class Row:
    """The time of one implementation's step; ``version`` is that of its own package."""

    workload: str
    provider: str
    version: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    tokens_per_second: float
    out_error: float
    tokens: int
    real_tokens: int
    batch: int
    documents: int
    layers: int
    hidden: int
    hq: int
    hk: int
    d: int
    mlp: int
    dtype: str
    optimizer: bool
    device_name: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


@dataclass
class Batch:
    """Hidden states and where they belong.

    Attributes:
        x, dout: (b, s, hidden); dout is 0 at padding.
        positions: (b, s): of each token inside its document or sequence.
        real: (b, s): False at padding.
        is_padded: there is padding, and each batch entry is one sequence.
    """

    x: torch.Tensor
    dout: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor
    is_padded: bool

    def ids(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the document of each query, and of each key where that is another, (b, s): no query's is padding's."""
        if not self.is_padded:
            return (self.positions == 0).cumsum(1), None
        return torch.zeros_like(self.positions), self.real.long() - 1


def by_tilewise(batch: Batch) -> Attend:
    """tilewise, by documents."""
    mask = tw.causal() & tw.documents(*batch.ids())
    return lambda q, k, v: tw.attention(q, k, v, mask=mask)


def by_sdpa(batch: Batch) -> Attend:
    """SDPA of torch, by a mask of all pairs; a query of padding sees itself, so that no row is empty."""
    ids, key_ids = batch.ids()
    own = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    mask = ((ids[:, :, None] == (ids if key_ids is None else key_ids)[:, None]).tril() | own)[:, None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask)

    return attend


def packed_by(function: Callable[..., torch.Tensor]) -> Callable[[Batch], Attend]:
    """A function of packed sequences, (total, h, d), called as ``function(q, k, v, cu_seqlens, longest)``."""
    def prepare(batch: Batch) -> Attend:
        rows = batch.real.flatten().nonzero()[:, 0]
        starts = (batch.positions.flatten()[rows] == 0).nonzero()[:, 0]
        ends = F.pad(starts, (0, 1), value=len(rows)).int()
        longest = int(ends.diff().max())

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            b, hq, s, d = q.shape
            q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
            if batch.is_padded:
                q, k, v = (tensor[rows] for tensor in (q, k, v))
            out = function(q, k, v, ends, longest)
            if batch.is_padded:
                out = out.new_zeros(b * s, hq, d).index_copy(0, rows, out)
            return out.view(b, s, hq, d).transpose(1, 2)

        return attend

    return prepare


def torch_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """Call FlashAttention as torch has it; versions differ in how they are told of fewer heads of k."""
    from torch.nn.attention.varlen import varlen_attn

    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    out: torch.Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    return out


def flash_attn_of(module: str) -> Callable[..., torch.Tensor]:
    """A generation of the package flash-attn; some return lse beside out."""
    function: Any = importlib.import_module(module).flash_attn_varlen_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        result = function(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
                          causal=True)
        out: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return out

    return attend


def implementations(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[Batch], Attend]]:
    """Return those that run here, by name; each makes of a batch how to attend to it."""
    found: dict[str, Callable[[Batch], Attend]] = {"tilewise": by_tilewise, SDPA: by_sdpa}
    if device.type != "cuda" or dtype is torch.float32:
        return found  # the others are kernels of 16 bits for GPUs
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        found["torch_varlen"] = packed_by(torch_varlen)
    for peer in peer_providers():
        trains = isinstance(peer, FlashAttentionProvider) and not isinstance(peer, ForwardWheelProvider)
        if trains and peer.missing(device) is None:
            found[peer.name] = packed_by(flash_attn_of(peer.module))
    return found


def step(model: Layers, batch: Batch, prepare: Callable[[Batch], Attend]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both passes, into the weights' gradients; return out and dx."""
    model.zero_grad()
    x = batch.x.detach().requires_grad_()
    out = model(x, batch.positions, prepare(batch))
    out.backward(batch.dout)
    assert x.grad is not None
    return out.detach(), x.grad


def results(model: Layers, batch: Batch, prepare: Callable[[Batch], Attend]) -> dict[str, torch.Tensor]:
    """Return what a step made: rows that are no padding, and gradients of weights before and behind attention."""
    out, dx = step(model, batch, prepare)
    first: Any = model.layers[0]
    return {"out": out[batch.real], "dx": dx[batch.real], "dw_q": first.q.weight.grad, "dw_o": first.o.weight.grad}


def errors(got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of each difference over that of the exact result."""
    return {name: float((tensor.double() - exact[name].double()).norm() / exact[name].double().norm())
            for name, tensor in got.items()}


def check(name: str, own: Mapping[str, float], sdpa: Mapping[str, float], eps: float) -> None:
    """Raise unless errors are finite and within twice those of SDPA (gradients: three times) and a rounding."""
    for what, error in own.items():
        allowed = LARGEST if name == SDPA else FACTORS[what] * sdpa[what] + eps
        if not error <= allowed:
            raise AssertionError(f"{name}: {what} has a relative error of {error:.3g}; allowed is {allowed:.3g}.")


def drawn(workload: str, options: argparse.Namespace, device: torch.device) -> Batch:
    """Draw hidden states, and the documents of a packed row or the lengths of a padded batch."""
    make = torch.Generator().manual_seed(0)
    is_padded = workload != "packed"
    b = options.batch if is_padded else 1
    s = options.tokens // b
    at, real = torch.arange(s).expand(b, s), torch.ones(b, s, dtype=torch.bool)
    if not is_padded:
        starts = torch.cat((torch.zeros(1, dtype=torch.long),
                            1 + torch.randperm(s - 1, generator=make)[:options.documents - 1])).sort().values
        positions = at - starts[torch.searchsorted(starts, torch.arange(s), right=True) - 1]
    else:
        lengths = torch.randint(s // 4, s, (b, 1), generator=make)
        lengths[0] = s  # the longest, to which the others are padded
        is_left = workload == "padded-left"
        real = at >= s - lengths if is_left else at < lengths
        positions = (at - (s - lengths)).clamp(min=0) if is_left else at
    dtype = getattr(torch, options.dtype)
    x, dout = (torch.randn(b, s, options.hidden, generator=make) for _ in range(2))
    dout = dout.masked_fill(~real[..., None], 0.0)
    return Batch(x.to(device, dtype), dout.to(device, dtype), positions.to(device), real.to(device), is_padded)


def rows_of(workload: str, model: Layers, options: argparse.Namespace, device: torch.device,
            origin: Provenance) -> Iterator[Row]:
    """Check every implementation on a workload, then time them in turns."""
    batch, found = drawn(workload, options, device), implementations(device, getattr(torch, options.dtype))
    wider = torch.float64 if batch.x.dtype is torch.float32 else torch.float32
    exact = results(copy.deepcopy(model).to(wider), replace(batch, x=batch.x.to(wider), dout=batch.dout.to(wider)),
                    by_sdpa)
    own = {name: errors(results(model, batch, prepare), exact) for name, prepare in found.items()}
    for name, relative in own.items():
        check(name, relative, own[SDPA], torch.finfo(batch.x.dtype).eps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7) if options.optimizer else None

    def timed(prepare: Callable[[Batch], Attend]) -> None:
        step(model, batch, prepare)
        if optimizer is not None:
            optimizer.step()

    calls = {name: lambda prepare=prepare: timed(prepare) for name, prepare in found.items()}
    regime = Regime("steps", turns=options.repetitions, least_calls=1, clears=False)
    with ClockSampler(device) as clocks:
        times = measure(calls, regime, device, clocks)
    real = int(batch.real.sum())
    for name, time in times.items():
        yield Row(workload, name, version_of(name), round(time.p50, 3), round(time.p20, 3), round(time.p80, 3),
                  round(real / time.p50 * 1e3, 1), round(own[name]["out"], 6), batch.real.numel(), real,
                  len(batch.real), len(batch.real) if batch.is_padded else options.documents, options.layers,
                  options.hidden, *options.heads, options.dim, options.mlp, options.dtype, options.optimizer,
                  origin.device_name, origin.driver, origin.torch, origin.triton, origin.commit, origin.date)


def append(rows: Sequence[Row], path: Path) -> None:
    """Append rows to a CSV, which is made where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(map(asdict, rows))


def table(path: Path) -> str:
    """Return a CSV's rows as Markdown."""
    with path.open(newline="") as file:
        read = csv.DictReader(file)
        reads: dict[Any, Callable[[str], Any]] = {bool: "True".__eq__, int: int, float: float, str: str}
        fields = {name: reads[field.type] for name, field in Row.__dataclass_fields__.items()}
        return markdown([Row(**{name: fields[name](own) for name, own in record.items()}) for record in read])


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: milliseconds, tokens a second, and how many times as fast as SDPA."""
    lines = ["| workload | implementation | ms a step | tokens/s | over SDPA |", "|---|---|---:|---:|---:|"]
    sdpa = {row.workload: row.median_ms for row in rows if row.provider == SDPA}
    lines += [f"| {row.workload} | {' '.join((row.provider, row.version)).strip()} | {row.median_ms:.1f} | "
              f"{row.tokens_per_second:.0f} | {sdpa[row.workload] / row.median_ms:.2f}× |" for row in rows]
    one = rows[0]
    return "\n".join([*lines, "", f"{one.device_name}; {one.layers} layers of {one.hidden}, {one.hq}/{one.hk} heads of "
                      f"{one.d}, MLP {one.mlp}; {one.dtype}; torch {one.torch}; commit {one.commit}."])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a step, padding among them")
    parser.add_argument("--documents", type=int, default=16, help="of a packed row")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a padded batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of q, and of k and v")
    parser.add_argument("--dim", type=int, default=64, help="head dim")
    parser.add_argument("--mlp", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--optimizer", action="store_true", help="AdamW is part of the step")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, help="CSV, appended to")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every workload and print a table."""
    options = parsed(arguments)
    device = torch.device(options.device)
    origin = provenance(device, "", options.commit)
    torch.manual_seed(0)
    model = Layers(options.layers, options.hidden, options.heads, options.dim, options.mlp)
    model = model.to(device, getattr(torch, options.dtype))
    rows: list[Row] = []
    for workload in options.workloads:
        own = list(rows_of(workload, model, options, device, origin))
        if options.out is not None:
            append(own, options.out)  # a run that is cut short keeps what it has
        rows += own
    print(markdown(rows))


if __name__ == "__main__":
    main()
