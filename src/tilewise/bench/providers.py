"""What can be timed: this package's backends, dense attention, and torch's own fused kernels.

A provider answers in sentences: ``missing`` when it cannot run on this machine at all, ``reason_against`` when it does
not take one cell. Those of packed sequences are in packed.py, other packages' kernels in flex.py and peers.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.api import attention, attention_varlen
from tilewise.bench.grids import Cell
from tilewise.bench.memory import MIB, available_bytes
from tilewise.bench.options import LEARNABLE, OPTIONS, options_of
from tilewise.bench.roofline import Direction
from tilewise.bench.shapes import FULL
from tilewise.decode import attention_decode
from tilewise.dispatch import choose, choose_decoder
from tilewise.errors import UnsupportedProblem
from tilewise.masks import TensorMask
from tilewise.problem.options import Operands
from tilewise.support.names import BACKENDS
from tilewise.testing.cases import Case
from tilewise.testing.inputs import call_options

Attend = Callable[..., torch.Tensor]
Dims = Literal["bhsd", "bshd", "shd"]
AUTOMATIC = "tilewise"
DETERMINISTIC = f"{AUTOMATIC}:deterministic"


def is_ours(provider: str) -> bool:
    """Whether the provider of that name is this package."""
    return provider == AUTOMATIC or provider.startswith(f"{AUTOMATIC}:")


class Provider(ABC):
    """One implementation of attention.

    Attributes:
        options: which options it takes, of those in options.py.
        gradients: which operands it has a gradient of.
        on_request: whether it is timed only where it is named, being another way to a call that is timed anyway.
        draws_alike: whether its dropout keeps the pairs that ours keeps; else its results have no exact ones.
    """

    name: str
    options: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    on_request = False
    draws_alike = False

    def missing(self, device: torch.device) -> str | None:
        """Return why it cannot run on this machine and device at all, as a sentence, or None."""
        return None

    def reason_against(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Return why it does not take the cell, as a sentence, or None."""
        lacking = [OPTIONS[field] for field in options_of(cell.case) if field not in self.options]
        if lacking:
            return f"takes no {', no '.join(lacking)}"
        constant = [name for name in cell.learned if name not in self.gradients]
        if constant:
            return f"has no gradient of {', '.join(constant)}"
        return self.why_not(cell, direction, device)

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Return why it does not take a cell whose options it takes, as a sentence, or None."""
        return None

    def dims(self, case: Case) -> Dims:
        """Return the order of dims that it calls with; "shd" = packed sequences without a batch dim."""
        return "bhsd"

    def stored(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what its function takes, made of q, k and v in its order of dims, untimed; as a rule, themselves."""
        return q, k, v

    def gradients_of(self, found: tuple[torch.Tensor, ...], case: Case) -> tuple[torch.Tensor, ...]:
        """Return dq, dk and dv, in its order of dims, given the gradients of what :meth:`stored` made."""
        return found

    @abstractmethod
    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Return the function of what :meth:`stored` makes that is timed for this cell.

        What can be made of the operands once for many calls is made here, untimed; of those that require a gradient,
        it must be part of the call.
        """

    def context(self) -> AbstractContextManager[object] | None:
        """Return what the bound function is to be called in, if anything: anew, or held for many calls."""
        return None


class TilewiseProvider(Provider):
    """One backend of this package, or the automatic choice: of calls as they come, or with ``deterministic=True``."""

    options = frozenset(OPTIONS)
    gradients = frozenset(LEARNABLE)
    draws_alike = True

    def __init__(self, backend: str | None = None, *, deterministic: bool = False) -> None:
        self.backend, self.deterministic = backend, deterministic
        self.name = DETERMINISTIC if deterministic else AUTOMATIC if backend is None else f"{AUTOMATIC}:{backend}"

    def missing(self, device: torch.device) -> str | None:
        """Leave out what could be interpreted at best."""
        if self.backend == "triton" and device.type == "cpu":
            return "runs on GPUs; Triton's interpreter on the CPU is for checks, its times mean nothing"
        return None

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Return the backends' own refusals; a backward pass comes after a forward one."""
        try:
            if cell.cached:
                choose_decoder(cell.decode_problem(device), self.backend)
                return "has no backward pass of decoding" if direction == "backward" else None
            if self.deterministic and device.type == "cpu":
                return "is tilewise:reference on the CPU"
            problem = cell.problem(device)
            if self.deterministic:
                problem = replace(problem, deterministic=True)
            for one in [problem] if direction == "forward" else [problem, problem.backward(lse_grad=False)]:
                choose(one, self.backend)
        except UnsupportedProblem as refusal:
            if self.backend is not None:
                return refusal.reasons[self.backend]
            return "; ".join(f"{name}: {reason}" for name, reason in refusal.reasons.items())
        return None

    def dims(self, case: Case) -> Dims:
        """Those of the call."""
        return "shd" if case.packed else "bhsd"

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call :func:`tilewise.attention`, :func:`tilewise.attention_varlen` if packed, or of a cache decoding."""
        if cell.cached:
            return self.bind_cached(cell, device)
        call = attention_varlen if cell.case.packed else attention
        options = {**call_options(cell.case, operands), **self._choices()}
        return lambda q, k, v: cast(torch.Tensor, call(q, k, v, **options))

    def bind_cached(self, cell: Cell, device: torch.device, **options: Any) -> Attend:
        """Call :func:`tilewise.attention_decode`; that the cache is full, the device is told as a serving loop would.

        Args:
            options: more of its arguments.
        """
        case = cell.case
        lengths = torch.full((case.b,), case.sk, dtype=torch.int32, device=device)
        return lambda q, k, v: cast(torch.Tensor, attention_decode(
            q, k, v, cache_seqlens=lengths, mask=case.mask, scale=case.scale, **self._choices(), **options))

    def _choices(self) -> dict[str, Any]:
        """What every call asks for; of determinism nothing unless it shall be, so that torch's switch holds."""
        return {"backend": self.backend, "deterministic": self.deterministic or None}


