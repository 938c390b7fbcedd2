"""The options of a cell: how they are called, and the tensors of a call that has them."""

from typing import NamedTuple

import torch

from tilewise.bench.grids import Cell
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, make_inputs, make_operands

# By field of a case, in a reader's words.
OPTIONS = {"bias": "bias", "mask_tensor": "boolean mask", "alibi": "ALiBi slopes", "sinks": "sinks",
           "softcap": "softcap", "dropout_p": "dropout", "documents": "documents", "packed": "packed sequences",
           "is_padded": "padded sequences"}
LEARNABLE = ("bias", "alibi_slopes", "sinks")
_OPERANDS = {"bias": "bias", "alibi": "alibi_slopes", "sinks": "sinks"}


class Tensors(NamedTuple):
    """Everything that a cell's call reads, without gradients; a provider makes leaves of what it differentiates."""

    inputs: Inputs
    operands: Operands


def make_tensors(cell: Cell, device: torch.device) -> Tensors:
    """Draw a cell's tensors as the tests do, but leave each query one key of a boolean mask, and share equal lengths.

    The key is that at the query's own place or, of a mask without queries, the first. Libraries agree on what attention
    to nothing gives as little as on its gradient; they are timed where they agree. Where queries and keys are packed
    alike, one tensor says so for both, as in self-attention. ALiBi's slopes are positive, as models have them; what the
    tests draw is negative for every second head.
    """
    operands = make_operands(cell.case, cell.dtype, device)
    if operands.mask is not None:
        operands.mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    if operands.alibi_slopes is not None:
        operands = operands._replace(alibi_slopes=operands.alibi_slopes.abs())
    if cell.case.packed and cell.case.lengths_q == cell.case.lengths_k:
        operands = operands._replace(cu_seqlens_k=operands.cu_seqlens_q, seqlens_k=operands.seqlens_q)
    return Tensors(make_inputs(cell.case, cell.dtype, device), operands)


def options_of(case: Case) -> tuple[str, ...]:
    """Return the fields, of those in :data:`OPTIONS`, that change the case."""
    return tuple(field for field in OPTIONS if getattr(case, field))


def options_text(cell: Cell) -> str:
    """Write the options as a row of results holds them: "bias 1hqk with gradient, softcap 30"; "" for none."""
    case = cell.case
    details = {"bias": f" {case.bias}", "mask_tensor": f" {case.mask_tensor}", "softcap": f" {case.softcap or 0.0:g}",
               "dropout_p": f" {case.dropout_p:g}", "documents": f" {case.documents}",
               "packed": f" of {_tokens(case)} tokens"}
    return ", ".join(OPTIONS[field] + details.get(field, "")
                     + (" with gradient" if _OPERANDS.get(field) in cell.learned else "")
                     for field in options_of(case))


def _tokens(case: Case) -> str:
    (_, queries), (_, keys) = case.stored("q"), case.stored("k")
    return str(queries) if queries == keys else f"{queries}/{keys}"
