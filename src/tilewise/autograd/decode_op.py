"""The op boundary of decoding: one opaque node of a compiled graph, which changes its caches. It has no gradient."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from tilewise import settings
from tilewise.autograd.transforms import entry_by_entry, refuse_tangents, tensors_in
from tilewise.dispatch import Decoder, choose_decoder
from tilewise.errors import InvalidInput
from tilewise.masks import Mask
from tilewise.problem.decode import (
    CacheOperands,
    DecodeOptions,
    DecodeProblem,
    decode_problem,
    specs_of_inputs,
    specs_of_present,
)
from tilewise.problem.length_checks import check_cache
from tilewise.problem.options import OperatorOptions, schema_of
from tilewise.support.caches import registered
from tilewise.validate.tensors import SpecKey

_NUMBERS = ", ".join((schema_of(OperatorOptions, ("left", "right", "alignment")),
                      schema_of(DecodeOptions, DecodeOptions._fields[1:]), schema_of(OperatorOptions, ("backend",))))
torch.library.define("tilewise::attention_decode",
                     f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {schema_of(CacheOperands)}, {_NUMBERS}) -> "
                     "(Tensor, Tensor)")
_N_OPERANDS = len(CacheOperands._fields)
NAMES = ("q", "k_cache", "v_cache", *CacheOperands._fields)


def run_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, operands: CacheOperands,
               options: DecodeOptions, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse; k and v are appended to the caches.

    Raises:
        UnsupportedProblem: forward mode.
    """
    if forward_ad._current_level >= 0:
        refuse_tangents((q, k_cache, v_cache, *operands), "Decoding has no derivative.")
    mask = options.mask
    out, lse = torch.ops.tilewise.attention_decode(q, k_cache, v_cache, *operands, mask.left, mask.right,
                                                   mask.alignment, *options[1:], backend)
    return out, lse


def refuse_gradient(named: Iterable[tuple[str, Any]]) -> None:
    """Refuse a tensor that needs a gradient.

    Raises:
        InvalidInput: gradients are enabled, and one does; names it.
    """
    for name, tensor in named if torch.is_grad_enabled() else ():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise InvalidInput(f"{name} requires a gradient, and decoding has no backward pass; call it under "
                               "torch.no_grad(), or attention() without a cache.")


def _options(numbers: tuple[Any, ...]) -> DecodeOptions:
    left, right, alignment, *rest = numbers
    return DecodeOptions(Mask(left, right, alignment), *rest)


@registered
@lru_cache(maxsize=4096)
def _resolve(specs: tuple[SpecKey, SpecKey, SpecKey], more: tuple[SpecKey, ...], numbers: tuple[Any, ...],
             backend: str | None) -> tuple[DecodeProblem, Decoder]:
    """Problem and decoder of a call: one look-up on the way to a kernel."""
    problem = decode_problem(specs, more, _options(numbers))
    return problem, choose_decoder(problem, backend)


def _decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
            *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands = CacheOperands(*rest[:_N_OPERANDS])
    problem, decoder = _resolve(specs_of_inputs(q, k_cache, v_cache), specs_of_present(operands),
                                rest[_N_OPERANDS:-1], rest[-1] or settings.default_backend())
    check_cache(problem, len(k_cache), operands)
    made = decoder.decode(problem, q, k_cache, v_cache, operands)
    if problem.new:  # written by kernels that autograd does not see: a graph that has saved the caches must raise
        for cache in (k_cache, v_cache):
            if not cache.is_inference():
                increment_version(cache)
    return made


def _fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Symbolic sizes of a traced call cannot be hashed; there the checks alone matter.
    problem = decode_problem(specs_of_inputs(q, k_cache, v_cache), specs_of_present(CacheOperands(*rest[:_N_OPERANDS])),
                             _options(rest[_N_OPERANDS:-1]))
    rows = (problem.b, problem.hq, problem.sq)
    return (q.new_empty_strided((*rows, problem.dv), problem.out_strides),
            q.new_empty(rows, dtype=problem.lse_dtype))


torch.library.impl("tilewise::attention_decode", "CompositeExplicitAutograd")(_decode)
torch.library.register_fake("tilewise::attention_decode")(_fake)
_op = torch.ops.tilewise.attention_decode.default


def _decode_entry(*arguments: Any) -> Any:
    """Decode for one entry of torch.func.vmap, outside of which alone it is seen who needs a derivative."""
    tensors = tensors_in(arguments)
    refuse_gradient(zip(NAMES, arguments, strict=False))
    if forward_ad._current_level >= 0:
        refuse_tangents(tensors, "Decoding has no derivative.")
    return _op(*arguments)


_by_entry = entry_by_entry(_decode_entry)


def _mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[torch.Tensor], list[int]]:
    """The rule of torch.func.vmap: a call for each entry, each with caches of its own where keys are appended."""
    if arguments[NAMES.index("k")] is not None:
        for name, cache, dim in zip(NAMES[1:3], arguments[1:3], in_dims[1:3], strict=True):
            if dim is None or (cache.stride(dim) == 0 and info.batch_size > 1):
                raise InvalidInput(f"{name} is one for all entries of torch.func.vmap, each of which would append to "
                                   f"it; allowed is one for each entry: map {name} too, in memory of its own, or "
                                   "append before.")
    return _by_entry(info, in_dims, *arguments)


torch.library.register_vmap("tilewise::attention_decode", _mapped)
