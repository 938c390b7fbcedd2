"""Score functions in the Hopper kernels: right beside float64 and Triton's backend, and how fast."""
import sys, time, statistics, itertools, math
import torch
import tilewise as tw, tilewise.errors
import triton
from triton import language as tl
from tilewise.functions import ScoreFunction
dev = torch.device("cuda", 0)
torch.manual_seed(0)
@triton.jit
def relative_t(score, batch, head, q_idx, k_idx, table):
    distance = tl.minimum(tl.maximum(q_idx - k_idx, -64), 64) + 64
    return score + tl.load(table + head * 129 + distance)
def relative(score, batch, head, q_idx, k_idx, table):
    return score + table[head, (q_idx - k_idx).clamp(-64, 64) + 64].to(score.dtype)
@triton.jit
def alibi_t(score, batch, head, q_idx, k_idx, slopes):
    return score - tl.load(slopes + head) * tl.abs(q_idx - k_idx).to(tl.float32)
def alibi(score, batch, head, q_idx, k_idx, slopes):
    return score - slopes[head].to(score.dtype) * (q_idx - k_idx).abs()
@triton.jit
def capped_t(score, batch, head, q_idx, k_idx):
    e = tl.exp(-2.0 * tl.abs(score) / 5.0)
    t = (1.0 - e) / (1.0 + e)
    return 5.0 * tl.where(score < 0, -t, t)
@triton.jit
def capped_d(dscore, score, batch, head, q_idx, k_idx):
    e = tl.exp(-2.0 * tl.abs(score) / 5.0)
    t = (1.0 - e) / (1.0 + e)
    return dscore * (1.0 - t * t)
def capped(score, batch, head, q_idx, k_idx):
    return 5.0 * torch.tanh(score / 5.0)
@triton.jit
def damped_t(score, batch, head, q_idx, k_idx, per_head):
    return score * tl.load(per_head + head) / (1.0 + tl.abs(q_idx - k_idx) * 0.01)
@triton.jit
def damped_d(dscore, score, batch, head, q_idx, k_idx, per_head):
    return dscore * tl.load(per_head + head) / (1.0 + tl.abs(q_idx - k_idx) * 0.01)
def damped(score, batch, head, q_idx, k_idx, per_head):
    return score * per_head[head].to(score.dtype) / (1.0 + (q_idx - k_idx).abs() * 0.01)
def functions(h, kind):
    if kind == "relative": return ScoreFunction(relative_t, relative, tensors=(TABLE[:h].contiguous(),))
    if kind == "alibi": return ScoreFunction(alibi_t, alibi, tensors=(SLOPES[:h].contiguous(),))
    if kind == "capped": return ScoreFunction(capped_t, capped, derivative=capped_d)
    return ScoreFunction(damped_t, damped, tensors=(PER[:h].contiguous(),), derivative=damped_d)
