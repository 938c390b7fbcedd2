"""Whether the Hopper kernels can inline a score function of the user's: the compiler is asked, with a small kernel.

They are written in Gluon, where each tile has a layout. What is done to tiles pair by pair has that of its arguments.
What Triton makes of nothing, as tl.arange and tl.full do, has none, and of some things only the compiler knows.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.errors import TritonError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from tilewise.functions import FunctionCode
from tilewise.kernels.hopper.alibi import as_pairs
from tilewise.kernels.hopper.arguments import FirstPair, MaskBounds
from tilewise.kernels.hopper.compat import GluonASTSource
from tilewise.kernels.hopper.launch import OPTIONS
from tilewise.kernels.hopper.score_functions import (
    HeadPlace,
    as_tile,
    function_arguments,
    function_of_pairs,
    gradient_of_pairs,
)
from tilewise.support.caches import registered

_TARGET = GPUTarget("cuda", 90, 32)
_POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
             torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.bool: "*i1", torch.uint8: "*u8",
             torch.uint16: "*u16", torch.uint32: "*u32", torch.uint64: "*u64", torch.int8: "*i8", torch.int16: "*i16",
             torch.int32: "*i32", torch.int64: "*i64"}


@gluon.jit
def inlining_kernel(out_ptr, tensors, FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr, KEYS_FIRST: gl.constexpr,
                    INT64: gl.constexpr):
    """Call a score function as the forward kernel does, or where KEYS_FIRST it and its derivative as the backward."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    scores = gl.full([64, 64], 0.0, gl.float32, layout=LAYOUT)
    bounds = MaskBounds(64, 64, 0, 0)
    place = HeadPlace(gl.program_id(0), gl.program_id(1), tensors, FirstPair(0, 0))
    arguments = function_arguments(scores, (gl.program_id(2), 0), place, bounds, KEYS_FIRST, True, INT64)
    made = as_tile(function_of_pairs(as_pairs(scores), arguments, tensors, FUNCTION), scores)
    if KEYS_FIRST and DERIVATIVE is not None:
        made += as_tile(gradient_of_pairs(as_pairs(scores), as_pairs(scores), arguments, tensors, DERIVATIVE), scores)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    gl.store((out_ptr + rows * 64)[:, None] + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :], made)


@registered
@lru_cache(maxsize=256)
def why_not_inlined(code: FunctionCode, dtypes: tuple[torch.dtype, ...], *, backward: bool, int64: bool) -> str | None:
    """Return why a score function that has a Triton function is not inlined, None if it is.

    Args:
        code: the function.
        dtypes: of its tensors.
        backward: whether in the backward pass, and so its derivative, too.
        int64: whether positions have 64 bits.
    """
    derivative = code.derivative if backward else None
    for function in (code.triton, derivative):
        if function is not None and not isinstance(function, JITFunction):
            return f"needs score functions that Triton compiles, got {code.name}, a {type(function).__name__}"
    unknown = [dtype for dtype in dtypes if dtype not in _POINTERS]
    if unknown:
        return f"needs score functions that read numbers which Triton has, got {code.name}, which reads {unknown[0]}"
    source = GluonASTSource(
        inlining_kernel,
        {"out_ptr": "*fp32", "tensors": tuple([_POINTERS[dtype] for dtype in dtypes]),
         **dict.fromkeys(("FUNCTION", "DERIVATIVE", "KEYS_FIRST", "INT64"), "constexpr")},
        {"FUNCTION": code.triton, "DERIVATIVE": derivative, "KEYS_FIRST": backward, "INT64": int64})
    try:
        triton.compile(source, target=_TARGET, options=OPTIONS)
    except (TritonError, RuntimeError) as error:  # of a pass of the compiler's a RuntimeError, without a line
        found = f"of which it does not compile {_line_of(error)}" if isinstance(error, CompilationError) else (
            f"of which it says {str(error).strip().splitlines()[0]}")
        return f"needs score functions that Gluon compiles, got {code.name}, {found}; backend='triton' may compile it"
    return None


def _line_of(error: Any) -> str:
    """Return the line that an error of the compiler's is about: of errors that caused one another, the first one's."""
    while isinstance(error.__cause__, CompilationError):
        error = error.__cause__
    lines = (error.src or "").split("\n")
    number = getattr(error.node, "lineno", 0)
    return f"'{lines[number - 1].strip()}'"
