"""What ranks do in the tests of behaviour: each function runs on every rank of a mesh."""

import importlib
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from distributed.equality import group_of
from tilewise import distributed
from tilewise.distributed import (
    call_plan,
    context_parallel_attention,
    function,
    positions,
    shard,
    ulysses,
    unshard,
)
from tilewise.distributed.exchange import start
from tilewise.distributed.partial import PartialResults
from tilewise.support.caches import clear_caches


def inputs(seed=0, s=24, hq=4, hk=2, dtype=torch.float64, b=1, d=8):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(b, heads, s, d, generator=make, dtype=torch.float64).to(dtype) for heads in (hq, hk, hk)]


def shards(mesh, layout="zigzag", **sizes):
    return [shard(whole, mesh, dim=2, layout=layout) for whole in inputs(**sizes)]


def message_of(call):
    """Return the class and the text of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, None


def round_trip(mesh, layout, length, dim):
    """Shard and put together again; return what came of it, of the positions, and of the gradients."""
    shape = [3, 2, 4]
    shape[dim] = length
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    group = group_of(mesh)
    leaf = whole.clone().requires_grad_()
    part = shard(leaf, mesh, dim=dim, layout=layout)
    own = positions(mesh, length=length, layout=layout)
    weights = torch.arange(whole.numel(), dtype=torch.float64).view(whole.shape)
    together = unshard(part, mesh, dim=dim, layout=layout, length=length)
    ((together * weights).sum() * (1 + dist.get_rank(group))).backward()
    dist.all_reduce(leaf.grad, group=group)
    ranks = mesh.size()
    return {"same": bool(torch.equal(together, whole)), "part": bool(torch.equal(part, whole.index_select(dim, own))),
            "positions": own.tolist(),
            "gradient": float((leaf.grad - weights * sum(range(1, ranks + 1))).abs().max()) if length else 0.0}


def wrong_calls(mesh):
    """Return the errors of calls that are wrong alike on all ranks, by name."""
    q, k, v = shards(mesh)
    ids = torch.zeros(5, dtype=torch.int64)

    def call(**changed):
        given = {"q": q, "k": k, "v": v, "mesh": mesh, "layout": "zigzag"} | changed
        return message_of(lambda: context_parallel_attention(**given))

    ranks = torch.arange(dist.get_world_size())
    three_dims = DeviceMesh("cpu", ranks.view(1, 2, -1), mesh_dim_names=("pp", "dp", "cp"), _init_backend=False)
    unordered = DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]]), _init_backend=False)
    return {
        "layout": call(layout="striped"), "schedule": call(schedule="star"), "mesh": call(mesh=mesh.get_group()),
        "mesh_dims": call(mesh=three_dims), "mesh_order": call(mesh=unordered),
        "lengths": call(lengths=(16,)), "shard_length": call(lengths=(28, 24)),
        "rank": call(q=q[0]), "documents": call(mask=tw.documents(ids)),
        "function": call(mask=tw.functions.MaskFunction(torch=lambda b, h, i, j: i >= j)),
        "tiled": call(mask=(tw.causal() & torch.ones(24, 24, dtype=torch.bool)).tiled(24, 24)),
        "bias": call(bias=torch.zeros(24, 24, dtype=q.dtype)),
        "padding": call(mask=tw.causal("bottom_right"), seqlens_k=torch.tensor([9])),
        "seqlens": call(seqlens_k=torch.tensor([9, 9])), "heads": call(q=q[:, :3]),
        "seqlens_type": call(seqlens_q=[3]),
        "alignment": call(k=k[:, :, :2], v=v[:, :, :2], lengths=(24, 2 * mesh.size()), mask=tw.causal()),
        "distances": call(k=k[:, :, :2], v=v[:, :, :2], lengths=(24, 2 * mesh.size()),
                          alibi_slopes=torch.ones(4, dtype=q.dtype)),
        "softcap": call(softcap=-1.0), "backend": call(backend="fast"),
        "layout_length": call(layout=distributed.Layout("mine", ((), ())), lengths=(24, 24)),
        "shard": message_of(lambda: shard([1], mesh, dim=0, layout="zigzag")),
        "shard_dim": message_of(lambda: shard(q, mesh, dim=4, layout="zigzag")),
        "unshard": message_of(lambda: unshard(q, mesh, dim=2, layout="zigzag", length=25)),
        "explain": message_of(lambda: distributed.explain(q, k, v, mesh=mesh, layout="zigzag", window=3)),
    }


def wrong_packed_calls(mesh):
    """Return the errors of packed calls that are wrong alike on all ranks, by name."""
    q, k, v = (shard(own[0].transpose(0, 1), mesh, dim=0, layout="zigzag") for own in inputs())

    def call(**changed):
        given = {"q": q, "k": k, "v": v, "mesh": mesh, "layout": "zigzag",
                 "cu_seqlens_q": torch.tensor([0, 9, 24])} | changed
        return message_of(lambda: distributed.context_parallel_attention_varlen(**given))

    return {
        "counts": call(cu_seqlens_k=torch.tensor([0, 24])), "descending": call(cu_seqlens_q=torch.tensor([0, 9, 3])),
        "past_the_end": call(cu_seqlens_q=torch.tensor([0, 9, 25])), "list": call(cu_seqlens_q=[0, 24]),
        "alignment": call(cu_seqlens_k=torch.tensor([0, 9, 24]), mask=tw.causal()), "offset": call(mask=tw.causal(3)),
        "documents": call(mask=tw.documents(torch.zeros(5, dtype=torch.int64))),
        "bias": call(bias=torch.zeros(2, 4, 15, 15, dtype=q.dtype)), "rows": call(q=q[:, 0]),
        "function": call(mask=tw.functions.MaskFunction(torch=lambda b, h, i, j: i >= j)),
    }


def outside(mesh):
    """Return the error of a process that is none of a mesh's ranks."""
    first = DeviceMesh("cpu", torch.arange(dist.get_world_size() - 1), _init_backend=False)
    return message_of(lambda: positions(first, length=8, layout="zigzag"))


