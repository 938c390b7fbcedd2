"""Every rank computes the whole on one device, and holds its part of a context parallel call against it."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.distributed import call_plan, context_parallel_attention, positions, shard
from tilewise.support.caches import clear_caches

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """A call; sizes are of the whole.

    mask: of (sq, sk) -> a mask by position, or None. visible, documents, bias, alibi, sinks: whether there are such.
    """

    name: str
    sq: int = 24
    sk: int | None = None
    b: int = 2
    hq: int = 4
    hk: int = 2
    d: int = 8
    dv: int = 8
    mask: tw.Mask | None = None
    visible: tuple[int, ...] | None = None  # shape of a boolean tensor, 0 for a whole dim
    documents: int = 0  # how many
    bias: tuple[int, ...] | None = None
    alibi: bool = False
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    dropout_p: float = 0
    seqlens: bool = False
    aux: tuple[str, ...] = ("lse",)
    deterministic: bool | None = None
    dtype: torch.dtype = torch.float64
    refused: dict[str, str] = field(default_factory=dict)  # schedule: part of its reason

    @property
    def keys(self):
        return self.sq if self.sk is None else self.sk

    def __str__(self):
        return self.name


WINDOW = tw.causal("top_left") & tw.window(5, 0)
CASES = [
    Case("full"), Case("causal", mask=tw.causal()), Case("odd_lengths", 23, mask=tw.causal()),
    Case("window", mask=WINDOW), Case("window_of_two_sides", mask=tw.window(4, 3)),
    Case("prefix", mask=tw.prefix(7)), Case("chunk", mask=tw.chunk(5)),
    Case("causal_chunk", mask=tw.causal() & tw.chunk(8)),
    Case("sink_tokens", mask=WINDOW & tw.sink_tokens(3), sinks=True, softcap=2.0),
    Case("every_kind_of_mask", 29, mask=tw.prefix(4) & tw.window(6, 0) & tw.sink_tokens(2) & tw.chunk(12), documents=2),
    Case("documents", mask=tw.causal(), documents=3), Case("documents_both_ways", 26, documents=4),
    Case("documents_of_one_entry", 37, b=1, mask=tw.causal(), documents=5, sinks=True, aux=("lse", "max_logit")),
    Case("documents_of_one_entry_in_a_window", 40, b=1, mask=WINDOW, documents=3),
    Case("boolean_tensor", mask=tw.causal(), visible=(0, 0, 0, 0)), Case("boolean_rows", visible=(1, 1, 0, 1)),
    Case("boolean_keys", visible=(0, 1, 1, 0)),
    Case("bias", bias=(0, 0, 0, 0), mask=tw.causal()), Case("bias_of_one_head", 22, bias=(1, 1, 0, 0)),
    Case("bias_of_keys", bias=(1, 0, 1, 0), mask=WINDOW), Case("bias_of_rows", bias=(0, 1, 0, 1)),
    Case("bias_of_heads", bias=(1, 0, 1, 1), sinks=True),
    Case("alibi", alibi=True), Case("alibi_causal", alibi=True, mask=tw.causal(), sinks=True),
    Case("alibi_bottom_right", 18, 25, alibi=True, mask=tw.causal("bottom_right")),
    Case("sinks", sinks=True, mask=tw.causal()), Case("softcap_and_scale", softcap=1.5, scale=0.7, mask=WINDOW),
    Case("more_keys", 15, 26, mask=tw.causal("bottom_right")),
    Case("more_queries", 26, 14, mask=tw.causal("bottom_right")),
    Case("top_left", 15, 26, mask=tw.causal("top_left")), Case("cross", 13, 21),
    Case("multi_query", hk=1, mask=tw.causal()), Case("multi_head", hk=4, hq=4, mask=tw.causal()),
    Case("head_dims", d=6, dv=11, mask=tw.causal()),
    Case("max_logit", mask=WINDOW, aux=("lse", "max_logit"), sinks=True),
    Case("out_alone", mask=tw.causal(), aux=()), Case("deterministic", mask=tw.causal(), deterministic=True),
    Case("dropout", dropout_p=0.3, mask=tw.causal(), refused={"ulysses": "takes no dropout"}),
    Case("dropout_odd", 37, dropout_p=0.5, sinks=True, refused={"ulysses": "takes no dropout"}),
    Case("padded", seqlens=True, mask=tw.causal("top_left"), sinks=True), Case("padded_full", 21, seqlens=True),
    Case("few_tokens", 3, mask=tw.causal()), Case("one_token", 1), Case("no_token", 0),
    Case("no_keys", 4, 0, sinks=True),
    Case("everything", 27, mask=tw.prefix(3) & tw.window(9, 0) & tw.sink_tokens(2), documents=2, visible=(1, 0, 0, 0),
         bias=(1, 0, 0, 0), alibi=True, sinks=True, softcap=3.0, scale=0.5, dropout_p=0.2, d=5, dv=7,
         aux=("lse", "max_logit"), refused={"ulysses": "takes no dropout"}),
]
assert len({case.name for case in CASES}) == len(CASES)


def inputs_of(case, device):
    """Return the whole tensors, alike on every rank; those with a gradient are leaves."""
    make = torch.Generator().manual_seed(7)

    def normal(*shape, dtype=case.dtype):
        return torch.randn(shape, generator=make, dtype=torch.float64).to(device, dtype).requires_grad_()

    def shape_of(sizes):
        return [size or whole for size, whole in zip(sizes, (case.b, case.hq, case.sq, case.keys), strict=True)]

    wide = torch.float64 if case.dtype is torch.float64 else torch.float32
    given = {"q": normal(case.b, case.hq, case.sq, case.d), "k": normal(case.b, case.hk, case.keys, case.d),
             "v": normal(case.b, case.hk, case.keys, case.dv),
             "bias": normal(*shape_of(case.bias)) if case.bias else None,
             "alibi_slopes": normal(case.hq, dtype=wide) if case.alibi else None,
             "sinks": normal(case.hq) if case.sinks else None}
    visible = (torch.rand(shape_of(case.visible), generator=make) > 0.3).to(device) if case.visible else None
    ids = None
    if case.documents:
        ids = torch.sort(torch.randint(case.documents, (case.b, case.sq), generator=make)).values.to(device)
    seqlens = [torch.randint(1, size + 1, (case.b,), generator=make).to(device) for size in (case.sq, case.keys)
               ] if case.seqlens else (None, None)
    gradients = (normal(case.b, case.hq, case.sq, case.dv), normal(case.b, case.hq, case.sq, dtype=wide))
    return given, visible, ids, seqlens, [gradient.detach() for gradient in gradients]


def mask_of(case, visible, ids):
    mask = case.mask
    for part in (visible, None if ids is None else tw.documents(ids)):
        if part is not None:
            mask = part if mask is None else mask & part
    return mask


def backward(results, gradients):
    """Hand back gradients of out and, where it was asked for, of lse."""
    wanted = [(result, gradient) for result, gradient in zip(results, gradients, strict=False)]
    torch.autograd.backward(*zip(*wanted, strict=True))


def named(results):
    return results if isinstance(results, tuple) else (results,)


def compare(mesh, case, layout, schedule, backend="reference"):
    """Return the largest difference of each result and gradient from the one-device call's."""
    given, visible, ids, seqlens, gradients = inputs_of(case, mesh.device_type)
    options = {"softcap": case.softcap, "scale": case.scale, "dropout_p": case.dropout_p, "return_aux": case.aux,
               "dropout_seed": 5 if case.dropout_p else None, "deterministic": case.deterministic, "backend": backend,
               "seqlens_q": seqlens[0], "seqlens_k": seqlens[1]}
    whole = named(tw.attention(mask=mask_of(case, visible, ids), **given, **options))
    backward(whole, gradients)
    own = positions(mesh, length=case.sq, layout=layout)
    parts = {key: None if tensor is None else tensor.detach().clone().requires_grad_() for key, tensor in given.items()}
    shards = dict(parts)
    for key in ("q", "k", "v"):
        shards[key] = shard(parts[key], mesh, dim=2, layout=layout)
    if parts["bias"] is not None and parts["bias"].shape[2] > 1:
        shards["bias"] = shard(parts["bias"], mesh, dim=2, layout=layout)
    if visible is not None and visible.shape[2] > 1:
        visible = shard(visible, mesh, dim=2, layout=layout)
    results = named(context_parallel_attention(
        mesh=mesh, layout=layout, mask=mask_of(case, visible, ids), lengths=(case.sq, case.keys), schedule=schedule,
        **shards, **options))
    backward(results, [gradient[:, :, own] for gradient in gradients])
    found = {key: largest(result, expected[:, :, own]) for key, result, expected in zip(
        ("out", "lse", "max_logit"), results, whole, strict=False)}
    for key, part in parts.items():
        if part is not None:
            total = torch.zeros_like(part) if part.grad is None else part.grad.clone()
            dist.all_reduce(total, group=group_of(mesh))  # of a shard, the parts of all ranks
            found[f"d{key}"] = largest(total, given[key].grad)
    return found


def compare_groups(mesh, case, layout, count, backend="reference"):
    """Compare an all-gather of so many groups of heads."""
    groups_of = call_plan.groups_of
    call_plan.groups_of = lambda *_: count
    clear_caches()
    try:
        return compare(mesh, case, layout, "all_gather", backend)
    finally:
        call_plan.groups_of = groups_of
        clear_caches()


def group_of(mesh):
    """Return the group of a mesh's ranks; those of two dims are all that there are."""
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def largest(got, expected):
    """Return the largest difference; infinities and shapes have to be the same.

    Where numbers are above 1 it is of the largest one: gradients of slopes are sums over distances, of 60 and more.
    """
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert got.dtype is expected.dtype, (got.dtype, expected.dtype)
    got, expected = got.detach(), expected.detach()
    same = got == expected
    if not got.numel():
        return 0.0
    size = expected.masked_fill(expected.isinf(), 0.0).abs().max().clamp(min=1.0)
    return float(torch.where(same, 0.0, (got - expected).abs()).max() / size)
