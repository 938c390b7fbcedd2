"""Kernels of context parallel calls behind one another on rank 0: where the GPU waits."""
import os, sys, statistics, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile, ProfilerActivity
rank = int(os.environ["LOCAL_RANK"]); device = torch.device("cuda", rank); torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
import tilewise as tw
from tilewise.distributed import context_parallel_attention, shard
mesh = init_device_mesh("cuda", (2,))
n = int(os.environ.get("N", "8192"))
queue = int(os.environ.get("QUEUE", "4"))
g = torch.Generator(device).manual_seed(0)
whole = [torch.randn(1, h, 2*n, 128, generator=g, device=device).bfloat16() for h in (32, 8, 8, 32)]
out = open(sys.argv[1], "w") if rank == 0 else None

from collections import defaultdict
from tilewise.distributed import function
once = function.let_messages_begin
def turns(count):
    def go(device):
        for _ in range(count): once(device)
        if count < 0: torch.cuda._sleep(-count * 1800)
    function.let_messages_begin = go
trials = eval(os.environ.get("TRIALS", "[('causal','ideal',1),('causal','ring',0),('causal','ring',1),('causal','ring',2),('causal','all_gather',1),('window','ideal',1),('window','ring',0),('window','ring',1),('window','all_gather',1),('documents','ideal',1),('documents','all_gather',1),('documents','ring',1)]"))
for maskname, sched, count in trials:
        turns(count)
        layout = "zigzag" if maskname == "causal" else "contiguous"
        ids = (torch.arange(2*n)+n//4)//(n//2)
        mask = tw.causal("top_left")
        if maskname == "window": mask = mask & tw.window(4095, 0)
        alone = mask & tw.documents(ids.to(device)[None] if False else ids.to(device)) if maskname == "documents" else mask
        if maskname == "documents": mask = mask & tw.documents(ids)
        *parts, dout = [shard(x, mesh, dim=2, layout=layout).contiguous() for x in whole]
        def both():
            if sched == "ideal":
                leaves = [p.detach().requires_grad_() for p in whole[:3]]
                return torch.autograd.grad(tw.attention(*leaves, mask=alone), leaves, whole[3])
            leaves = [p.detach().requires_grad_() for p in parts]
            o = context_parallel_attention(*leaves, mesh=mesh, layout=layout, mask=mask, schedule=sched)
            return torch.autograd.grad(o, leaves, dout)
        def many():
            for _ in range(queue): both()
            torch.cuda.synchronize()
        for _ in range(2): many()
        times = []
        for _ in range(3):
            dist.barrier(); torch.cuda.synchronize()
            t = time.perf_counter(); many(); times.append((time.perf_counter() - t) * 1e3 / queue)
        plain = statistics.median(times)
        dist.barrier(); torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as pr:
            many()
        dist.barrier()
        ev = sorted([e for e in pr.events() if e.device_type == torch.autograd.DeviceType.CUDA], key=lambda e: e.time_range.start)
        t0 = ev[0].time_range.start; end = max(e.time_range.end for e in ev)
        main = [e for e in ev if "nccl" not in e.name]
        half = main[len(main)//2:]
        last, gaps = half[0].time_range.start, 0.0
        for e in half:
            gaps += max(0.0, e.time_range.start - last); last = max(last, e.time_range.end)
        sums = defaultdict(lambda: [0, 0.0])
        for e in half:
            s = sums[e.name.replace("void at::native::", "")[:34]]; s[0] += 1; s[1] += e.time_range.elapsed_us()
        span = last - half[0].time_range.start; share = 2.0 / queue
        text = f"rank {rank} {maskname} {sched} turns {count}: {plain:.3f} ms a call; 2nd half {span/1e3*share:.3f}, gaps {gaps/1e3*share:.3f}; " + "; ".join(f"{k} {v[0]*share:.0f}x {v[1]*share:.0f}us" for k, v in sorted(sums.items(), key=lambda kv: -kv[1][1]))
        for r in range(2):
            dist.barrier()
            if r == rank: print(text, flush=True)
        if out is not None:
            print(f"== {maskname} {sched} {count}", file=out)
            before = 0.0
            for e in ev[len(ev)//2:len(ev)*7//8]:
                s, d = e.time_range.start - t0, e.time_range.elapsed_us()
                mark = "N" if "nccl" in e.name else " "
                gap = s - before if mark == " " else 0.0
                if mark == " ": before = s + d
                print(f"{s:9.0f} {d:7.0f} {gap:6.0f} {mark} {e.name[:60]}", file=out)
if os.environ.get("HOST"):
    import cProfile, pstats, io
    turns(1)
    for maskname, sched in (("causal", "ring"), ("documents", "all_gather")):
        layout = "zigzag" if maskname == "causal" else "contiguous"
        mask = tw.causal("top_left")
        if maskname == "documents": mask = mask & tw.documents(ids_cpu := (torch.arange(2*n)+n//4)//(n//2))
        *parts, dout = [shard(x, mesh, dim=2, layout=layout).contiguous() for x in whole]
        leaves = [p.detach().requires_grad_() for p in parts]
        def fwd(): return context_parallel_attention(*leaves, mesh=mesh, layout=layout, mask=mask, schedule=sched)
        def both(): return torch.autograd.grad(fwd(), leaves, dout)
        for _ in range(5): both()
        for what, call in (("forward", fwd), ("both", both)):
            dist.barrier(); torch.cuda.synchronize(); ts = []
            for _ in range(20):
                torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize()
                t = time.perf_counter(); call(); ts.append((time.perf_counter() - t) * 1e6)
            if rank == 0: print(f"host {maskname} {sched} {what}: {statistics.median(ts):.0f} us until it returns", flush=True)
        torch.cuda.synchronize(); dist.barrier()
        pr = cProfile.Profile()
        if rank == 0: pr.enable()
        for _ in range(30):
            both(); torch.cuda.synchronize()
        if rank == 0:
            pr.disable(); s = io.StringIO()
            pstats.Stats(pr, stream=s).sort_stats("cumtime").print_stats(75)
            print(f"== host {maskname} {sched}\n" + s.getvalue(), file=out)
        dist.barrier()
dist.destroy_process_group()