def ulysses_refusals(mesh):
    """Return the errors of calls that Ulysses does not take."""
    def refused(hq, hk, **options):
        given = shards(mesh, hq=hq, hk=hk)
        return message_of(lambda: context_parallel_attention(
            *given, mesh=mesh, layout="zigzag", schedule="ulysses", **options))[1]

    return refused(3, 3), refused(6, 3), refused(4, 2, dropout_p=0.1, dropout_seed=1)


def refusals_of_two_dims(mesh):
    """Return the errors of calls that a mesh of two dims does not take, of a backend too, and how many exchanges."""
    from tilewise.distributed import heads

    exchanges = []

    def refused(hq=4, hk=2, **options):
        given = shards(mesh, hq=hq, hk=hk)
        return message_of(lambda: context_parallel_attention(*given, mesh=mesh, layout="zigzag", **options))

    heads.start = lambda *messages: exchanges.append(messages) or start(*messages)
    try:
        return (refused(schedule="ulysses"), refused(3, 3, schedule="ring"), refused(6, 3), refused(dropout_p=0.1),
                refused(backend="cuda", mask=tw.causal())), len(exchanges)
    finally:
        heads.start = start


def disagreement(mesh, what):
    """Let the last rank call with something else than the others; return the error on this rank."""
    is_last = dist.get_rank(group_of(mesh)) == mesh.size() - 1
    layout = "contiguous" if is_last and what == "layout" else "zigzag"
    q, k, v = shards(mesh, d=12 if is_last and what == "shape" else 8)
    if is_last and what == "error":
        k = k[:, :, :-1]
    if is_last and what == "padding":
        layout = "striped"
    return message_of(lambda: context_parallel_attention(q, k, v, mesh=mesh, layout=layout))


def one_rank(mesh):
    """Return whether a mesh of one rank gives the very result of attention, and how many messages are sent."""
    q, k, v = (whole.requires_grad_() for whole in inputs())
    out = context_parallel_attention(q, k, v, mesh=mesh, layout="zigzag", mask=tw.causal())
    rows = [own[0].transpose(0, 1) for own in (q, k, v)]
    ends = torch.tensor([0, 5, 24])
    packed = distributed.context_parallel_attention_varlen(*rows, mesh=mesh, layout="contiguous", cu_seqlens_q=ends)
    return (bool(torch.equal(out, tw.attention(q, k, v, mask=tw.causal()))), out.grad_fn.name(),
            bool(torch.equal(packed, tw.attention_varlen(*rows, cu_seqlens_q=ends))),
            message_of(lambda: context_parallel_attention(q, k, v, mesh=mesh, layout="striped"))[1])


