"""torch's own context parallel attention, as a peer of benchmarks/context_parallel.py.

``torch.distributed.tensor.experimental.context_parallel`` shards buffers and replaces SDPA within a block: causal, with
its load balancing, which gives a rank the same tokens as the layout "zigzag". Keys of other ranks come by all-gather or
by all-to-all, and a local call is FlashAttention's or cuDNN's. Heads of keys are shared in the call
(``enable_gqa=True``), or where torch refuses that, repeated before it. It is a prototype: what it raises is the
reason of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROTATIONS = ("allgather", "alltoall")
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PEERS = tuple(f"torch_{rotation}_{kernel}" for rotation in ROTATIONS for kernel in KERNELS)
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 2e-3}  # difference from ours, of the largest number of a result
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def why_not(mask: str, layout: str, mesh: DeviceMesh, device: torch.device) -> str | None:
    """Return why no peer takes a cell, or None.

    Args:
        mask, layout: their names.
        mesh, device: of the ranks.
    """
    if mask != "causal":
        return f"takes is_causal alone with its load balancing, and no mask: no {mask}"
    if layout != "zigzag":
        return f"its load balancing lays tokens out in zigzag, not {layout}"
    if mesh.ndim != 1:
        return "takes a mesh of one dim"
    if device.type != "cuda":
        return "has no kernel for CPUs: it takes those of CUDA alone"
    if not dist.is_nccl_available():
        return "needs NCCL, which this build of torch lacks"
    try:
        _names()
    except ImportError as error:
        return f"is not in torch {torch.__version__}: {error}"
    return None


@contextmanager
def sharded(mesh: DeviceMesh, wholes: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Shard tensors (b, h, s, d) by torch's helper; within the block SDPA is its context parallel one.

    Args:
        mesh: of one dim.
        wholes: alike on every rank; they are left as they are.
    """
    context_parallel, _ = _names()
    buffers = [whole.clone() for whole in wholes]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers)):
        yield [buffer.clone() for buffer in buffers]


def attend_of(peer: str, *, repeats: bool) -> Attend:
    """Return the call of a peer, for shards within :func:`sharded`; ``repeats``: whether heads of keys are repeated."""
    _, rotation, kernel = peer.split("_")
    _, set_rotate_method = _names()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        set_rotate_method(rotation)
        if repeats:
            k, v = (own.repeat_interleave(q.shape[1] // own.shape[1], 1) for own in (k, v))
        with sdpa_kernel(KERNELS[kernel]):  # looked up at each call: the block replaces it
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeats)

    return attend


def checked(peer: str, run: Callable[[Attend], Sequence[torch.Tensor]], ours: Sequence[torch.Tensor],
            together: dist.ProcessGroup) -> tuple[Attend | None, float | None, str]:
    """Find a call of a peer that gives what ours gives.

    Args:
        peer: one of ``PEERS``.
        run: calls it, and returns this rank's out, and its gradients where they are wanted.
        ours: the same of our call.
        together: all ranks, which take the same outcome.

    Returns:
        The call, its largest difference from ours on any rank, and what to say of it; or None, None and the reason.
    """
    reason = ""
    for repeats in (False, True):
        attend, found, said = attend_of(peer, repeats=repeats), float("inf"), ""
        try:
            found, size = _difference(run(attend), ours)
            if not found <= ALLOWED.get(ours[0].dtype, 1e-4) * size:
                said = f"differs from ours by {found:.1e}"
        except Exception as error:  # of any kind: torch's prototype
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        failed = torch.tensor([float(bool(said)), 0.0 if said else found], dtype=torch.float64, device=ours[0].device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=together)
        if not failed[0].item():
            return attend, failed[1].item(), "heads of keys repeated" if repeats else ""
        reason = reason or said or "another rank refused"
    return None, None, reason


def _difference(made: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the largest difference of all results, and the largest number of the result that has it."""
    found = [(float((got.float() - own.float()).abs().max()), float(own.abs().max())) for got, own in zip(
        made, ours, strict=True)]
    if any(difference != difference for difference, _ in found):  # NaN
        return float("nan"), 1.0
    return max(found, key=lambda one: one[0] / max(one[1], 1e-30))


def _names() -> tuple[Any, Callable[[str], None]]:
    """Return context_parallel and set_rotate_method; the latter is of a module of its own in torch 2.11 and 2.13."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    return context_parallel, set_rotate_method
