"""What the backends cuda and cuda_ieee share: the float32 kernels of kernels/cuda, by two kinds of product."""

import contextlib
from functools import lru_cache
from typing import ClassVar, cast

import torch

from tilewise.backends._support.current import allows_tf32, is_current
from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.kernels.cuda.call import UNBOUNDED, Call, Tensor
from tilewise.kernels.cuda.config import KEY_TILE, PAD, SUMS_OVER_QUERIES, WIDEST, CudaConfig, padded_dims
from tilewise.kernels.cuda.program import Program, lacking, load
from tilewise.problem import AttentionProblem, are_aligned, dense_strides
from tilewise.problem.options import NO_OPERANDS, NO_OPTIONS, Operands
from tilewise.support.caches import registered
from tilewise.tuning.device import DeviceSpec, device_spec
from tilewise.tuning.select import CUDA_DELTA, CUDA_SPLIT, backward_kernels, cuda_config

_EVERY = Needs()


class Float32Backend:
    """Forward, delta, dK/dV and dQ kernels without atomics, or one that makes every gradient (``backward_kernels``).

    All but that one's dq is the same on every run; with ``deterministic`` all is.

    Attributes:
        name: of the backend.
        tensor_cores: whether products are made of three products of scaled halves on tensor cores, or of one of TF32
            where torch's own setting allows that; else on FMA pipes, each product and sum rounded once.
    """

    name: ClassVar[str]
    tensor_cores: ClassVar[bool]

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return the reason against, if there is one."""
        return self._wrong_machine(problem) or _wrong_problem(problem) or self._too_large(problem)

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        shape = (problem.b, problem.hq, problem.sq, problem.dv)
        out = torch.empty_strided(shape, problem.out_strides, dtype=problem.dtype, device=problem.device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=problem.device)
        if problem.is_empty or not problem.sk:  # lengths that are data say nothing of keys that are not there
            return Results(out.zero_(), lse.fill_(float("-inf")))
        call = Call.of(problem, q=q, k=k, v=v, out=out, lse=lse, **_lengths(operands))
        vectors = _takes_vectors(q, k, v)
        with contextlib.nullcontext() if is_current(problem.device) else torch.cuda.device(problem.device):
            _launch("forward", problem, call, self.products, vectors)
        return Results(out, lse)

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = _EVERY) -> Gradients:
        """See :class:`tilewise.backends.base.Backend`."""
        q, k, v, out, lse, operands = saved
        dq = _empty_like(q) if needs.dq else None
        dk, dv = (_empty_like(k), _empty_like(v)) if needs.dkv else (None, None)
        if problem.is_empty or not problem.sk:  # lengths that are data say nothing of keys that are not there
            return Gradients(*(None if gradient is None else gradient.zero_() for gradient in (dq, dk, dv)))
        products = self.products
        kernels = backward_kernels(problem, products, dq=needs.dq, dkv=needs.dkv)
        if dq is not None and "dq" not in kernels:  # another adds to it
            dq.zero_()
        delta = torch.empty_like(lse)
        call = Call.of(problem, q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv, dlse=dlse, lse=lse, delta=delta,
                       **_lengths(operands))
        vectors = _takes_vectors(q, k, v, dout)
        with contextlib.nullcontext() if is_current(problem.device) else torch.cuda.device(problem.device):
            for kernel in ("delta", *kernels):
                _launch(kernel, problem, call, products, vectors)
        return Gradients(dq, dk, dv)

    @property
    def products(self) -> int:
        """How a product is made now: on tensor cores by 3, or by 1 where the user allows TF32 to torch; else 0."""
        if not self.tensor_cores:
            return 0
        return 1 if allows_tf32(torch.float32) else 3

    def _wrong_machine(self, problem: AttentionProblem) -> str | None:
        if problem.device.type != "cuda" or torch.version.hip is not None:
            return f"runs on CUDA devices, got {'ROCm' if torch.version.hip else problem.device}"
        reason = lacking()
        if reason is not None:
            return reason
        capability, least = torch.cuda.get_device_capability(problem.device), (8, 0) if self.tensor_cores else (7, 5)
        if capability < least:
            also = "; backend='cuda_ieee' takes 7.5" if self.tensor_cores else ""
            return (f"needs CUDA compute capability {least[0]}.{least[1]} or newer, got {capability[0]}."
                    f"{capability[1]}{also}")
        return None

    def _too_large(self, problem: AttentionProblem) -> str | None:
        spec = device_spec(problem.device)
        products = self.products
        kernels = ("forward",) if problem.direction == "forward" else backward_kernels(problem, products)
        if any(cuda_config(kernel, problem, spec, products) is None for kernel in kernels):
            return (f"finds no tile for head dims {problem.d} and {problem.dv} in the {spec.shared_memory} bytes of "
                    f"shared memory of {spec.arch}")
        return None


def _wrong_problem(problem: AttentionProblem) -> str | None:
    if problem.dtype is not torch.float32:
        return f"computes in float32, got {problem.dtype}"
    if max(problem.d, problem.dv) > WIDEST:
        return f"takes head dims up to {WIDEST}, got {problem.d} and {problem.dv}"
    if problem.mask.has_exceptions:
        return f"takes causal masks and windows, got {problem.mask}"
    if problem.scores != NO_OPTIONS:
        return f"takes no option that changes scores or reports one, got {str(problem.scores) or 'max_logit'}"
    if problem.sequences.packed is not None:
        return f"takes lengths of batch entries, got {problem.sequences}"
    if max(problem.sq, problem.sk) >= UNBOUNDED:
        return f"takes lengths below {UNBOUNDED}, got {problem.sq} queries and {problem.sk} keys"
    return None


def _lengths(operands: Operands) -> dict[str, torch.Tensor | None]:
    return {"seqlens_q": operands.seqlens_q, "seqlens_k": operands.seqlens_k}


def _takes_vectors(*tensors: torch.Tensor) -> bool:
    """Whether every row of these tensors can be read 16 bytes at a time."""
    return are_aligned(*tensors) and all(
        tensor.stride(3) == 1 and tensor.shape[3] % 4 == 0
        and all(stride % 4 == 0 or size == 1
                for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True))
        for tensor in tensors)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, dense_strides(tensor.shape, tensor.stride()), dtype=tensor.dtype,
                               device=tensor.device)


def _launch(kernel: str, problem: AttentionProblem, call: Call, products: int, vectors: bool) -> None:
    program, shared_bytes, tiles, heads = _plan(kernel, problem, products, vectors)
    call.tiles = tiles
    if program.config.split:
        call, _scratch = _split(program, problem, call)
    load(program, device_spec(problem.device).arch, problem.device.index or 0, shared_bytes)(call,
                                                                                            tiles * heads * problem.b)


def _split(program: Program, problem: AttentionProblem, call: Call) -> tuple[Call, list[torch.Tensor]]:
    """Write the tensors whose rows come in steps as they are read; returns a call that has them, and their memory."""
    of_queries = program.kernel in SUMS_OVER_QUERIES
    names = ("q", "dout") if of_queries else ("k", "v")
    rows, heads = (problem.sq, problem.hq) if of_queries else (problem.sk, problem.hk)
    pad = PAD
    if not program.config.products:  # whole tiles of keys, of which rows that nobody sees may stay as they are
        rows, pad = -(-rows // KEY_TILE) * KEY_TILE, 0
    scratch = [torch.empty(problem.b, heads, rows, dim + pad, dtype=problem.dtype, device=problem.device)
               for dim in (program.d, program.dv)]
    seen = _seen(problem, call, of_queries=of_queries)
    before = splitting(program)
    tiles = -(-len(seen) // before.config.others)
    split = [Tensor.of(tensor) for tensor in scratch]
    if tiles:
        first, second = (getattr(call, name).from_row(seen.start) for name in names)
        own = Call.from_buffer_copy(call)  # on FMA pipes it has to know who sees a key, and all seen begin at the first
        own.hq, own.sk, own.tiles, own.k, own.v = heads, len(seen), tiles, first, second
        own.dk, own.dv = (tensor.from_row(seen.start) for tensor in split)
        launch = load(before, device_spec(problem.device).arch, problem.device.index or 0,
                      CUDA_SPLIT[before.config.products].shared_bytes("split", program.d, program.dv))
        launch(own, tiles * heads * problem.b)
    call = Call.from_buffer_copy(call)
    for name, tensor in zip(names, split, strict=True):
        setattr(call, name, tensor)
    return call, scratch


def _seen(problem: AttentionProblem, call: Call, *, of_queries: bool) -> range:
    """Return the rows of the side that comes in steps that some row of the other side sees, or may see."""
    if problem.sequences.are_data:
        return range(problem.sq if of_queries else problem.sk)
    if of_queries:
        return range(max(0, -call.upper), max(0, min(problem.sq, problem.sk - call.lower)))
    return range(max(0, call.lower), max(0, min(problem.sk, problem.sq + call.upper)))


def splitting(program: Program) -> Program:
    """Return the program that writes what comes to another in steps."""
    return Program("split", CUDA_SPLIT[program.config.products], program.d, program.dv, program.vectors)


@registered
@lru_cache(maxsize=4096)
def _plan(kernel: str, problem: AttentionProblem, products: int, vectors: bool) -> tuple[Program, int, int, int]:
    """Return a kernel's program, its shared memory, and how many tiles and heads its grid has."""
    return plan(kernel, problem, device_spec(problem.device), products, vectors)


def plan(kernel: str, problem: AttentionProblem, device: DeviceSpec, products: int,
         vectors: bool) -> tuple[Program, int, int, int]:
    """The same for a device that need not be here."""
    if kernel == "delta":  # has no tiles: one program is that of all head dims
        program = Program(kernel, CUDA_DELTA, d=32, dv=32, vectors=False)
        return program, 0, -(-problem.sq // CUDA_DELTA.warps), problem.hq
    dims = padded_dims(kernel, problem)
    # why_not refuses where there is none.
    config = cast(CudaConfig, cuda_config(kernel, problem, device, products))
    shared_bytes, rows = config.shared_bytes(kernel, *dims), config.rows
    length, heads = (problem.sk, problem.hk) if kernel in SUMS_OVER_QUERIES else (problem.sq, problem.hq)
    return Program(kernel, config, *dims, vectors), shared_bytes, -(-length // rows), heads