def bytes_received(mesh, mask, layout, schedule, documents):
    """Return how many bytes this rank receives in the forward pass of a call of 64 tokens."""
    received = []

    def counting(group, sends, receives):
        received.append(sum(part.nbytes for message in receives.values() for part in message))
        return start(group, sends, receives)

    from tilewise.distributed import function

    function.start = counting
    try:
        q, k, v = shards(mesh, layout, s=64)
        if documents:
            mask = tw.documents(torch.arange(64) // documents)
        context_parallel_attention(q, k, v, mesh=mesh, layout=layout, mask=mask, schedule=schedule)
    finally:
        function.start = start
    return sum(received)


def borders_by_ulysses(mesh, ids):
    """Return the lengths that one rank's call of the whole sequence is given with such documents, or None."""
    given, attend = [], ulysses.attention_varlen

    def recording(*tensors, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, **options):
        given.append((cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), seqused_q, seqused_k, options["mask"]))
        return attend(*tensors, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
                      seqused_k=seqused_k, **options)

    with patch.object(ulysses, "attention_varlen", recording):
        for mask in (tw.causal(), tw.window(3, 2)):
            context_parallel_attention(*shards(mesh), mesh=mesh, layout="zigzag", mask=mask & tw.documents(ids),
                                       schedule="ulysses")
    return given


def errors_in_16_bits(mesh, schedule, hk=2):
    """Return, for out and each gradient, the error of the parts and of the one-device call, against float64."""
    whole = inputs(s=64, dtype=torch.bfloat16, d=16, hk=hk)
    dout = torch.randn(1, 4, 64, 16, generator=torch.Generator().manual_seed(2)).bfloat16()

    def run(attend, tensors, gradient):
        leaves = [own.clone().requires_grad_() for own in tensors]
        out = attend(*leaves)
        out.backward(gradient)
        return [out.detach(), *[leaf.grad for leaf in leaves]]

    exact = run(lambda *own: tw.attention(*own, mask=tw.causal()), [own.double() for own in whole], dout.double())
    one = run(lambda *own: tw.attention(*own, mask=tw.causal(), backend="reference"), whole, dout)
    own = positions(mesh, length=64, layout="zigzag")
    many = run(lambda *parts: context_parallel_attention(
        *parts, mesh=mesh, layout="zigzag", mask=tw.causal(), schedule=schedule, backend="reference"),
        [part[:, :, own] for part in whole], dout[:, :, own])
    found = []
    for exact_one, one_one, many_one in zip(exact, one, many, strict=True):
        together = unshard(many_one, mesh, dim=2, layout="zigzag")
        found.append(tuple(float((got.double() - exact_one).square().mean().sqrt()) for got in (together, one_one)))
    return found


def dtypes_of_parts(mesh, mask, layout, schedule):
    """Return the dtypes that local calls write out in, and the gradients of q, k and v, of a call of 64 tokens."""
    from tilewise.distributed import function

    calls, found = (function.attend_to_block, function.gradients_of_block), (set(), set())

    def attending(*arguments, **options):
        results = calls[0](*arguments, **options)
        found[0].add(results[0].dtype)
        return results

    def differentiating(*arguments, **options):
        gradients = calls[1](*arguments, **options)
        found[1].update(gradient.dtype for gradient in gradients)
        return gradients

    function.attend_to_block, function.gradients_of_block = attending, differentiating
    try:
        leaves = [part.requires_grad_() for part in shards(mesh, layout, s=64, dtype=torch.bfloat16)]
        out = context_parallel_attention(*leaves, mesh=mesh, layout=layout, mask=mask, schedule=schedule)
        out.sum().backward()
    finally:
        function.attend_to_block, function.gradients_of_block = calls
    return found


def refused_parts(mesh, schedule):
    """Return the error of a schedule with a backend that writes no float32 of 16-bit inputs."""
    tensors = [part.requires_grad_() for part in shards(mesh, dtype=torch.bfloat16, hk=2)]
    return message_of(lambda: context_parallel_attention(*tensors, mesh=mesh, layout="zigzag", schedule=schedule,
                                                         backend="torch"))


def shared_heads_without_a_gradient(mesh):
    """Call with a backend that writes no float32, on ranks that share heads of keys.

    Return how far out is from one device's where nothing needs a gradient, and the error where the same call does.
    """
    whole = inputs(dtype=torch.bfloat16, hk=2)
    found = []

    def attend(parts):
        return context_parallel_attention(*parts, mesh=mesh, layout="zigzag", schedule="ulysses", backend="torch")

    for needed, grads in ((False, True), (True, False)):
        parts = [shard(own, mesh, dim=2, layout="zigzag").requires_grad_(needed) for own in whole]
        with torch.set_grad_enabled(grads):
            out = attend(parts)
        one = tw.attention(*whole, backend="torch")
        found.append(float((unshard(out.detach(), mesh, dim=2, layout="zigzag") - one).abs().max()))
    return found, message_of(lambda: attend(parts))[0]


