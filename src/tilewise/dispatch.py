"""Which backend serves a problem, and why each other one does not.

The rule: an explicit choice is that backend or an error with its reason; without one, the first backend in the
order of preference whose ``why_not`` is None.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol, cast

import torch

from tilewise import settings
from tilewise.backends._support.current import allows_tf32
from tilewise.backends.base import Backend, Gradients, Needs, Pending, Results, Saved
from tilewise.errors import UnsupportedProblem
from tilewise.problem import AttentionProblem
from tilewise.problem.decode import CacheOperands, DecodeProblem
from tilewise.problem.options import NO_OPERANDS, Operands
from tilewise.support.caches import registered
from tilewise.support.names import BACKENDS
from tilewise.tuning.device import device_spec
from tilewise.tuning.heuristics_hopper import prefers_gluon
from tilewise.validate.choices import check_backend

# Serve the calls that name them and no others. On an H200 cudnn was faster than the kernels chosen without a name in
# none of the 192 cells of the grid packed-kv (docs/results.md). In other grids torch's operator of cuDNN was timed, and
# this backend was not.
ON_REQUEST = ("cudnn",)
# Multiply what is hidden by 0, where the others do not look, if lengths are data: NaN there reaches their results.
FINITE_PADDING = ("cudnn",)


@cache
def get_backend(name: str) -> Backend:
    """Return the backend of that name. Raises :class:`InvalidInput` for an unknown one."""
    check_backend(name, BACKENDS)
    return cast(Backend, importlib.import_module(f"{__package__}.backends.{name}").backend)


def order(problem: AttentionProblem, tf32: bool | None = None) -> tuple[str, ...]:
    """Backends by preference for this problem, those on request left out; the first that takes it is chosen.

    ``tf32``: whether a float32 product may be rounded to TF32; None = as torch is set.

    Measured on CPUs at b=1 h=8 d=64, 128 to 4096 tokens, causal and not (torch 2.13, AVX-512, 2 cores), torch's C++
    kernel against the tiled reference. In float32, and in bfloat16 where the CPU multiplies it, the kernel takes 0.5
    to 0.9 of the time in both passes. In float16 it takes 1.1 to 1.4 of it forward and 8 times it backward; in
    bfloat16 without such a CPU, 0.5 forward and twice it backward.

    On GPUs, ``prefers_gluon`` says what is worth gluon's launch, the dearer one for tensors that it has not seen. The
    float32 kernels of cuda come first on Hopper GPUs: from 1024 queries and keys on, at head dims 64 to 128, they were
    6 to 13 times as fast as triton's on an H200 (timed at both ends; one between is computed as the next multiple of
    32). They come behind where they have not been timed: elsewhere, and where TF32 is allowed, so that both make one
    product.
    """
    if problem.device.type != "cpu":
        first: tuple[str, ...] = ("gluon", "triton") if prefers_gluon(problem) else ("triton", "gluon")
        tf32 = allows_tf32(problem.dtype) if tf32 is None else tf32
        first = ("cuda", *first) if _prefers_cuda(problem, tf32) else (*first, "cuda")
        return (*first, "cuda_ieee", "torch", "reference")
    half_is_slow = problem.dtype is torch.float16 or (
        problem.dtype is torch.bfloat16 and problem.direction == "backward" and not _cpu_multiplies_bfloat16())
    first = ("reference", "torch") if half_is_slow else ("torch", "reference")
    return (*first, "triton", "gluon", "cuda", "cuda_ieee")


# Where cuda's kernels were timed beside triton's: head dims, and queries and keys.
_TIMED_DIMS, _SHORTEST_TIMED = range(64, 129), 1024


def _prefers_cuda(problem: AttentionProblem, tf32: bool) -> bool:
    return (problem.dtype is torch.float32 and not tf32 and problem.device.type == "cuda"
            and all(dim in _TIMED_DIMS for dim in (problem.d, problem.dv))
            and min(problem.sq, problem.sk) >= _SHORTEST_TIMED and device_spec(problem.device).arch == "sm_90")


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def choose(problem: AttentionProblem, backend: str | None = None, tf32: bool | None = None) -> Backend:
    """Return the backend that serves the problem; ``tf32`` as in :func:`order`.

    Raises:
        InvalidInput: no backend has that name.
        UnsupportedProblem: the named backend, or every backend, refuses; the message holds each reason.
    """
    return _chosen(problem, backend, allows_tf32(problem.dtype) if tf32 is None else tf32)


@registered
@lru_cache(maxsize=4096)
def _chosen(problem: AttentionProblem, backend: str | None, tf32: bool) -> Backend:
    chosen, is_final = _first_to_take(problem, backend, tf32)
    return chosen if is_final else _Interim(problem, tf32, chosen.name)


def _first_to_take(problem: AttentionProblem, backend: str | None, tf32: bool) -> tuple[Backend, bool]:
    """Return the backend that serves the problem, and whether it is the answer for later calls too."""
    names = order(problem, tf32) if backend is None else (backend,)
    reasons: dict[str, str] = {}
    for name in names:
        candidate = get_backend(name)
        reason = candidate.why_not(problem)
        if reason is None:
            return candidate, not any(isinstance(reason, Pending) for reason in reasons.values())
        reasons[name] = reason
    raise _refusal(problem, backend, reasons)


class _Interim:
    """What serves a problem while a preferred backend's answer is pending: it chooses anew at every call until then.

    Whoever keeps a choice (autograd keeps one for each kind of call) can keep this.

    Attributes:
        name: of the backend that served last.
    """

    def __init__(self, problem: AttentionProblem, tf32: bool, name: str) -> None:
        self._problem, self._tf32, self.name = problem, tf32, name
        self._final: Backend | None = None

    def _now(self) -> Backend:
        if self._final is not None:
            return self._final
        chosen, is_final = _first_to_take(self._problem, None, self._tf32)
        if is_final:
            self._final = chosen
        self.name = chosen.name
        return chosen

    def why_not(self, problem: AttentionProblem) -> str | None:
        """See :class:`tilewise.backends.base.Backend`."""
        return self._now().why_not(problem)

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        return self._now().forward(problem, q, k, v, operands)

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = Needs()) -> Gradients:  # noqa: B008 - a value, never changed
        """See :class:`tilewise.backends.base.Backend`."""
        return self._now().backward(problem, saved, dout, dlse, needs)


def _refusal(problem: object, backend: str | None, reasons: dict[str, str]) -> UnsupportedProblem:
    subject = "no backend takes" if backend is None else f"backend {backend!r} refuses"
    return UnsupportedProblem(f"{subject} this problem: {problem}", reasons)


class Decoder(Protocol):
    """A module that decodes: ``backends/_support/<name>_decode.py``."""

    def why_not(self, problem: DecodeProblem) -> str | None:
        """Return why it refuses the problem, as one sentence, or None if it takes it."""

    def decode(self, problem: DecodeProblem, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
               operands: CacheOperands) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, and return out and lse."""


