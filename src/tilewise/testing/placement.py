"""Where and beside what a call's tensors lie: NaN in all that no pair looks at, strides that a layout never has."""

import torch

from tilewise.problem.options import Operands
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, padding_of
from tilewise.testing.oracle import visible_pairs

_MEANINGLESS = 1_000_003  # prime, and no multiple of what a vector load or a descriptor counts on
_FAR = 2**31


def plant_nan(case: Case, inputs: Inputs, operands: Operands) -> None:
    """Write NaN, in place, wherever it may stand (maths.md, section 10) and reach no result.

    That is in padding; in keys and values that no query sees by position; in queries that see no key by position, and
    in the gradients that arrive there, save at lse where sinks are its value; and in a bias whose every pair is
    hidden, by position or by data, or is none.
    """
    blind, unseen = _hidden_by_position(case, inputs.q.device)
    blind_lse = padding_of(case, "q", inputs.q.device) if case.sinks else blind
    for tensor, rows in zip(inputs, (blind, unseen, unseen, blind, blind_lse), strict=True):
        stored = each_once(tensor).transpose(1, 2)
        # An entry that stands for all of the batch is hidden where it is so for each.
        stored[rows if len(stored) == len(rows) else rows.all(0, keepdim=True)] = float("nan")
    if operands.bias is not None:
        bias = each_once(operands.bias)
        seen = visible_pairs(inputs.q, inputs.k, case.mask, operands).expand(case.b, case.hq, -1, -1)
        for dim in range(4):
            if bias.shape[dim] == 1:
                seen = seen.any(dim, keepdim=True)
        bias.masked_fill_(~seen, float("nan"))


def _hidden_by_position(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which stored queries see no key, and which keys no query sees, (b, s) each; padding is both."""
    blind, unseen = (padding_of(case, side, device) for side in "qk")
    for number, (queries, keys) in enumerate(zip(case.spans("q"), case.spans("k"), strict=True)):
        entry, visible = 0 if case.packed else number, case.mask.visible(len(queries), len(keys), device)
        blind[entry, queries.start:queries.stop] = ~visible.any(-1)
        unseen[entry, keys.start:keys.stop] = ~visible.any(0)
    return blind, unseen


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
