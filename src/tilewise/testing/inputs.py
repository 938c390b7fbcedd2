"""Make the tensors of a case: seeded, laid out as the case says, hostile where it says so.

=============  ====================================================================================
layout         how q, k, v (dims b, h, s, d) lie in memory
=============  ====================================================================================
``bhsd``       as the dims read
``bshd``       a transposed view of (b, s, h, d) storage; so ``sbhd``, ``shbd``, ``hbsd`` and ``hsbd`` of theirs
``bhds``       a transposed view of (b, h, d, s) storage: the last dim's stride is not 1
``packed_qkv`` slices of one (b, s, hq + 2·hk, d) tensor; q, k and v share storage
``packed_kv``  k and v are slices of one (b, sk, 2, hk, d) tensor; q as ``bshd``
``expanded``   stride 0: q and dout over the batch, k and v over the heads
``moat``       inside a larger buffer, with NaN before, between and behind the rows of every dim
=============  ====================================================================================

Bias and boolean mask follow their case's layout; of ``expanded`` ones, the batch has stride 0. Slopes and sinks have
NaN between their elements where the layout is ``bhds`` or ``moat``. Where lengths are data, padding is NaN in a
``moat``; packed sequences are stored as one batch entry.

Numbers are hostile too: :data:`HOSTILE_NUMBERS` names what makes a softmax's rows sharp.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidInput
from tilewise.masks import Mask, TensorMask, documents
from tilewise.masks.document_ranges import Documents
from tilewise.problem.options import NO_OPERANDS, Operands
from tilewise.testing.cases import Case, Layout

# Added to the seed, so that operands are not the inputs' numbers again; a generator heeds the low 32 bits alone.
_OPERAND_STREAM = 2**31

class Inputs(NamedTuple):
    """The tensors of one call: q, k, v and the gradients that arrive at out and at lse.

    Of packed sequences b is 1, and sq and sk are all stored positions.

    Attributes:
        q: (b, hq, sq, d).
        k: (b, hk, sk, d).
        v: (b, hk, sk, dv).
        dout: (b, hq, sq, dv), in the dtype of q.
        dlse: (b, hq, sq), float32 (float64 for float64 inputs).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


class Numbers(NamedTuple):
    """What is done to drawn numbers; the default changes nothing.

    Attributes:
        factor: q is multiplied by it, and all scores with it.
        mean: is added to k and v. All keys then have something in common, and out is far from 0.
        sink: how far the score of the first key is raised above the others, in powers of e; the first column of q and k
            is given away for it. With the scale 1/sqrt(d).
    """

    factor: float = 1.0
    mean: float = 0.0
    sink: float = 0.0


# By how much a row's largest probability outweighs the others decides what the rounding of one alone costs, and by how
# much keys have a part in common what a gradient loses that is a small difference of large sums.
HOSTILE_NUMBERS = {
    "sharp": Numbers(factor=8.0), "peaked": Numbers(factor=20.0), "offset": Numbers(mean=3.0),
    "sharp_offset": Numbers(factor=8.0, mean=3.0), "peaked_offset": Numbers(factor=20.0, mean=2.0),
    "sink": Numbers(sink=8.0), "sink_offset": Numbers(mean=3.0, sink=8.0)}


