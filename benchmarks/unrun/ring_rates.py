"""Rates of the local calls of a ring of two ranks with 131072 tokens each, beside causal calls of as many pairs."""
import torch, time, statistics
import tilewise as tw
from tilewise.masks import causal
calls = {"causal 131072": (131072, 131072, 32, 8, causal()), "full 65536 x 131072": (65536, 131072, 32, 8, None), "full 131072 x 65536": (131072, 65536, 32, 8, None), "causal 262144, 16 heads": (262144, 262144, 16, 4, causal()),
         "causal 32768": (32768, 32768, 32, 8, causal()), "full 16384 x 32768": (16384, 32768, 32, 8, None), "full 32768 x 16384": (32768, 16384, 32, 8, None)}
made = {}
for name, (sq, sk, hq, hk, mask) in calls.items():
    q = torch.randn(1, hq, sq, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, hk, sk, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    pairs = sq * sk / (2 if mask is not None else 1) * hq
    made[name] = (q, k, v, torch.randn_like(q), mask, pairs)
times = {name: ([], []) for name in calls}
for turn in range(5):
    for name, (q, k, v, dout, mask, pairs) in made.items():
        a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        a.record(); out = tw.attention(q, k, v, mask=mask); b.record(); torch.autograd.grad(out, (q, k, v), dout); c.record(); torch.cuda.synchronize()
        if turn: times[name][0].append(a.elapsed_time(b)); times[name][1].append(b.elapsed_time(c))
for name, (fwd, bwd) in times.items():
    p = made[name][5]
    print(f"{name}: forward {statistics.median(fwd):.2f} ms, {p*128*4/statistics.median(fwd)/1e9:.0f} TFLOP/s; backward {statistics.median(bwd):.2f} ms, {p*128*10/statistics.median(bwd)/1e9:.0f} TFLOP/s", flush=True)
