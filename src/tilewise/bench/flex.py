"""torch's FlexAttention, its options written as the functions that it asks for."""

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from tilewise.bench.grids import Cell
from tilewise.bench.options import LEARNABLE, OPTIONS, options_of
from tilewise.bench.packed import sequence_numbers, why_not_positions
from tilewise.bench.providers import Attend, Provider
from tilewise.bench.roofline import Direction
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case

_Lookup = Callable[..., torch.Tensor]


class FlexProvider(Provider):
    """FlexAttention, compiled in its default mode, the masks as a block mask; packed sequences are its documents."""

    name = "flex"
    options = frozenset(OPTIONS) - {"dropout_p", "is_padded"}
    gradients = frozenset(LEARNABLE)

    def missing(self, device: torch.device) -> str | None:
        """Refuse the CPU."""
        if device.type != "cuda":
            return "FlexAttention has no backward on the CPU, and its forward compiles for tens of seconds"
        return None

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse packed sequences that documents of one batch entry cannot say."""
        if not cell.case.packed:
            return None
        if options_of(cell.case) != ("packed",):
            return "takes packed sequences without another option"
        return why_not_positions(cell.case, "")

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Compile for this shape, the mask's block structure worked out beforehand."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Its backward frees buffers that a second backward over the same graph, as it is timed here, reads again.
        functorch_config: Any = importlib.import_module("torch._functorch.config")
        functorch_config.donated_buffer = False
        # A shape more is a compilation more of the same function; past a limit torch would stop compiling.
        importlib.import_module("torch._dynamo").reset()
        case, sinks = cell.case, operands.sinks
        function: Any = flex_attention if sinks is None else attend_with_sinks
        compiled: Any = torch.compile(function, dynamic=False)
        block_mask, ids = None, _document_ids(case, operands)
        if case.mask.is_bounded or operands.mask is not None or ids is not None:
            entries, heads = (1, 1) if operands.mask is None else operands.mask.shape[:2]
            entries = max(entries, 1 if ids is None else len(ids[0]))
            b, h = (None if size == 1 else size for size in (entries, heads))
            (_, sq), (_, sk) = case.stored("q"), case.stored("k")
            block_mask = create_block_mask(_mask_function(case, operands.mask, ids), b, h, sq, sk, device=str(device))
        score_mod, more = _score_function(case, operands), {} if sinks is None else {"sinks": sinks}

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=case.scale,
                                               enable_gqa=case.hq != case.hk, **more))

        return attend


def attend_with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor,
                      **options: Any) -> torch.Tensor:
    """Call FlexAttention and shrink its rows to what is left of them beside the sinks, by their lse."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    function: Any = flex_attention  # its overloads know no options by dict
    out, aux = function(q, k, v, **options, return_aux=AuxRequest(lse=True))
    attended: torch.Tensor = (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)
    return attended


def _score_function(case: Case, operands: Operands) -> Any:
    """Return what a scaled score becomes, in the order of problem/options.py, or None where it stays."""
    softcap, bias, slopes = case.softcap, operands.bias, operands.alibi_slopes
    if softcap is None and bias is None and slopes is None:
        return None
    bias_at, slope_at = (None if tensor is None else _lookup(tensor) for tensor in (bias, slopes))
    offset = 0 if slopes is None else case.mask.offset(case.sq, case.sk)

    def changed(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor,
                j: torch.Tensor) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias_at is not None:
            score = score + bias_at(b, h, i, j)
        if slope_at is not None:
            score = score - slope_at(b, h) * (i + offset - j).abs()
        return score

    return changed


def _document_ids(case: Case, operands: Operands) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the documents of queries and keys, (b|1, s) each, or None."""
    if operands.documents_q is not None and operands.documents_k is not None:
        return operands.documents_q[:, 0].contiguous(), operands.documents_k[:, 0].contiguous()
    if operands.cu_seqlens_q is not None and operands.cu_seqlens_k is not None:
        return sequence_numbers(operands.cu_seqlens_q)[None], sequence_numbers(operands.cu_seqlens_k)[None]
    return None


def _mask_function(case: Case, mask: torch.Tensor | None, ids: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    band = case.mask.band(case.sq, case.sk)
    visible_at = None if mask is None else _lookup(mask)
    id_of_query, id_of_key = (None, None) if ids is None else map(_lookup, ids)

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = torch.ones_like(j, dtype=torch.bool)
        if band.lower is not None:
            seen = seen & ((j - i >= band.lower) | (j < (band.sink_tokens or 0)))
        if band.upper is not None:
            seen = seen & ((j - i <= band.upper) | (j < (band.prefix or 0)))
        if band.chunk is not None:
            seen = seen & ((i + band.offset) // band.chunk == j // band.chunk)
        if visible_at is not None:
            seen = seen & visible_at(b, h, i, j)
        if id_of_query is not None and id_of_key is not None:
            seen = seen & (id_of_query(b, i) == id_of_key(b, j))
        return seen

    return visible


def _lookup(tensor: torch.Tensor) -> _Lookup:
    """Return a function of one index a dim, all of them tensors, 0 too: by such FlexAttention adds up gradients."""
    steps = [int(size > 1) for size in tensor.shape]
    return lambda *index: tensor[tuple(index[dim] * step for dim, step in enumerate(steps))]
