"""Count wrong 64 x 64 tiles of the Hopper backward pass with a bias, variant by variant, each in a process with a limit.

    PYTHONPATH=src:tests python benchmarks/bias_trials.py [--launches 200] [--limit 100] [--only NAME,NAME]   on a Hopper GPU
    PYTHONPATH=src:tests python benchmarks/bias_trials.py --dry     on any machine: binds every variant, runs nothing

The call is b 8, 12 heads, 512 queries and keys, head dim 64, full unless a variant says otherwise. Of dout, column c is
1 for the queries of block c of 512 / d of them and else 0: dv of a key is then the sum of its probabilities over each
such block, which tells tile by tile which probabilities are wrong. A tile of dv (or a block of 64 rows of dq, dk, out)
is wrong if some error in it is above FACTOR times the largest error anywhere of dense attention that rounds P and dS as
the kernels do. dk and dv have one owner each, so that they have the same bits in every launch: ``other bits`` counts
launches whose dk or dv differ from the first one's. ms: the median of 30 further launches, all kernels of the pass.

Variants (the five trials, and controls):
  1  plain_dynamic         no bias, HopperD64Config(DYNAMIC_TILES): is the fault in the plain kernel of this shape?
  1c plain_two             no bias, as chosen today (HEAD_PERSISTENT, two CTAs a head)
  2  forward               the forward pass with the bias: out and lse (what the backward pass is given elsewhere)
  3  bias_dynamic          this build: bias, HopperD64Config(DYNAMIC_TILES)
  3f bias_dynamic_fp16     the same in float16, which was right
  3z bias_dynamic_zeros    a bias of zeros: wrong numbers would be those of another place's bias, and are none here
  3s bias_dynamic_slow     the same as 3, with at most 33 CTAs, so that each has 12 tiles
  4  bias_no_augmented_k   HopperD128Config(s_ahead, DQ_FROM_REGISTERS): hopper_backward_kernel at d 64
  5  bias_head_persistent  HopperD64Config(HEAD_PERSISTENT, one CTA a head), one stage of the ring
  6  bias_deterministic    HopperD64Config(DETERMINISTIC): one tile a CTA
  7  bias_dynamic_causal   3 under a causal mask
  8  bias_d128             hopper_backward_kernel with augmented K at d 128, right last time
Builds of a patched copy of the source, nearer to the first build, to see which difference makes the fault (DYNAMIC_TILES, bfloat16):
  a  first_release         the stage is released at its block's end, with no fence between ldmatrix and TMA's next write
  b  first_wait            the wait stands right in front of ldmatrix, and asks by each thread's count
  c  first_build           both
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128Variant,
    HopperBackwardConfig,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
)
from tilewise.masks import Mask, causal
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.tuning.schedules_hopper import backward_schedule

B, H, S = 8, 12, 512
FACTOR = 4.0
DYNAMIC = HopperD64Config(variant=D64Variant.DYNAMIC_TILES)


@dataclass(frozen=True)
class Variant:
    """A trial. config: None for the forward pass. bias: its factor, None without one."""

    config: HopperBackwardConfig | None
    bias: float | None = 3.0
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = False
    d: int = 64
    ctas: int = 132
    patches: tuple = ()  # (file under kernels/hopper/backward, what stands there once, what shall stand there)


RELEASE, AWAIT = "        release_bias(smem.bias, last, C)\n", "        await_bias(smem.bias, count, C)\n"
READ, END = "        bias = read_bias(smem.bias, count, WG, C)\n", "    return State(probs, left_probs, dprobs, dk, dv)\n"
FIRST_RELEASE = (("d64.py", RELEASE, ""),
                 ("d64.py", END, "    if BEGINS:\n        release_bias(smem.bias, count, C)\n" + END))
FIRST_WAIT = (("d64.py", AWAIT, ""), ("d64.py", READ, AWAIT + READ),
              ("bias.py", "consumer_wait(pipe.full, warp_uniform(count), C.BIAS_STAGES)",
               "consumer_wait(pipe.full, count, C.BIAS_STAGES)"))
VARIANTS = {
    "plain_dynamic": Variant(DYNAMIC, bias=None),
    "plain_two": Variant(HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2), bias=None),
    "forward": Variant(None),
    "bias_dynamic": Variant(DYNAMIC),
    "bias_dynamic_fp16": Variant(DYNAMIC, dtype=torch.float16),
    "bias_dynamic_zeros": Variant(DYNAMIC, bias=0.0),
    "bias_dynamic_slow": Variant(DYNAMIC, ctas=33),
    "bias_no_augmented_k": Variant(HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)),
    "bias_head_persistent": Variant(HopperD64Config(variant=D64Variant.HEAD_PERSISTENT)),
    "bias_deterministic": Variant(HopperD64Config(variant=D64Variant.DETERMINISTIC)),
    "bias_dynamic_causal": Variant(DYNAMIC, is_causal=True),
    "bias_d128": Variant(HopperD128AugmentedKConfig(), d=128),
    "first_release": Variant(DYNAMIC, patches=FIRST_RELEASE),
    "first_wait": Variant(DYNAMIC, patches=FIRST_WAIT),
    "first_build": Variant(DYNAMIC, patches=FIRST_RELEASE + FIRST_WAIT),
}


def source_of(variant, folder):
    """Return the folder that a variant's process imports tilewise from: the one here, or a patched copy."""
    import tilewise

    here = Path(tilewise.__file__).resolve().parents[1]
    if not variant.patches:
        return here
    there = Path(folder) / "src"
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in variant.patches:
        path = there / "tilewise/kernels/hopper/backward" / file
        text = path.read_text()
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new))
    return there


