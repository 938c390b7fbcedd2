"""What tiny calls with options cost on the host, beside torch's cuDNN operator in the same process.

    python benchmarks/host_options.py measure --out host-options.csv
    python benchmarks/host_options.py table host-options.csv

One batch entry, 4 heads, 64 tokens, head dim 64, bfloat16, eager: the kernels are shorter than any host's launch, so
what is timed is how long a call takes to return. The calls take turns.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TURNS, CALLS, WARMUPS = 25, 60, 20
CUDNN, CUDNN_STEP = "cuDNN's operator", "cuDNN's operator and autograd.grad"
STEP = "tilewise and autograd.grad"
FLOOR_STEP = "a Python autograd.Function that allocates its results and launches nothing, and autograd.grad"
FIELDS = ("call", "beside", "host_us", "ratio", "device_name", "torch", "triton", "commit", "date")


def calls() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return each call by its name, with the name of the one that its time is divided by."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    import tilewise as tw

    b, h, s, d = 1, 4, 64, 64
    torch.manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    q, k, v, dout = (drawn(b, h, s, d) for _ in range(4))
    recorded = [drawn(b, h, s, d).requires_grad_() for _ in range(3)]
    rows = [drawn(s, h, d) for _ in range(3)]
    borders = torch.tensor([0, 40, s], dtype=torch.int32, device="cuda")
    bias, slopes, sinks = drawn(1, h, s, s), drawn(h, dtype=torch.float32).abs(), drawn(h, dtype=torch.float32)
    ids = (torch.arange(s, dtype=torch.int32, device="cuda") // 32)[None]
    nothing = function_that_launches_nothing()
    window, documents = tw.causal() & tw.window(16, 0), tw.documents(ids)
    return {
        CUDNN: (CUDNN, lambda: sdpa(q, k, v)),
        "plain": (CUDNN, lambda: tw.attention(q, k, v)),
        "causal": (CUDNN, lambda: tw.attention(q, k, v, mask=tw.causal())),
        "window": (CUDNN, lambda: tw.attention(q, k, v, mask=window)),
        "bias": (CUDNN, lambda: tw.attention(q, k, v, bias=bias)),
        "softcap": (CUDNN, lambda: tw.attention(q, k, v, softcap=30.0)),
        "sinks": (CUDNN, lambda: tw.attention(q, k, v, sinks=sinks)),
        "ALiBi": (CUDNN, lambda: tw.attention(q, k, v, alibi_slopes=slopes)),
        "documents": (CUDNN, lambda: tw.attention(q, k, v, mask=documents)),
        "attention_varlen": (CUDNN, lambda: tw.attention_varlen(*rows, cu_seqlens_q=borders, mask=tw.causal())),
        CUDNN_STEP: (CUDNN_STEP, lambda: torch.autograd.grad(sdpa(*recorded), recorded, dout)),
        STEP: (CUDNN_STEP, lambda: torch.autograd.grad(tw.attention(*recorded), recorded, dout)),
        FLOOR_STEP: (CUDNN_STEP, lambda: torch.autograd.grad(nothing(*recorded), recorded, dout)),
    }


def function_that_launches_nothing() -> Callable[..., Any]:
    """Return what no operator of autograd that is written in Python can be faster than."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            q, k, v, _out, _lse = ctx.saved_tensors
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return Nothing.apply


def measure(out: Path, commit: str | None) -> None:
    """Time all calls in turn, and write a row for each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tilewise.bench.provenance import provenance

    made = calls()
    samples: dict[str, list[float]] = {name: [] for name in made}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for _, call in made.values():
            for _ in range(WARMUPS):
                call()
        for _ in range(TURNS):
            for name, (_, call) in made.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(CALLS):
                    call()
                samples[name].append((time.perf_counter() - began) / CALLS * 1e6)
    times = {name: statistics.median(found) for name, found in samples.items()}
    origin = provenance(torch.device("cuda", 0), "", commit)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for name, (beside, _) in made.items():
            writer.writerow([name, beside, round(times[name], 2), round(times[name] / times[beside], 3),
                             origin.device_name, origin.torch, origin.triton, origin.commit, origin.date])
    print(table(out))


def table(path: Path) -> str:
    """Return rows as Markdown."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    times = {row["call"]: float(row["host_us"]) for row in rows}
    lines = ["| call | µs on the host | divided by its peer's |", "|---|---:|---:|"]
    for row in rows:  # the column ratio is rounded already
        ratio = "" if row["call"] == row["beside"] else f"{times[row['call']] / times[row['beside']]:.2f}"
        lines.append(f"| {row['call']} | {float(row['host_us']):.0f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, default=Path("host-options.csv"))
    measuring.add_argument("--commit")
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.commit)
    else:
        print(table(given.path))


if __name__ == "__main__":
    main()
