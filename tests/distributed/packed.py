"""Packed sequences over ranks, held against the one-device call on every rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import tilewise as tw
from distributed.equality import backward, group_of, largest, named
from tilewise.distributed import context_parallel_attention_varlen, positions, shard


@dataclass(frozen=True)
class Case:
    """A call; lengths_k None: keys have the lengths of queries, and share their borders."""

    name: str
    lengths: tuple[int, ...] = (5, 9, 1, 13, 4)
    lengths_k: tuple[int, ...] | None = None
    hq: int = 4
    hk: int = 2
    mask: tw.Mask | None = None
    visible: tuple[int, ...] | None = None
    documents: int = 0
    bias: tuple[int, ...] | None = None
    alibi: bool = False
    sinks: bool = False
    softcap: float | None = None
    used: bool = False
    behind: int = 0  # rows behind the last sequence
    aux: tuple[str, ...] = ("lse",)

    def __str__(self):
        return self.name


CAUSAL = tw.causal("top_left")
CASES = [
    Case("full"), Case("causal", mask=tw.causal()), Case("one_sequence", (31,), mask=tw.causal()),
    Case("many_short_ones", (2,) * 17, mask=CAUSAL),
    Case("empty_ones", (0, 7, 0, 0, 12, 3, 0), mask=tw.causal(), sinks=True),
    Case("window", mask=tw.causal() & tw.window(3, 0), sinks=True, softcap=2.0),
    Case("first_keys", mask=tw.prefix(2) & tw.window(4, 0) & tw.sink_tokens(1) & tw.chunk(6)),
    Case("cross", (5, 9, 0, 13), (7, 3, 4, 11)),
    Case("bottom_right", (5, 9, 2, 13), (7, 3, 4, 16), mask=tw.causal("bottom_right")),
    Case("used", (6, 9, 8, 4), mask=CAUSAL, used=True, sinks=True),
    Case("rows_behind", behind=5, sinks=True, mask=CAUSAL),
    Case("alibi", alibi=True, mask=CAUSAL), Case("bias", bias=(0, 0, 0, 0), mask=CAUSAL),
    Case("bias_of_keys", bias=(1, 1, 1, 0)),
    Case("boolean_tensor", visible=(0, 1, 0, 0), mask=CAUSAL), Case("documents", documents=2, mask=CAUSAL),
    Case("everything", (6, 11, 3, 9), mask=tw.prefix(2, "top_left") & tw.window(5, 0), visible=(1, 0, 0, 0),
         documents=2, bias=(0, 1, 0, 0), alibi=True, sinks=True, softcap=3.0, behind=2, aux=("lse", "max_logit")),
    Case("out_alone", mask=CAUSAL, aux=()), Case("no_row", (0, 0)),
]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)


def borders(lengths):
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def compare(mesh, name, layout, schedule):
    """Return the largest difference of each result and gradient from the one-device call's."""
    case, make, device = BY_NAME[name], torch.Generator().manual_seed(3), mesh.device_type

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64).to(device).requires_grad_()

    def shape_of(sizes):
        return [size or whole for size, whole in zip(sizes, (count, case.hq, *longest), strict=True)]

    lengths_k = case.lengths if case.lengths_k is None else case.lengths_k
    rows, rows_k = sum(case.lengths) + case.behind, sum(lengths_k) + case.behind
    count, longest = len(case.lengths), (max(case.lengths), max(lengths_k))
    given = {"q": normal(rows, case.hq, 8), "k": normal(rows_k, case.hk, 8), "v": normal(rows_k, case.hk, 6),
             "bias": normal(*shape_of(case.bias)) if case.bias else None,
             "alibi_slopes": normal(count, case.hq) if case.alibi else None,
             "sinks": normal(case.hq) if case.sinks else None}
    mask = case.mask
    if case.visible:
        visible = (torch.rand(shape_of(case.visible), generator=make) > 0.3).to(device)
        mask = visible if mask is None else mask & visible
    if case.documents:
        documents = tw.documents(torch.randint(case.documents, (rows,), generator=make).to(device))
        mask = documents if mask is None else mask & documents
    used = [torch.tensor([max(0, length - number % 3) for number, length in enumerate(own)], device=device)
            if case.used else None for own in (case.lengths, lengths_k)]
    options = {"cu_seqlens_q": borders(case.lengths).to(device), "mask": mask,
               "softcap": case.softcap, "return_aux": case.aux,
               "cu_seqlens_k": None if case.lengths_k is None else borders(lengths_k).to(device), "seqused_q": used[0],
               "seqused_k": used[1], "backend": "reference"}
    if case.bias or case.visible:
        options |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    whole = named(tw.attention_varlen(**given, **options))
    gradients = normal(rows, case.hq, 6).detach(), normal(case.hq, rows).detach()
    backward(whole, gradients)
    own = positions(mesh, length=rows, layout=layout)
    parts = {key: None if tensor is None else tensor.detach().clone().requires_grad_() for key, tensor in given.items()}
    shards = dict(parts)
    for key in ("q", "k", "v"):
        shards[key] = shard(parts[key], mesh, dim=0, layout=layout)
    results = named(context_parallel_attention_varlen(
        mesh=mesh, layout=layout, lengths=(rows, rows_k), schedule=schedule, **shards, **options))
    backward(results, (gradients[0][own], gradients[1][:, own]))
    found = {key: largest(result, expected[own] if key == "out" else expected[:, own]) for key, result, expected in zip(
        ("out", "lse", "max_logit"), results, whole, strict=False)}
    for key, part in parts.items():
        if part is not None:
            total = torch.zeros_like(part) if part.grad is None else part.grad.clone()
            dist.all_reduce(total, group=group_of(mesh))
            found[f"d{key}"] = largest(total, given[key].grad)
    return found
