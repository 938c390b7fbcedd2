"""Which tokens belong together, from an id a token: the numbers and the ranges that kernels read.

All of it is sorting and searching on the ids' device; nothing is waited for.
"""

from typing import NamedTuple

import torch

from tilewise.validate.tensors import check_key_ids, checked_ids


class Documents(NamedTuple):
    """Which tokens belong together, in the form that kernels read; made by :func:`documents_of`.

    Attributes:
        q: (b|1, 4, sq), int32; of each query its document's number, the first and one past the last key of that
            document, and once more the first key, or sk where keys of other documents lie between these two.
        k: (b|1, 4, sk), int32; the same of each key, with first and last query.
    """

    q: torch.Tensor
    k: torch.Tensor


def documents_of(ids: torch.Tensor, key_ids: torch.Tensor | None) -> Documents:
    """Number the documents and find where each one's tokens lie; arguments and errors of tilewise.masks.documents."""
    queries = checked_ids("ids", ids)
    keys = queries if key_ids is None else checked_ids("key_ids", key_ids)
    batch = len(keys) if len(queries) == 1 else len(queries)  # one set of ids may serve the whole batch
    check_key_ids(queries, keys)
    queries, keys = (part.expand(batch, -1) for part in (queries, keys))
    numbers, stop, *_ = _ranks(queries, keys)
    own, *_ = _ranks(keys, keys)
    return Documents(
        torch.stack((torch.where(stop > numbers, numbers, -1), *_extents(queries, keys)), 1).int(),
        torch.stack((own, *_extents(keys, queries)), 1).int())


def _ranks(ids: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each id begins and ends among the sorted ids of the others, and what order sorted them. (b, s) each."""
    in_order, order = others.sort(stable=True, dim=-1)
    ids = ids.contiguous()
    return (torch.searchsorted(in_order, ids), torch.searchsorted(in_order, ids, right=True), order)


def _extents(ids: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each id the first and one past the last of the others that have it, and the first again if none is between.

    Where none of the others has the id, first and last are len(others) and 0.
    """
    begin, end, order = _ranks(ids, others)
    length = others.shape[-1]
    if length == 0:
        return torch.zeros_like(ids), torch.zeros_like(ids), torch.zeros_like(ids)
    is_there = end > begin
    first = torch.where(is_there, order.gather(-1, begin.clamp(max=length - 1)), length)
    stop = torch.where(is_there, order.gather(-1, (end - 1).clamp(min=0)) + 1, 0)
    return first, stop, torch.where(stop - first == end - begin, first, length)
