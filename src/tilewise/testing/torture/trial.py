"""One implementation on trial: call it, and hold what it returns against float64."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from tilewise.problem.options import Operands
from tilewise.testing import oracle
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, make_inputs, make_operands
from tilewise.testing.oracle import Changes
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, ErrorReport, compare
from tilewise.testing.torture.implementation import Call, Implementation

_LONGEST = 300  # characters of another library's words
_LETTERS = "b, h, s, d"
Made = TypeVar("Made")


class NotApplicable(Exception):
    """What a check needs is not there; the message says what, as a sentence."""


class Wrong(Exception):
    """The implementation failed; the message says at what, with the number."""


class Got(NamedTuple):
    """What a call computed, (b, h, s, ...); None for what was not asked for.

    Attributes:
        out, lse: of the forward pass.
        dq, dk, dv: of the backward pass.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Return what was computed, by name."""
        return [(name, tensor) for name, tensor in self._asdict().items() if tensor is not None]


class Trial:
    """An implementation, where and in which dtype it is on trial."""

    def __init__(self, implementation: Implementation, device: torch.device | str, dtype: torch.dtype) -> None:
        self.implementation, self.device, self.dtype = implementation, torch.device(device), dtype

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def inputs(self, case: Case, seed: int = 0) -> Inputs:
        """Draw the tensors of a case."""
        return make_inputs(case, self.dtype, self.device, seed)

    def attend(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
               mask: torch.Tensor | None = None, lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the forward pass; whatever the function raises is its own.

        Args:
            q, k, v: as :func:`make_inputs` lays them out; of packed sequences, too, (1, h, total, d).
            mask: given instead of the case's own.
            lse: ask for it, where it is declared.

        Raises:
            NotApplicable: the function says that it does not take the call.
            Wrong: it returned something else than a tensor, or than out and lse where it was asked for both.
        """
        takes, operands = self.implementation.takes, make_operands(case, self.dtype, self.device)
        scale = case.d**-0.5 if case.scale is None else case.scale
        options: dict[str, Any] = {"causal": case.mask.is_bounded, "scale": scale}
        packed, mask = self.implementation.attention_varlen, operands.mask if mask is None else mask
        function = self.implementation.attention if packed is None or not case.packed else packed
        if case.mask.is_bounded and case.sq != case.sk and len(takes.alignments) > 1:
            options["alignment"] = case.mask.alignment
        if mask is not None:
            options["mask"] = mask
        if case.packed:
            options |= {f"cu_seqlens_{side}": _borders(operands, side) for side in "qk"}
            options |= {"max_seqlen_q": case.sq, "max_seqlen_k": case.sk}
            q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (q, k, v))
        elif lse and takes.lse:
            options["return_lse"] = True
        if self.implementation.why_not is not None:
            reason = self.implementation.why_not(Call(case, q, k, v, options))
            if reason is not None:
                raise NotApplicable(reason)
        out, rows = _tensors(function(q, k, v, **options), with_lse="return_lse" in options)
        return (out.transpose(0, 1)[None] if case.packed else out), rows

    def results(self, case: Case, inputs: Inputs, *, backward: bool = True, mask: torch.Tensor | None = None) -> Got:
        """Run both passes, the second where there is one and it is wanted, and wait for the device.

        Raises:
            NotApplicable: the function does not take the call.
            Wrong: it raised, or its output has another shape or dtype than is agreed.
        """
        both = backward and self.implementation.takes.backward
        q, k, v = (tensor.detach().requires_grad_(both) for tensor in inputs[:3])
        out, lse = self.guarded(lambda: self.attend(case, q, k, v, mask=mask, lse=True))
        for name, got, shape, dtype in (("out", out, inputs.dout.shape, self.dtype),
                                        ("lse", lse, inputs.dout.shape[:3], None)):
            if got is not None and (got.shape != shape or dtype not in (None, got.dtype)):
                raise Wrong(f"{name} has shape {tuple(got.shape)} and dtype {got.dtype}; allowed are {tuple(shape)} "
                            f"and {dtype or 'any'}")
        detached = Got(out.detach(), None if lse is None else lse.detach())
        if not both:
            return detached
        dq, dk, dv = self.guarded(lambda: torch.autograd.grad(out, (q, k, v), inputs.dout))
        return detached._replace(dq=dq, dk=dk, dv=dv)

    def guarded(self, work: Callable[[], Made]) -> Made:
        """Return what a call of the implementation makes, once the device is done with it.

        Raises:
            Wrong: it raised, or returned what it may not.
            NotApplicable: it does not take the call.
            torch.OutOfMemoryError: there was not enough memory for it.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # torch explains in warnings why it has no kernel
            try:
                made = work()
                if self.is_on_gpu:
                    torch.cuda.synchronize(self.device)  # a fault in a kernel is told where the device is waited for
            except (NotApplicable, Wrong, torch.OutOfMemoryError):
                raise
            except Exception as error:  # other libraries raise anything; the result keeps their words
                notes = " | ".join(str(warning.message) for warning in caught)
                raise Wrong(f"raised {one_line(error, notes)}") from error
        return made

    def judge(self, case: Case, inputs: Inputs, got: Got, parts: Iterable[str] = Got._fields,
              mask: torch.Tensor | None = None) -> None:
        """Hold results against dense float64 attention of the same inputs.

        Args:
            case, inputs: the problem, in which all that takes part is finite.
            got: what came of it.
            parts: names of the results to look at.
            mask: instead of the case's own.

        Raises:
            Wrong: some are outside the budget of tolerance.py; the message has the worst coordinate of each.
        """
        operands = make_operands(case, self.dtype, self.device)
        changes = Changes(operands if mask is None else Operands(mask=mask), case.settings)
        q, k, v, dout, _ = inputs
        out, lse = oracle.attend(q, k, v, case.mask, case.scale, changes)
        gradients = oracle.gradients(q, k, v, dout, None, case.mask, case.scale, changes)
        samples = oracle.yardsticks(q, k, v, dout, None, case.mask, case.scale, changes)
        exact: dict[str, Any] = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=False))
        demand_within_budget(
            compare(name, tensor, exact[name], [getattr(sample, name) for sample in samples],
                    OUTPUT_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR)
            for name, tensor in got.items() if name in parts)


def _tensors(result: object, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse as a function returned them; raise :class:`Wrong` where they are no tensors."""
    match result:
        case torch.Tensor() if not with_lse:
            return result, None
        case (torch.Tensor() as out, torch.Tensor() as lse) if with_lse:
            return out, lse
    got = f"({', '.join(map(_type_of, result))})" if isinstance(result, tuple) else _type_of(result)
    raise Wrong(f"returned {got}; allowed is {'(out, lse), two tensors' if with_lse else 'out, a tensor'}")