class DenseProvider(Provider):
    """Attention as a textbook writes it: every score in memory at once."""

    name = "naive"

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse where the score matrices would not fit."""
        return _too_large(cell, device)

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Two matrix products around torch's softmax."""
        case, group = cell.case, cell.case.hq // cell.case.hk
        scale = case.d**-0.5 if case.scale is None else case.scale
        hidden = None if case.mask == FULL else ~case.mask.visible(case.sq, case.sk, device)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if group > 1:
                k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            scores = q @ k.transpose(-1, -2) * scale
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return scores.softmax(-1) @ v

        return attend


class SdpaProvider(Provider):
    """One backend of torch's scaled_dot_product_attention."""

    def __init__(self, name: str, backend: SDPBackend, *, on_cpu: bool, dense: bool = False,
                 options: Sequence[str] = (), gradients: Sequence[str] = ()) -> None:
        self.name, self.backend, self.on_cpu, self.dense = name, backend, on_cpu, dense
        self.options, self.gradients = frozenset(options), frozenset(gradients)

    def missing(self, device: torch.device) -> str | None:
        """Say which of torch's backends have no CPU kernel."""
        if device.type == "cpu" and not self.on_cpu:
            return "torch has this kernel for GPUs only"
        return None

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse masks that the backend would need as a dense tensor, if it takes none."""
        if not _is_torchs(cell.case) and "mask_tensor" not in self.options:
            return f"takes no mask or top-left causal without a dense (sq, sk) mask tensor, got {cell.case.mask}"
        if cell.case.dropout_p and device.type == "cpu" and not self.dense:
            return "has dropout on GPUs only"
        return _too_large(cell, device) if self.dense else None

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call torch, which takes what its context allows."""
        case, make_mask = cell.case, _attn_mask(cell, operands, device)
        is_causal, grouped = case.mask != FULL and make_mask is None, case.hq != case.hk

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            attn_mask = None if make_mask is None else make_mask()
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask, case.dropout_p, is_causal, scale=case.scale, enable_gqa=grouped)

        return attend

    def context(self) -> AbstractContextManager[object] | None:
        """Allow only this backend."""
        context: AbstractContextManager[object] = sdpa_kernel(self.backend)
        return context


def own_providers() -> list[Provider]:
    """Return the automatic choice, every backend of this package, and the choice for deterministic calls."""
    return [TilewiseProvider(), *(TilewiseProvider(name) for name in BACKENDS),
            TilewiseProvider(deterministic=True)]


def torch_providers() -> list[Provider]:
    """Return dense attention and torch's kernels."""
    masked = ("bias", "mask_tensor", "dropout_p", "documents")
    return [
        DenseProvider(),
        SdpaProvider("sdpa_math", SDPBackend.MATH, on_cpu=True, dense=True, options=masked, gradients=("bias",)),
        SdpaProvider("sdpa_flash", SDPBackend.FLASH_ATTENTION, on_cpu=True, options=("dropout_p",)),
        SdpaProvider("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION, on_cpu=False, options=masked,
                     gradients=("bias",)),
        SdpaProvider("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION, on_cpu=False, options=masked),
    ]


def _attn_mask(cell: Cell, operands: Operands, device: torch.device) -> Callable[[], torch.Tensor] | None:
    """Return what makes torch's attn_mask in a call: bias, boolean mask, documents and the cell's mask in one tensor.

    torch takes no ``is_causal`` beside it. None = it needs no such tensor. A bias that gets a gradient is joined with
    the masks in every call, as its users have to; any other, and the masks alone, once.
    """
    case, bias, mask = cell.case, operands.bias, call_options(cell.case, operands)["mask"]
    visible: torch.Tensor | None = None
    if isinstance(mask, TensorMask):
        visible = mask.visible(case.sq, case.sk)
    elif bias is None and _is_torchs(case):
        return None
    elif mask != FULL:
        visible = mask.visible(case.sq, case.sk, device)
    hidden = None if visible is None else ~visible

    def joined() -> torch.Tensor:
        if bias is None:
            return cast(torch.Tensor, visible)
        return bias if hidden is None else bias.masked_fill(hidden, float("-inf"))

    if bias is not None and bias.requires_grad:
        return joined
    once = joined()
    return lambda: once


def _is_torchs(case: Case) -> bool:
    """Whether torch has the mask without a tensor: none, or causal aligned at the top left."""
    mask = case.mask
    is_causal = mask.left is None and mask.right == 0 and not mask.has_exceptions
    return mask == FULL or (is_causal and (case.sq == case.sk or mask.alignment == "top_left"))


def _too_large(cell: Cell, device: torch.device) -> str | None:
    # Scores, probabilities, a masked copy and their gradients are alive together; torch's math path adds float32 ones.
    case = cell.case
    needed = 6 * case.b * case.hq * case.sq * case.sk * max(cell.dtype.itemsize, 2)
    free = available_bytes(device)
    if free is None or 2 * needed <= free:
        return None
    return f"would hold about {needed // MIB} MiB of scores, of {free // MIB} MiB free; left out to be safe"