TABLE, SLOPES, PER = torch.randn(16, 129, device=dev), torch.rand(16, device=dev) * 0.1, 0.5 + torch.rand(16, device=dev)
stop, part, parts = time.time() + float(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
bad = done = 0
def run(case, backend, tensors, dout, **more):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = tw.attention(*leaves, backend=backend, **case, **more)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)
masks = {"full": None, "causal": tw.causal(), "window": tw.causal() & tw.window(127, 0), "documents": tw.causal() & tw.documents(torch.repeat_interleave(torch.arange(4), torch.tensor([150, 300, 249, 1])).to(dev))}
worst = {}
if sys.argv[2] == "check":
    for kind, d, (mname, mask), dtype, extra in itertools.islice([one for one in itertools.product(("relative", "alibi", "capped", "damped"), (64, 128, 80), masks.items(), (torch.bfloat16, torch.float16), ({}, {"softcap": 20.0}, {"sinks": 1}, {"bias": 1}, {"deterministic": True})) if not (one[4] and (one[3] is torch.float16 or one[1] == 80))], part, None, parts):
        if time.time() > stop: print("stopped early after", done); break
        hq, hk, s = 8, 2, 700
        q, k, v, dout = (torch.randn(1, h, s, d, device=dev).to(dtype) for h in (hq, hk, hk, hq))
        extra = dict(extra)
        if "sinks" in extra: extra["sinks"] = torch.randn(hq, device=dev)
        if "bias" in extra: extra["bias"] = torch.randn(1, hq, s, 704, device=dev).to(dtype)[..., :s]
        case = dict(mask=mask, score_function=functions(hq, kind), **extra)
        name = f"{kind} d{d} {mname} {dtype} {list(extra)}"
        try:
            got = run(case, "gluon", (q, k, v), dout)
        except tw.errors.UnsupportedProblem as error:
            print("refused", name, str(error).split("\n")[-1][:140]); continue
        wide = {key: (val.double() if isinstance(val, torch.Tensor) else val) for key, val in case.items() if key not in ("deterministic",)}
        true = run(wide, "reference", (q.double(), k.double(), v.double()), dout.double())
        other = run(case, "triton", (q, k, v), dout)
        again = run(case, "gluon", (q, k, v), dout) if "deterministic" in extra else got
        done += 1
        for what, g, o, t, a in zip(("out", "dq", "dk", "dv"), got, other, true, again):
            eg, eo = ((x.double() - t).abs().max().item() for x in (g, o))
            ratio = eg / max(eo, 1e-9)
            worst[what] = max(worst.get(what, 0), ratio)
            if not math.isfinite(eg) or ratio > 2.0 or not torch.equal(g, a):
                bad += 1; print("BAD" if ratio > 3 or not math.isfinite(eg) else "high", name, what, f"gluon {eg:.2e} triton {eo:.2e}", "bits differ" if not torch.equal(g, a) else "")
    # packed sequences, and wide heads forward
    for kind, d in itertools.islice(itertools.product(("relative", "damped"), (64, 128)), part, None, parts):
        cu = torch.tensor([0, 150, 450, 451, 700], dtype=torch.int32, device=dev)
        q, k, v, dout = (torch.randn(700, h, d, device=dev).bfloat16() for h in (8, 2, 2, 8))
        res = []
        for backend, cast in (("gluon", lambda x: x), ("triton", lambda x: x)):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            try: o = tw.attention_varlen(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=tw.causal(), score_function=functions(8, kind), backend=backend)
            except Exception as e: print("varlen", kind, d, backend, type(e).__name__, str(e).split("\n")[-1][:150]); break
            res.append((o.detach(), *torch.autograd.grad(o, leaves, dout)))
        if len(res) == 2: print("varlen", kind, d, [f"{(a.float()-b.float()).abs().max().item():.1e}" for a, b in zip(*res)])
    for d in {4: (192,), 5: (256,)}.get(part, ()):
        q, k, v = (torch.randn(1, h, 700, d, device=dev).bfloat16() for h in (8, 2, 2))
        case = dict(mask=tw.causal(), score_function=functions(8, "damped"))
        g, o = (tw.attention(q, k, v, backend=b, **case) for b in ("gluon", "triton"))
        t = tw.attention(q.double(), k.double(), v.double(), backend="reference", **case)
        print("wide", d, f"{(g.double()-t).abs().max().item():.1e} {(o.double()-t).abs().max().item():.1e}")
    print(f"checked {done}, bad {bad}, worst ratios of errors to triton's {({k: round(v, 2) for k, v in worst.items()})}", flush=True)
if sys.argv[2] in ("time", "warm"):
    for d in (128,):
        q, k, v, dout = (torch.randn(4, 16, 4096, d, device=dev).bfloat16() for _ in range(4))
        calls = {"plain": dict(mask=tw.causal(), backend="gluon")}
        for kind in ("relative", "alibi", "capped", "damped"):
            for backend in ("gluon", "triton"):
                calls[f"{kind} {backend}"] = dict(mask=tw.causal(), score_function=functions(16, kind), backend=backend)
        if sys.argv[2] == "time": calls = {n: c for n, c in calls.items() if "alibi" not in n}
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        times = {n: ([], []) for n in calls}
        if sys.argv[2] == "warm":
            calls = dict(list(calls.items())[part % 9:part % 9 + 1]) 
            times = {n: ([], []) for n in calls}
        for turn in range(1 if sys.argv[2] == "warm" else 15):
            for n, case in calls.items():
                a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                a.record(); o = tw.attention(*leaves, **case); b.record(); torch.autograd.grad(o, leaves, dout); c.record(); torch.cuda.synchronize()
                if turn > 2: times[n][0].append(a.elapsed_time(b)); times[n][1].append(b.elapsed_time(c))
                time.sleep(0.01)
        if sys.argv[2] == "warm": continue
        base = [statistics.median(x) for x in times["plain"]]
        for n, ts in times.items():
            f, b = (statistics.median(x) for x in ts)
            print(f"d{d} {n:18s} forward {f:.3f} ms ({base[0]/f:.2f} of plain)  backward {b:.3f} ms ({base[1]/b:.2f})", flush=True)