def make(variant, device):
    """Return the backward problem and (q, k, v, dout, bias or None), on a device; the problem's device is a GPU."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, S, H, variant.d, generator=generator).to(variant.dtype).to(device).transpose(1, 2)
               for _ in range(3))
    block = S // variant.d if variant.d <= S else 1
    dout = torch.zeros(B, S, H, variant.d)
    rows = torch.arange(S)
    dout[:, rows, :, torch.clamp(rows // block, max=variant.d - 1)] = 1.0
    dout = dout.to(variant.dtype).to(device).transpose(1, 2)
    bias = None
    if variant.bias is not None:
        bias = (variant.bias * torch.randn(B, H, S, S, generator=generator)).to(variant.dtype).to(device)
    mask = causal() if variant.is_causal else Mask()
    problem = AttentionProblem.from_tensors(q, k, v, Operands(bias=bias), mask=mask)
    return replace(problem, device=torch.device("cuda", 0)), (q, k, v, dout, bias)


def dense(tensors, scale, is_causal, dtype):
    """Return what the kernels make, in float64 with P and dS rounded to ``dtype``; lse and delta too."""
    q, k, v, dout, bias = (None if tensor is None else tensor.double() for tensor in tensors)
    made = {name: [] for name in ("out", "lse", "delta", "dq", "dk", "dv")}
    for b in range(q.shape[0]):  # one batch entry at a time: 12 x 512 x 512 float64 are 25 MB each
        scores = q[b] @ k[b].mT * scale
        if bias is not None:
            scores = scores + bias[b]
        if is_causal:
            hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        lse = scores.logsumexp(-1)
        exact = (scores - lse[..., None]).exp()
        probs = exact.to(dtype).double()
        out = exact @ v[b]
        delta = (out * dout[b]).sum(-1)
        dscores = (exact * (dout[b] @ v[b].mT - delta[..., None])).to(dtype).double()
        for name, result in (("out", out), ("lse", lse), ("delta", delta), ("dq", dscores @ k[b] * scale),
                             ("dk", dscores.mT @ q[b] * scale), ("dv", probs.mT @ dout[b])):
            made[name].append(result)
    return {name: torch.stack(each) for name, each in made.items()}


def limits_of(tensors, variant, scale):
    """Return exact results and the largest error of each that is allowed."""
    exact = dense(tensors, scale, variant.is_causal, torch.float64)
    rounded = dense(tensors, scale, variant.is_causal, variant.dtype)
    allowed = {}
    for name in ("out", "dq", "dk", "dv"):
        error = (rounded[name].to(variant.dtype).double() - exact[name]).abs().amax()
        allowed[name] = FACTOR * float(error)
    allowed["lse"] = 1e-3
    return exact, allowed


def wrong_tiles(dv, exact, limit, d):
    """Where dv tells of wrong probabilities: (b, h, blocks of 64 keys, blocks of 64 queries), bool."""
    error = (dv.double() - exact).abs()
    wrong = ~(error <= limit)  # NaN is wrong
    queries = S // d  # of a column
    of_block = 64 // queries
    return wrong.unflatten(3, (-1, of_block)).unflatten(2, (-1, 64)).any(5).any(3)


def wrong_rows(made, exact, limit):
    """Which blocks of 64 rows are wrong: (b, h, blocks), bool."""
    wrong = ~((made.double() - exact).abs() <= limit)
    return wrong.unflatten(2, (-1, 64)).flatten(3).any(3)


def bound(problem, variant, dq_strides, num_sms, allocate=None):
    from tilewise.kernels.hopper.backward.launch_d256 import backward_launch

    assert variant.config.fits(problem), "shared memory"
    schedule = backward_schedule(problem, variant.config)
    return backward_launch(problem, variant.config, schedule, dq_strides, num_sms, None, allocate)


def run_backward(variant, launches):
    device = torch.device("cuda", 0)
    problem, tensors = make(variant, device)
    problem = problem.backward(lse_grad=False)
    exact, allowed = limits_of(tensors, variant, problem.scale)
    q, k, v, dout, bias = tensors
    lse, delta = (exact[name].float().contiguous() for name in ("lse", "delta"))
    grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
    launch = bound(problem, variant, grads[0].stride(), min(variant.ctas, _num_sms(device)))
    data = () if bias is None else (*[None] * 8, bias)
    first, totals = None, {"tiles": 0, "dq": 0, "dk": 0, "launches": 0, "other_bits": 0}
    places = []
    for number in range(launches):
        for gradient in grads:
            gradient.fill_(math.nan)
        launch(q, k, v, dout, lse, delta, *grads, *data)
        torch.cuda.synchronize()
        dq, dk, dv = grads
        tiles = wrong_tiles(dv, exact["dv"], allowed["dv"], variant.d)
        of_dq, of_dk = (wrong_rows(made, exact[name], allowed[name]) for made, name in ((dq, "dq"), (dk, "dk")))
        counted = [int(each.sum()) for each in (tiles, of_dq, of_dk)]
        totals["tiles"] += counted[0]
        totals["dq"] += counted[1]
        totals["dk"] += counted[2]
        totals["launches"] += any(counted)
        if counted[0] and len(places) < 12:
            places += [(number, *place) for place in tiles.nonzero()[:4].tolist()]
        if first is None:
            first = dk.clone(), dv.clone()
        elif not (torch.equal(first[0], dk) and torch.equal(first[1], dv)):
            totals["other_bits"] += 1
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch(q, k, v, dout, lse, delta, *grads, *data)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return totals | {"of": B * H * (S // 64) ** 2, "grid": launch.grid[0], "allowed": allowed, "places": places,
                     "ms": sorted(times)[15]}


def run_forward(variant, launches):
    from tilewise.backends.gluon import backend
    from tilewise.problem.options import Operands

    device = torch.device("cuda", 0)
    problem, tensors = make(variant, device)
    exact, allowed = limits_of(tensors, variant, problem.scale)
    q, k, v, _dout, bias = tensors
    reason = backend.why_not(problem)
    assert reason is None, reason
    totals = {"tiles": 0, "dq": 0, "dk": 0, "launches": 0, "other_bits": 0}
    first, places = None, []
    for number in range(launches):
        out, lse, _ = backend.forward(problem, q, k, v, Operands(bias=bias))
        torch.cuda.synchronize()
        wrong = wrong_rows(out, exact["out"], allowed["out"]) | wrong_rows(
            lse[..., None], exact["lse"][..., None], allowed["lse"])
        totals["tiles"] += int(wrong.sum())
        totals["launches"] += bool(wrong.any())
        if wrong.any() and len(places) < 12:
            places += [(number, *place) for place in wrong.nonzero()[:4].tolist()]
        if first is None:
            first = out.clone()
        totals["other_bits"] += not torch.equal(first, out)
    return totals | {"of": B * H * S // 64, "grid": 0, "allowed": allowed, "places": places, "ms": math.nan}


def _num_sms(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def dry():
    """Bind every variant without a GPU, and hold the way of counting against itself."""
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            source_of(variant, folder)
        problem, tensors = make(variant, "cpu")
        backward = problem.backward(lse_grad=False)
        if variant.config is None:
            print(f"{name:22s} forward of {problem}")
            continue
        launch = bound(backward, variant, tensors[0].stride(), variant.ctas, lambda *form: None)
        print(f"{name:22s} {variant.config.shared_bytes(backward):6d} bytes, bias stages "
              f"{variant.config.bias_stages(backward)}, grid {launch.grid[0]:4d}, {backward}")
    global B, H
    B, H = 1, 1
    variant = VARIANTS["bias_dynamic"]
    problem, tensors = make(variant, "cpu")
    exact, allowed = limits_of(tensors, variant, problem.scale)
    dv = exact["dv"].to(variant.dtype)
    assert not wrong_tiles(dv, exact["dv"], allowed["dv"], variant.d).any()
    assert not wrong_rows(exact["dq"].to(variant.dtype), exact["dq"], allowed["dq"]).any()
    dv[0, 0, 64 * 3 + 5, 8 * 2 + 1] += 1.0
    assert wrong_tiles(dv, exact["dv"], allowed["dv"], variant.d).nonzero().tolist() == [[0, 0, 3, 2]]
    shuffled = [*tensors[:4], tensors[4].clone()]
    shuffled[4][0, 0, 128:192, 64:128] = tensors[4][0, 0, 192:256, 64:128]  # another block's bias in one tile
    bad = dense(shuffled, problem.scale, False, torch.float64)
    lse = exact["lse"][0, 0]
    scores = tensors[0][0, 0].double() @ tensors[1][0, 0].double().T * problem.scale + shuffled[4][0, 0].double()
    probs = (scores - lse[:, None]).exp()  # lse is the right one, as in the backward pass
    found = wrong_tiles((probs.T @ tensors[3][0, 0].double())[None, None], exact["dv"], allowed["dv"], variant.d)
    assert found.nonzero().tolist() == [[0, 0, 1, 2]], found.nonzero().tolist()
    del bad
    print("a tile with another block's bias is found where it is, and none elsewhere")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--limit", type=int, default=100, help="seconds a variant")
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--run", default="", help="one variant, in this process")
    given = parser.parse_args()
    if given.dry:
        dry()
        return
    if given.run:
        variant = VARIANTS[given.run]
        print(json.dumps((run_forward if variant.config is None else run_backward)(variant, given.launches)))
        return
    names = given.only.split(",") if given.only else list(VARIANTS)
    print(f"{'variant':22s} {'wrong tiles':>11s} {'of':>9s} {'dq blocks':>9s} {'dk blocks':>9s} {'launches':>8s} "
          f"{'other bits':>10s} {'ms':>7s} {'s':>5s}  first places (launch, b, h, key block, query block)", flush=True)
    for name in names:
        begin = time.monotonic()
        command = [sys.executable, os.path.abspath(__file__), "--run", name, "--launches", str(given.launches)]
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(source_of(VARIANTS[name], folder)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": f"{folder}/cache",
                                        "TRITON_INTERPRET": "0"}
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=given.limit, check=False,
                                      env=environment)
            except subprocess.TimeoutExpired:
                print(f"{name:22s} did not end in {given.limit} s: a deadlock, or a slow compiler", flush=True)
                continue
        took = time.monotonic() - begin
        if done.returncode:
            print(f"{name:22s} failed: {done.stderr.strip()[-600:]}", flush=True)
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{name:22s} {row['tiles']:11d} {row['of'] * given.launches:9d} {row['dq']:9d} {row['dk']:9d} "
              f"{row['launches']:8d} {row['other_bits']:10d} {row['ms']:7.3f} {took:5.0f}  {row['places']}", flush=True)


if __name__ == "__main__":
    main()
