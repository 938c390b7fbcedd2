"""Hold gluon's score functions against the reference and Triton, then time them. On an H200: PYTHONPATH=src:tests python benchmarks/unrun/score_gpu.py

  --check | --time   one of the two (default: both)      --quick   fewer calls, fewer rounds
  --staged           dQ staged at d 128, as without a function
"""
import sys, statistics, itertools
import torch, triton, triton.language as tl
import tilewise as tw
from tilewise import causal, window, documents
from tilewise.functions import ScoreFunction
from tilewise.integrations.flex_tracing import traced_score

@triton.jit
def relative(s, b, h, q, k, table):
    return s + tl.load(table + h * 129 + tl.minimum(tl.maximum(q - k, 0), 128))
def relative_t(s, b, h, q, k, table): return s + table[h, (q - k).clamp(0, 128)].to(s.dtype)
@triton.jit
def slope(s, b, h, q, k):
    return s - tl.exp2(-(h.to(tl.float32) + 1.0) * 0.5) * tl.abs(q - k).to(tl.float32)
def slope_t(s, b, h, q, k): return s - torch.exp2(-(h.to(s.dtype) + 1.0) * 0.5) * (q - k).abs().to(s.dtype)
@triton.jit
def cap(s, b, h, q, k):
    e = tl.exp2(s * (2.0 * 1.4426950408889634 / 20.0))
    return 20.0 - 40.0 / (e + 1.0)
@triton.jit
def cap_d(d, s, b, h, q, k):
    e = tl.exp2(s * (2.0 * 1.4426950408889634 / 20.0))
    t = 1.0 - 2.0 / (e + 1.0)
    return d * (1.0 - t * t)
def cap_t(s, b, h, q, k): return 20.0 * torch.tanh(s / 20.0)
@triton.jit
def factor(s, b, h, q, k, factors):
    return s * tl.load(factors + h * 8192 + q) / (1.0 + tl.abs(q - k) * 0.01)
@triton.jit
def factor_d(d, s, b, h, q, k, factors):
    return d * tl.load(factors + h * 8192 + q) / (1.0 + tl.abs(q - k) * 0.01)
def factor_t(s, b, h, q, k, factors): return s * factors[h, q].to(s.dtype) / (1.0 + (q - k).abs() * 0.01)

gen = torch.Generator("cuda").manual_seed(3)
TABLE = torch.randn(16, 129, device="cuda", generator=gen)
FACTORS = torch.randn(16, 8192, device="cuda", generator=gen)
FUNCTIONS = {"relative": ScoreFunction(relative, relative_t, tensors=(TABLE,)), "slope": ScoreFunction(slope, slope_t),
             "cap": ScoreFunction(cap, cap_t, cap_d), "factor": ScoreFunction(factor, factor_t, factor_d, (FACTORS,)),
             "traced": traced_score(lambda s, b, h, q, k: torch.where((q - k) % 7 == 3, 20 * torch.tanh(s / 20), s) + TABLE[h, (q - k) % 129])}

def qkv(b, hq, hk, s, d, dtype):
    made = [torch.randn(b, h, s, d, device="cuda", dtype=dtype, generator=gen) for h in (hq, hk, hk)]
    return [t.requires_grad_() for t in made], torch.randn(b, hq, s, d, device="cuda", dtype=dtype, generator=gen)

def run(tensors, dout, **given):
    out = tw.attention(*tensors, **given)
    return (out, *torch.autograd.grad(out, tensors, dout.to(out.dtype)))

