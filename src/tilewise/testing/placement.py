"""Where and beside what a call's tensors lie: NaN in all that no pair looks at, strides that a layout never has."""

import torch

from tilewise.scores import Operands
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs

_MEANINGLESS = 1_000_003  # prime, and no multiple of what a vector load or a descriptor counts on
_FAR = 2**31


def plant_nan(case: Case, inputs: Inputs, operands: Operands) -> None:
    """Write NaN, in place, wherever it may stand (maths.md, section 10) and reach no result.

    That is in keys and values that no query sees by position; in queries that see no key by position, and in the
    gradients that arrive there, save at lse where sinks are its value; and in a bias whose every pair is hidden, by
    position or by data.
    """
    visible = case.mask.visible(case.sq, case.sk, inputs.q.device)
    blind, unseen = ~visible.any(-1), ~visible.any(0)
    queries = (inputs.q, inputs.dout) if case.sinks else (inputs.q, inputs.dout, inputs.dlse)
    for tensors, rows in ((queries, blind), ((inputs.k, inputs.v), unseen)):
        for tensor in tensors:
            each_once(tensor)[:, :, rows] = float("nan")
    if operands.bias is not None:
        bias = each_once(operands.bias)
        pairs = visible if operands.mask is None else visible & operands.mask
        seen = pairs.expand(case.b, case.hq, -1, -1)
        for dim in range(4):
            if bias.shape[dim] == 1:
                seen = seen.any(dim, keepdim=True)
        bias.masked_fill_(~seen, float("nan"))


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """View what lies in memory, each element once: an expanded dim shrinks to its one index."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def with_meaningless_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a large odd stride in each dim of size 1, where a stride moves nothing."""
    strides = [_MEANINGLESS if size == 1 else stride
               for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def far_apart(tensors: tuple[torch.Tensor, ...], dim: int) -> tuple[torch.Tensor, ...]:
    """Return equal tensors of one storage in which the longest's last index of ``dim`` is 2³¹ elements or more away.

    Little of the storage is written, so that on a CPU little of it takes memory; on a GPU it is 2³¹ elements. Where no
    tensor has two indices there, all is returned as it was.

    Args:
        tensors: of one dtype, on one device; together much smaller than 2³¹ elements.
        dim: along which they are spread.
    """
    longest = max(tensor.shape[dim] for tensor in tensors)
    if longest < 2:
        return tensors
    step = -(-_FAR // (longest - 1))
    step += -step % 16  # aligned as rows of whole heads are, which a descriptor may ask for
    first, *_ = tensors
    insides = [tensor.numel() // max(1, tensor.shape[dim]) for tensor in tensors]
    elements = step * (longest - 1) + 16 * len(tensors) + sum(insides)
    storage = torch.empty(0, dtype=first.dtype, device=first.device).untyped_storage()
    storage.resize_(elements * first.element_size())
    placed, start = [], 0
    for tensor, inside in zip(tensors, insides, strict=True):
        dense = torch.empty(tensor.select(dim, 0).shape, device="meta").stride() if tensor.shape[dim] else (1,) * 3
        strides = (*dense[:dim], step, *dense[dim:])
        lane = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, start, tensor.shape, strides)
        placed.append(lane.copy_(tensor))
        start += inside + -inside % 16
    return tuple(placed)
