"""How accurate is good enough: an error budget that scales with what the dtype itself costs.

    budget = factor · (error of dense attention in the tested dtype) + rounding band

held by the maximum AND by the mean of the absolute error against float64. A maximum alone passes a result whose
bulk is bad; the mean alone passes one wrong element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.errors import InvalidInput

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """One result's error against float64, beside its budget.

    Attributes:
        name: which result ("out", "lse", "dq", ...).
        max_error, mean_error: of |got − exact|; inf where got is NaN or misses an infinity of exact.
        max_budget, mean_budget: what is allowed.
        worst: coordinate of the largest error; () for an empty result.
        got, exact: the two values there.
    """

    name: str
    max_error: float
    mean_error: float
    max_budget: float
    mean_budget: float
    worst: tuple[int, ...]
    got: float
    exact: float

    @property
    def ok(self) -> bool:
        """Whether both errors keep their budgets; a budget that is not finite measures nothing and never passes."""
        if not (math.isfinite(self.max_budget) and math.isfinite(self.mean_budget)):
            return False
        return self.max_error <= self.max_budget and self.mean_error <= self.mean_budget

    @property
    def share(self) -> float:
        """Part of the budget that the error uses, by maximum or mean, whichever is more; above 1 it is exceeded."""
        shares = [error / budget if budget else (0.0 if error == 0 else math.inf)
                  for error, budget in ((self.max_error, self.max_budget), (self.mean_error, self.mean_budget))]
        return max(shares)

    def __str__(self) -> str:
        verdict = "within budget" if self.ok else "OVER BUDGET"
        return (
            f"{self.name} {verdict}: max error {self.max_error:.3e} (budget {self.max_budget:.3e}), "
            f"mean error {self.mean_error:.3e} (budget {self.mean_budget:.3e}); "
            f"worst at {self.worst}: got {self.got:.9g}, exact {self.exact:.9g}"
        )


def compare(name: str, got: torch.Tensor, exact: torch.Tensor, yardstick: torch.Tensor | Sequence[torch.Tensor],
            factor: float) -> ErrorReport:
    """Measure ``got`` against ``exact`` (float64), with ``yardstick`` (dense, in the tested dtype) to scale by.

    Of several yardsticks the worst counts, by maximum and by mean: see :func:`tilewise.testing.oracle.yardsticks`.

    Args:
        name: what the report calls the result.
        got, exact: one shape.
        yardstick: one tensor of that shape, or several.
        factor: how many times the yardstick's own error is allowed: :data:`OUTPUT_FACTOR` or
            :data:`GRADIENT_FACTOR`.

    Raises:
        InvalidInput: the shapes differ.
    """
    samples = [yardstick] if isinstance(yardstick, torch.Tensor) else list(yardstick)
    for role, tensor in (("got", got), *(("yardstick", sample) for sample in samples)):
        if tensor.shape != exact.shape:
            raise InvalidInput(f"{name}: {role} has shape {tuple(tensor.shape)}, exact has {tuple(exact.shape)}.")
    if exact.numel() == 0:
        return ErrorReport(name, 0.0, 0.0, 0.0, 0.0, (), 0.0, 0.0)
    got, exact = got.detach(), exact.detach()
    error, allowed = _errors(got, exact), [_errors(sample.detach(), exact) for sample in samples]
    band = _rounding_band(exact, got.dtype)
    flat_index = int(error.argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), error.shape))
    return ErrorReport(
        name, float(error.max()), float(error.mean()),
        factor * max(float(sample.max()) for sample in allowed) + float(band.max()),
        factor * max(float(sample.mean()) for sample in allowed) + float(band.mean()),
        worst, float(got[worst]), float(exact[worst]),
    )


def assert_within_budget(name: str, got: torch.Tensor, exact: torch.Tensor,
                         yardstick: torch.Tensor | Sequence[torch.Tensor], factor: float) -> None:
    """Raise AssertionError with the whole report when :func:`compare` finds an error over its budget."""
    report = compare(name, got, exact, yardstick, factor)
    if not report.ok:
        raise AssertionError(str(report))


def _errors(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    values = values.double()
    difference = (values - exact).abs()
    # Equal infinities differ by NaN: that is no error. Every other NaN is an infinite one.
    return torch.where(values == exact, 0.0, difference).nan_to_num(nan=math.inf, posinf=math.inf)


def _rounding_band(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Twice what adding and taking away 0.3 loses in the dtype, and one unit in a value's last place at least.

    The unit, because adding 0.3 may lose nothing: the lse of one row was seen a unit beside the exact one, with every
    yardstick within half a unit by luck.
    """
    rounded = exact.to(dtype)
    band = 2.0 * ((rounded + 0.3) - 0.3 - rounded).double().abs()
    _, exponent = torch.frexp(rounded.double())
    unit = torch.ldexp(torch.full_like(exact, torch.finfo(dtype).eps), exponent - 1)
    return torch.where(rounded.isfinite() & (rounded != 0.0), torch.maximum(band, unit), 0.0)