def check(quick):
    ids = torch.arange(700, device="cuda").div(190, rounding_mode="floor")
    masks = {"full": None, "causal": causal(), "window": window(200, 30, "top_left"), "documents": causal() & documents(ids)}
    worst, failed = {}, 0
    for (name, f), (m, mask), heads, d, dtype in itertools.product(FUNCTIONS.items(), masks.items(), ((4, 4), (16, 4)),
                                                                   (64, 128), (torch.bfloat16, torch.float16)):
        if quick and (heads[0] == 4 or dtype is torch.float16): continue
        torch.manual_seed(0)
        tensors, dout = qkv(2, *heads, 700, d, dtype)
        exact = run([t.detach().float().requires_grad_() for t in tensors], dout, mask=mask, score_function=f, backend="reference")
        other = run(tensors, dout, mask=mask, score_function=f, backend="triton")
        for det in (False, True) if m != "documents" else (False,):
            got = run(tensors, dout, mask=mask, score_function=f, backend="gluon", deterministic=det)
            again = run(tensors, dout, mask=mask, score_function=f, backend="gluon", deterministic=det)
            for what, g, o, e, a in zip(("out", "dq", "dk", "dv"), got, other, exact, again):
                err, ref = (g.float() - e).abs().max().item(), (o.float() - e).abs().max().item()
                ratio = err / max(ref, 1e-6)
                worst[what] = max(worst.get(what, 0), ratio)
                bad = not g.isfinite().all() or ratio > 3 or (det and not torch.equal(g, a))
                failed += bad
                if bad: print("BAD", name, m, heads, d, dtype, "deterministic", det, what, f"gluon {err:.3e} triton {ref:.3e}")
    print("worst error, in Triton's:", {k: round(v, 2) for k, v in worst.items()}, "failed:", failed)
    # packed sequences
    lens = torch.tensor([0, 300, 300, 817, 1300], device="cuda", dtype=torch.int32)
    for name, f in FUNCTIONS.items():
        q, k, v = (torch.randn(1300, 16, 128, device="cuda", dtype=torch.bfloat16, generator=gen).requires_grad_() for _ in range(3))
        res = {}
        for backend in ("gluon", "triton"):
            out = tw.attention_varlen(q, k, v, cu_seqlens_q=lens, cu_seqlens_k=lens, max_seqlen_q=517, max_seqlen_k=517, mask=causal(), score_function=f, backend=backend)
            res[backend] = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
        print("packed", name, [f"{(a - b).abs().max().item() / b.abs().max().item():.2e}" for a, b in zip(res["gluon"], res["triton"])])

def median(calls, rounds):
    times = {n: [] for n in calls}
    for _ in range(3):
        for c in calls.values(): c()
    for _ in range(rounds):
        for n, c in calls.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); c(); b.record(); b.synchronize(); times[n].append(a.elapsed_time(b))
    return {n: statistics.median(t) for n, t in times.items()}

def time_all(quick):
    for d in (64, 128):
        (q, k, v), dout = qkv(4, 16, 16, 4096, d, torch.bfloat16)
        flops = 4 * 4 * 16 * 4096**2 * d / 2
        ways = {"plain gluon": dict(backend="gluon")} | {f"{n} {b}": dict(score_function=f, backend=b) for n, f in FUNCTIONS.items() for b in ("gluon", "triton")}
        outs = {n: tw.attention(q, k, v, mask=causal(), **w) for n, w in ways.items()}
        fwd = median({n: (lambda w=w: tw.attention(q.detach(), k.detach(), v.detach(), mask=causal(), **w)) for n, w in ways.items()}, 20 if quick else 60)
        bwd = median({n: (lambda o=o: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)) for n, o in outs.items()}, 20 if quick else 60)
        for n in ways:
            print(f"d{d} {n:18s} forward {fwd[n]:.3f} ms {flops / fwd[n] / 1e9:.0f} TFLOP/s   backward {bwd[n]:.3f} ms {2.5 * flops / bwd[n] / 1e9:.0f} TFLOP/s", flush=True)

quick = "--quick" in sys.argv
if "--staged" in sys.argv:  # dQ staged at d 128, as without a function, in the place of dQ from registers
    from tilewise.backends import gluon
    from tilewise.kernels.hopper.backward.config import HopperD128Config
    own = gluon.hopper_backward_config
    gluon.hopper_backward_config = lambda p, *rest: HopperD128Config() if (
        max(p.d, p.dv) > 64 and p.scores.score_function is not None and not p.deterministic) else own(p, *rest)
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
if "--time" not in sys.argv: check(quick)
if "--check" not in sys.argv: time_all(quick)