def with_numbers(inputs: Inputs, numbers: Numbers) -> Inputs:
    """Return the inputs with other numbers, in memory of their own.

    >>> from tilewise.testing.cases import case_named
    >>> inputs = make_inputs(case_named("mha"), torch.float32, "cpu")
    >>> torch.equal(with_numbers(inputs, HOSTILE_NUMBERS["sharp"]).q, 8 * inputs.q)
    True
    """
    q, k, v = inputs.q * numbers.factor, inputs.k + numbers.mean, inputs.v + numbers.mean
    if numbers.sink:
        q[..., 0], k[..., 0] = q.shape[-1] ** 0.5, 0.0
        k[:, :, :1, 0] = numbers.sink
    return inputs._replace(q=q, k=k, v=v)


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0, *,
                requires_grad: bool = False) -> Inputs:
    """Draw the case's tensors from a standard normal distribution.

    Drawn on the CPU from a generator of its own, so that a seed means the same numbers on every device and no
    global state is touched. With ``requires_grad``, q, k and v are leaves.

    >>> from tilewise.testing.cases import case_named
    >>> make_inputs(case_named("gqa"), torch.float16, "cpu").k.shape
    torch.Size([1, 2, 97, 64])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    hq, hk, d, dv = case.hq, case.hk, case.d, case.dv
    (b, sq), (_, sk) = case.stored("q"), case.stored("k")
    if case.layout == "packed_qkv":
        packed = draw(b, sq, hq + 2 * hk, d).transpose(1, 2)
        q, k, v = (packed[:, start:stop] for start, stop in ((0, hq), (hq, hq + hk), (hq + hk, hq + 2 * hk)))
    elif case.layout == "packed_kv":
        q = lay_out(draw(b, hq, sq, d), "bshd")
        k, v = draw(b, sk, 2, hk, d).permute(2, 0, 3, 1, 4)
    elif case.layout == "expanded":
        q = draw(1, hq, sq, d).expand(b, -1, -1, -1)
        k, v = (draw(b, 1, sk, dim).expand(-1, hk, -1, -1) for dim in (d, dv))
    else:
        q, k, v = (lay_out(draw(*shape), case.layout)
                   for shape in ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv)))
    if case.layout == "expanded":
        dout = draw(1, hq, sq, dv).expand(b, -1, -1, -1)
    else:
        dout = lay_out(draw(b, hq, sq, dv), "bshd" if case.layout.startswith("packed") else case.layout)
    dlse = draw(b, hq, sq).to(torch.float64 if dtype is torch.float64 else torch.float32)
    dlse = lay_out(dlse, "moat") if case.layout == "moat" else dlse
    if case.layout == "moat" and case.has_lengths:
        for tensor, padding in zip((q, k, v, dout, dlse), (padding_of(case, side, device) for side in "qkkqq"),
                                   strict=True):
            tensor.transpose(1, 2)[padding] = float("nan")
    if requires_grad:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    return Inputs(q, k, v, dout, dlse)


def padding_of(case: Case, side: str, device: torch.device | str) -> torch.Tensor:
    """Return which stored queries ("q") or keys ("k") take no part: (b, s), bool."""
    batch, positions = case.stored(side)
    padding = torch.ones(batch, positions, dtype=torch.bool, device=device)
    for number, span in enumerate(case.spans(side)):
        padding[0 if case.packed else number, span.start:span.stop] = False
    return padding


def make_operands(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0, *,
                  requires_grad: bool = False) -> Operands:
    """Draw the case's bias, slopes, boolean mask, sinks, dropout seed and documents, as :func:`make_inputs` draws.

    A mask hides about a third of the pairs and every fifth row wholly; its values do not depend on the dtype. Every
    second head has a negative slope. With
    ``requires_grad``, bias, slopes and sinks are leaves. On the device "meta" nothing is drawn or allocated.

    >>> from tilewise.testing.cases import case_named
    >>> make_operands(case_named("bias_of_keys"), torch.float16, "cpu").bias.shape
    torch.Size([2, 1, 1, 40])
    """
    if not case.has_options:
        return NO_OPERANDS
    generator = torch.Generator().manual_seed(seed + _OPERAND_STREAM)
    source = "meta" if torch.device(device).type == "meta" else "cpu"
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    own = dtype if case.operand_dtype == "same" else wide
    bias = slopes = mask = sinks = drawn_seed = None
    if case.bias:
        values = torch.randn(_broadcast_shape(case, case.bias), generator=generator, device=source)
        bias = _lay_out_operand(values.to(device=device, dtype=own), case, case.bias)
    if case.alibi:
        batches = case.b if case.alibi == "bh" else 1
        values = 0.02 + 0.3 * torch.rand(batches, case.hq, generator=generator, device=source)
        values[:, 1::2] *= -0.1  # of a trained slope the sign may change
        slopes = _spread(values.to(device=device, dtype=wide), case)
    if case.mask_tensor:
        mask = _lay_out_operand(_draw_mask(case, generator, source).to(device), case, case.mask_tensor)
    if case.sinks:
        values = torch.randn(case.hq, generator=generator, device=source)
        sinks = _spread(values.to(device=device, dtype=own), case)
    if case.dropout_p:
        drawn_seed = torch.randint(2**62, (1,), generator=generator, device=source).to(device)
    if requires_grad:
        bias, slopes, sinks = (t if t is None else t.detach().requires_grad_() for t in (bias, slopes, sinks))
    ids = _draw_documents(case, generator, device)
    documents_q, documents_k = (None, None) if ids is None else ids
    cu_q, cu_k, used_q, used_k = _lengths(case, device)
    return Operands(bias, slopes, mask, sinks, drawn_seed, cu_q, cu_k, used_q, used_k, documents_q, documents_k)


def call_options(case: Case, operands: Operands) -> dict[str, Any]:
    """Return the keyword arguments that make a call this case's: of attention, or of attention_varlen if packed."""
    mask: Mask | TensorMask = case.mask
    together = (None if operands.documents_q is None or operands.documents_k is None else
                Documents(operands.documents_q, operands.documents_k))
    if operands.mask is not None or together is not None:
        mask = TensorMask(case.mask, operands.mask, together)
    options = {"mask": mask, "scale": case.scale, "bias": operands.bias, "alibi_slopes": operands.alibi_slopes,
               "sinks": operands.sinks, "softcap": case.softcap, "dropout_p": case.dropout_p,
               "dropout_seed": operands.seed}
    if not case.packed:
        return options | {"seqlens_q": operands.seqlens_q, "seqlens_k": operands.seqlens_k}
    return options | {"cu_seqlens_q": operands.cu_seqlens_q, "cu_seqlens_k": operands.cu_seqlens_k,
                      "seqused_q": operands.seqlens_q, "seqused_k": operands.seqlens_k,
                      "max_seqlen_q": case.sq, "max_seqlen_k": case.sk}