def surroundings(mesh):
    """Return the gradients of a call plain, checkpointed, under torch.compile and in autocast."""
    def loss(q, k, v):
        out = context_parallel_attention(q * 2.0, k, v, mesh=mesh, layout="zigzag", mask=tw.causal(), schedule="ring")
        return (out * out).sum()

    def gradients(function, dtype=torch.float64):
        leaves = [own.to(dtype).requires_grad_() for own in shards(mesh)]
        function(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    plain = gradients(loss)
    kept = gradients(lambda *own: checkpoint(loss, *own, use_reentrant=False))
    compiled = gradients(torch.compile(loss, backend="eager"))
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = (own.float() for own in shards(mesh))
        dtype = context_parallel_attention(q, k, v, mesh=mesh, layout="zigzag").dtype
    return ([float((a - b).abs().max()) for a, b in zip(plain, kept, strict=True)],
            [float((a - b).abs().max()) for a, b in zip(plain, compiled, strict=True)], str(dtype))


def kept_messages(mesh, schedule):
    """Return differences of gradients: of a second backward pass, with saved tensors elsewhere, and behind a change.

    The latter of k, as soon as the forward pass has returned: other ranks have the keys that were.
    """
    def attend(leaves):
        return context_parallel_attention(*leaves, mesh=mesh, layout="zigzag", mask=tw.causal(), schedule=schedule)

    leaves = [own.requires_grad_() for own in shards(mesh)]
    out = attend(leaves)
    first, second = (torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for _ in range(2))
    with torch.autograd.graph.save_on_cpu():
        elsewhere = torch.autograd.grad(attend(leaves).square().sum(), leaves)
    with torch.no_grad():
        parts = [own.detach().clone() for own in leaves]
        got = attend(parts)
        parts[1].zero_()
    return ([float((a - b).abs().max()) for other in (second, elsewhere) for a, b in zip(first, other, strict=True)],
            float((got - out).abs().max()))


def messages_of_passes(mesh, layout, mask, groups):
    """Return how many messages this rank sends forward, and backward, in an all-gather of so many groups of heads."""
    counts, start = [0], function.start

    def counting(group, sends, receives):
        counts[-1] += len(sends)
        return start(group, sends, receives)

    leaves = [own.requires_grad_() for own in shards(mesh, layout=layout)]
    clear_caches()
    with patch.object(function, "start", counting), patch.object(call_plan, "groups_of", lambda *_: groups):
        out = context_parallel_attention(*leaves, mesh=mesh, layout=layout, mask=mask, schedule="all_gather")
        counts.append(0)
        out.sum().backward()
    clear_caches()
    return counts


def sinks_behind(mesh, dtype):
    """Return whether sinks were added behind all parts, and not with the first one of a row."""
    called = []
    leaves = shards(mesh, dtype=getattr(torch, dtype))
    with patch.object(PartialResults, "add_sinks", lambda self, sinks: called.append(sinks)):
        context_parallel_attention(*leaves, mesh=mesh, layout="zigzag", mask=tw.causal(), schedule="ring",
                                   sinks=torch.zeros(4))
    return bool(called)


def drawn_seed(mesh):
    """Return two results of dropout without a seed, put together: ranks have to draw alike."""
    torch.manual_seed(mesh.get_local_rank())
    q = torch.zeros(1, 2, 8, 4, dtype=torch.float64)
    v = torch.eye(32, dtype=torch.float64)[None, None].expand(1, 2, 32, 32)
    part = shard(v, mesh, dim=2, layout="contiguous")
    q = torch.zeros(1, 2, part.shape[2], 4, dtype=torch.float64)
    out = context_parallel_attention(q, q, part, mesh=mesh, layout="contiguous", dropout_p=0.5)
    again = context_parallel_attention(q, q, part, mesh=mesh, layout="contiguous", dropout_p=0.5)
    return [unshard(one, mesh, dim=2, layout="contiguous") for one in (out, again)]


def explained(mesh, **options):
    """Return what explain says of a causal call: of a chosen schedule, and of one that is refused."""
    q, k, v = shards(mesh)
    told = distributed.explain(q, k, v, mesh=mesh, layout="zigzag", mask=tw.causal())
    if mesh.ndim == 2:
        return told.chosen, str(told), told.estimates, told.reasons
    odd = shards(mesh, hq=3, hk=3)
    refused = distributed.explain(*odd, mesh=mesh, layout="zigzag")
    return told.chosen, str(told), {name: one.pairs for name, one in told.estimates.items()}, refused.reasons


def repeated_call(mesh, how):
    """Return how often ranks compared descriptions in three equal calls, with and without TILEWISE_CHECK=1."""
    from tilewise.distributed import mesh as module

    counts, agree = [], module.agree

    def counting(*arguments):
        counts.append(1)
        return agree(*arguments)

    module.agree = counting
    os.environ["TILEWISE_CHECK"] = how
    try:
        q, k, v = shards(mesh, s=36)
        for _ in range(3):
            context_parallel_attention(q, k, v, mesh=mesh, layout="zigzag")
    finally:
        module.agree = agree
        del os.environ["TILEWISE_CHECK"]
    return len(counts)


def float32_difference(mesh, schedule):
    """Return the largest difference from one device in float32 with the backends that are chosen."""
    whole = inputs(s=48, dtype=torch.float32)
    leaves = [own.clone().requires_grad_() for own in whole]
    expected = tw.attention(*leaves, mask=tw.causal())
    expected.sum().backward()
    own = positions(mesh, length=48, layout="zigzag")
    parts = [leaf[:, :, own].detach().requires_grad_() for leaf in whole]
    out = context_parallel_attention(*parts, mesh=mesh, layout="zigzag", mask=tw.causal(), schedule=schedule)
    out.sum().backward()
    got, wanted = (out.detach(), *(part.grad for part in parts)), (expected.detach(), *(leaf.grad for leaf in leaves))
    return [float((one - other[:, :, own]).abs().max()) for one, other in zip(got, wanted, strict=True)]


def part_of_a_larger_mesh(mesh):
    """Return the difference from one device of a call on two dims of a mesh of three."""
    whole = inputs()
    larger = DeviceMesh("cpu", torch.arange(4).view(1, 2, 2), mesh_dim_names=("dp", "ring", "heads"))
    inner = larger["ring", "heads"]
    parts = [shard(own, inner, dim=2, layout="zigzag") for own in whole]
    out = context_parallel_attention(*parts, mesh=inner, layout="zigzag", mask=tw.causal())
    together = unshard(out, inner, dim=2, layout="zigzag")
    return float((together - tw.attention(*whole, mask=tw.causal())).abs().max())


def script(name):
    """Import a script of benchmarks/."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def benchmark(mesh, arguments):
    """Run benchmarks/context_parallel.py on the ranks that are here, instead of those that torchrun starts."""
    context_parallel = script("context_parallel")
    options = context_parallel.parsed(arguments)
    for row in context_parallel.rows_of(options, mesh, torch.device("cpu")):
        if dist.get_rank() == 0:
            context_parallel.write(row, options.out)


def shards_of_torch(mesh):
    """Return whether torch's helper shards as "zigzag" does, leaves the wholes, and gives SDPA back."""
    wholes, sdpa = inputs(s=32), torch.nn.functional.scaled_dot_product_attention
    before = [whole.clone() for whole in wholes]
    with script("context_parallel_torch").sharded(mesh, wholes) as parts:
        replaced = torch.nn.functional.scaled_dot_product_attention is not sdpa
        same = all(part.equal(own) for part, own in zip(parts, shards(mesh, s=32), strict=True))
    left = all(whole.equal(own) for whole, own in zip(wholes, before, strict=True))
    return same, left, replaced, torch.nn.functional.scaled_dot_product_attention is sdpa


def peers_checked(mesh):
    """Return what is found of peers that are right, right with repeated heads, wrong on one rank, or that raise."""
    module, rank, own, found = script("context_parallel_torch"), mesh.get_local_rank(), torch.ones(1, 2, 4, 8), {}

    def refuse(*_):
        raise RuntimeError("no such kernel\nand more")

    def outcome(name, grouped, repeated):
        attends = {False: grouped, True: repeated}
        with patch.object(module, "attend_of", lambda peer, *, repeats: attends[repeats]):
            attend, difference, said = module.checked("any", lambda attend: (attend(own, own, own),), (own,),
                                                      group_of(mesh))
        found[name] = None if attend is None else attend is repeated, difference, said

    def near(q, k, v):
        return q + 5e-5 * rank

    def far(q, k, v):
        return q + rank

    def empty(q, k, v):
        return q * float("nan")

    outcome("right", near, refuse)
    outcome("repeated", refuse, near)
    outcome("wrong", far, far)
    outcome("nan", empty, empty)
    outcome("raises", refuse, refuse)
    return found