def _type_of(value: object) -> str:
    return "None" if value is None else type(value).__name__


def demand_within_budget(reports: Iterable[ErrorReport]) -> None:
    """Raise :class:`Wrong` with a sentence for each report over its budget.

    Raises:
        ValueError: a budget is not finite; then the check measures nothing, whoever is on trial.
    """
    reports = list(reports)
    for report in reports:
        if not (math.isfinite(report.max_budget) and math.isfinite(report.mean_budget)):
            raise ValueError(f"dense attention in the tested dtype has no finite error: {report}")
    over = [_sentence(report) for report in reports if not report.ok]
    if over:
        raise Wrong("; ".join(over))


def demand_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise :class:`Wrong` where one of these tensors is not finite, with the count and the first place."""
    bad = [(name, tensor, ~tensor.isfinite()) for name, tensor in named if not tensor.isfinite().all()]
    if bad:
        raise Wrong("; ".join(
            f"{name}: {int(places.sum())} of {places.numel()} elements are not finite, the first {_at(places)} = "
            f"{float(tensor[_first(places)]):g}" for name, tensor, places in bad))


def demand_equal(named: Iterable[tuple[str, torch.Tensor, torch.Tensor]], what: str) -> None:
    """Raise :class:`Wrong` where the bits of two tensors differ, with the count and the first place.

    Args:
        named: name, one, other.
        what: in which case they differ, as "in run 2" behind the sentence.
    """
    for name, one, other in named:
        # NaN has bits too: as integers.
        unlike = one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
        if unlike.any():
            places = unlike.view(*one.shape, one.element_size()).any(-1) if one.dim() else unlike.any()
            raise Wrong(f"{name}: other bits {what} in {int(places.sum())} of {places.numel()} elements, the first "
                        f"{_at(places)}: {float(one[_first(places)]):.9g} and {float(other[_first(places)]):.9g}")


def demand_zero(named: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Raise :class:`Wrong` where something is not 0, NaN included; ``where`` says which rows these are."""
    for name, tensor in named:
        places = tensor != 0
        if places.any():
            raise Wrong(f"{name}: {float(tensor[_first(places)]):g} {where}, where it is 0 ({int(places.sum())} of "
                        f"{places.numel()} elements)")


def one_line(error: Exception, notes: str = "") -> str:
    """Write an exception in one line."""
    text = " ".join(f"{type(error).__name__}: {error} {notes}".split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _sentence(report: ErrorReport) -> str:
    letters = ", ".join(_LETTERS.split(", ")[:len(report.worst)])
    where = f"at ({letters}) = {report.worst}: got {report.got:.6g}, exact {report.exact:.6g}"
    if math.isinf(report.max_error):
        return f"{report.name}: {report.got:g} {where}"
    by_mean = report.max_error <= report.max_budget
    return f"{report.name}: {'mean ' if by_mean else ''}error {report.share:.3g} times the budget, worst {where}"


def _at(places: torch.Tensor) -> str:
    letters = ", ".join(_LETTERS.split(", ")[:places.dim()])
    return f"at ({letters}) = {_first(places)}"


def _first(places: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in places.nonzero()[0])


def _borders(operands: Operands, side: str) -> torch.Tensor:
    borders: torch.Tensor = getattr(operands, f"cu_seqlens_{side}")
    return borders.int()