_DECODERS = ("triton", "reference")


def _decoders(device: torch.device) -> tuple[str, ...]:
    """Return what decodes, by preference: triton where there is a GPU."""
    return _DECODERS if device.type != "cpu" else _DECODERS[::-1]


def _decoder(name: str) -> Decoder:
    return cast(Decoder, importlib.import_module(f"{__package__}.backends._support.{name}_decode"))


def _why_not_decode(name: str, problem: DecodeProblem) -> str | None:
    if name not in _DECODERS:
        return "does not decode; backend='triton' and 'reference' do"
    return _decoder(name).why_not(problem)


@registered
@lru_cache(maxsize=4096)
def choose_decoder(problem: DecodeProblem, backend: str | None = None) -> Decoder:
    """Return what decodes the problem: triton where there is a GPU, else, or where it refuses, the reference.

    Raises:
        InvalidInput, UnsupportedProblem: as :func:`choose`.
    """
    names = _decoders(problem.device) if backend is None else (get_backend(backend).name,)
    reasons = {}
    for name in names:
        reason = _why_not_decode(name, problem)
        if reason is None:
            return _decoder(name)
        reasons[name] = reason
    raise _refusal(problem, backend, reasons)


@dataclass(frozen=True)
class Explanation:
    """The outcome of :func:`explain`; prints as a table.

    Attributes:
        forward, backward: name of the chosen backend; None when every backend refuses. Decoding has no backward pass:
            None.
        reasons: (direction, backend name) -> its refusal, or None where it could serve.
    """

    problem: AttentionProblem | DecodeProblem
    forward: str | None
    backward: str | None
    reasons: dict[tuple[str, str], str | None]

    def __str__(self) -> str:
        chosen = {"forward": self.forward, "backward": self.backward}
        lines = [str(self.problem).removeprefix("forward ")]
        for (direction, name), reason in self.reasons.items():
            if name == chosen[direction]:
                verdict = "chosen"
            else:
                verdict = "could serve" if reason is None else f"no: {reason}"
            lines.append(f"  {direction:<8} {name:<10} {verdict}")
        return "\n".join(lines)