def call(case: Case, tensors: Sequence[torch.Tensor], operands: Operands, **options: Any) -> Any:
    """Make the case's call on its q, k and v: attention, or attention_varlen if packed.

    Args:
        case: the case.
        tensors: q, k and v as :func:`make_inputs` lays them out; of packed sequences, too, (1, h, total, d).
        operands: those of :func:`make_operands`.
        options: return_aux, deterministic and backend, as the two take them.

    Returns:
        What the two return, shaped as the tensors are.
    """
    q, k, v = tensors
    if not case.packed:
        return attention(q, k, v, **call_options(case, operands), **options)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (q, k, v))
    got = attention_varlen(q, k, v, **call_options(case, operands), **options)
    if isinstance(got, torch.Tensor):
        return got.transpose(0, 1)[None]
    return type(got)(got.out.transpose(0, 1)[None], *(rows[None] for rows in got[1:]))


def _lengths(case: Case, device: torch.device | str) -> tuple[torch.Tensor | None, ...]:
    """Return cu_seqlens_q, cu_seqlens_k, seqlens_q and seqlens_k: integers of 32 bits of queries, and 64 of keys."""
    borders: list[torch.Tensor | None] = []
    used: list[torch.Tensor | None] = []
    for side, lengths, dtype in (("q", case.lengths_q, torch.int32), ("k", case.lengths_k, torch.int64)):
        starts = [span.start for span in case.spans(side)]
        # Four rows are behind the last sequence's; where there is none, all are.
        end = case.stored(side)[1] - (4 if case.packed == "gaps" else 0) if starts else 0
        borders.append(torch.tensor([*starts, end], dtype=dtype, device=device) if case.packed else None)
        used.append(None if lengths is None or case.packed == "tight" else
                    torch.tensor(lengths, dtype=dtype, device=device))
    return *borders, *used


def _draw_documents(case: Case, generator: torch.Generator, device: torch.device | str) -> Documents | None:
    if not case.documents:
        return None
    ids = []
    for side in ("q", "k"):
        batch, positions = case.stored(side)
        if case.documents == "mixed":
            drawn = torch.tensor([[number for number, span in enumerate(spans) for _ in range(len(span))]
                                  for spans in case.document_spans(side)], dtype=torch.int64).reshape(batch, positions)
        elif case.documents == "runs":
            drawn = torch.randint(-2, 4, (batch, positions), generator=generator).sort(-1, descending=True)[0]
        else:
            drawn = torch.arange(positions) % 3
        ids.append(drawn.to(device))
    return documents(*ids).documents


def _broadcast_shape(case: Case, pattern: str) -> tuple[int, ...]:
    """Sizes of an operand whose dims the pattern names; of an expanded one, before it is expanded over the batch."""
    sizes = {"b": 1 if case.layout == "expanded" else case.b, "h": case.hq, "q": case.sq, "k": case.sk, "1": 1}
    return tuple(sizes[letter] for letter in pattern)


def _draw_mask(case: Case, generator: torch.Generator, source: str) -> torch.Tensor:
    shape = _broadcast_shape(case, case.mask_tensor)
    rows = torch.arange(math.prod(shape[:-1]), device=source).reshape(*shape[:-1], 1)
    return (torch.rand(shape, generator=generator, device=source) > 0.3) & (rows % 5 != 3)


def _lay_out_operand(tensor: torch.Tensor, case: Case, pattern: str) -> torch.Tensor:
    if case.layout == "expanded":
        return tensor.expand(case.b if pattern[0] == "b" else 1, -1, -1, -1)
    return lay_out(tensor, case.layout if case.layout in ("bshd", "bhds", "moat") else "bhsd")


def _spread(values: torch.Tensor, case: Case) -> torch.Tensor:
    return torch.stack([values, values * float("nan")], -1)[..., 0] if case.layout in ("bhds", "moat") else values


def lay_out(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor equal to ``values`` that lies in memory as ``layout`` says.

    Only the layouts that one tensor can have by itself ("moat", and those named by an order of dims); the others tie
    tensors together and are made by :func:`make_inputs`.

    Raises:
        InvalidInput: the layout ties tensors together.
    """
    if layout == "moat":
        moat = values.new_full([size + 2 for size in values.shape], float("nan"))
        inside = moat[(slice(1, -1),) * values.dim()]
        return inside.copy_(values)
    if set(layout) == set("bhsd"):
        return values.permute(["bhsd".index(dim) for dim in layout]).contiguous().permute(
            [layout.index(dim) for dim in "bhsd"])
    raise InvalidInput(f"lay_out: layout is {layout!r}; allowed are 'moat' and the orders of dims: 'bhsd', 'bshd', "
                       "'bhds', 'sbhd', 'shbd', 'hbsd', 'hsbd'.")