def answer_of(name: str, problem: AttentionProblem) -> str | None:
    """Return a backend's reason against the problem, or None; a sentence too where asking it fails.

    A library that is broken, or a device without memory for what is built to ask: a call raises what comes then.
    """
    try:
        return get_backend(name).why_not(problem)
    except (ImportError, OSError, RuntimeError) as error:
        return f"could not be asked, {type(error).__name__}: {' '.join(str(error).split())}"


def explain_problem(problem: AttentionProblem, backend: str | None = None,
                    why_not_first: Callable[[str], str | None] | None = None) -> Explanation:
    """Ask every backend about both passes of the problem; raises nothing for a refusal.

    ``why_not_first``: asked before a backend is, by its name: a reason that lies in the call and not in the problem.
    """
    chosen: dict[str, str | None] = {}
    reasons: dict[tuple[str, str], str | None] = {}
    for side in (problem, problem.backward(lse_grad=False)):
        names = (*order(side), *ON_REQUEST)
        wanted = order(side) if backend is None else (get_backend(backend).name,)
        answers = {name: (why_not_first and why_not_first(name)) or answer_of(name, side) for name in names}
        chosen[side.direction] = next((name for name in wanted if answers[name] is None), None)
        reasons |= {(side.direction, name): answer for name, answer in answers.items()}
    return Explanation(problem, chosen["forward"], chosen["backward"], reasons)


def explain_decoding(problem: DecodeProblem, backend: str | None = None) -> Explanation:
    """Ask every backend about a decoding call, which is a forward pass; raises nothing for a refusal."""
    decoders = _decoders(problem.device)
    names = (*decoders, *(name for name in BACKENDS if name not in decoders))
    answers = {name: _why_not_decode(name, problem) for name in names}
    wanted = decoders if backend is None else (get_backend(backend).name,)
    chosen = next((name for name in wanted if answers[name] is None), None)
    return Explanation(problem, chosen, None, {("forward", name): answer for name, answer in answers.items()})


def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
    """Use one backend for every call inside the ``with`` block that names none; thread- and task-local.

    It holds for the backward passes of these calls too. A compiled call that has a gradient raises instead: name the
    backend in the call, or by ``TILEWISE_BACKEND``. Without a ``with`` block it changes nothing, and warns of that.

    Args:
        name: "gluon", "triton", "cuda", "cuda_ieee", "torch", "cudnn" or "reference".

    Raises:
        InvalidInput: no backend has that name.

    >>> import torch, tilewise as tw
    >>> q = torch.randn(1, 2, 8, 16)
    >>> with tw.use_backend("reference"):
    ...     out = tw.attention(q, q, q)
    """
    return settings.BackendScope(get_backend(name).name)
