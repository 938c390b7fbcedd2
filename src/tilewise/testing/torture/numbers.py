"""Numbers that a normal distribution never draws, and the sums that they hide in."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewise.masks import causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.torture import issues
from tilewise.testing.torture.checks import Check, Run, held_to_budget
from tilewise.testing.torture.trial import Trial, Wrong, demand_finite

# 64 more than whole tiles of 128 in both; on a GPU long enough for kernels' paths of many tiles.
_SHORT, _LONG = 192, 1088
_DIRECTION = 8.0  # dim 0 of q where dim 0 of k decides: at a head dim of 64 times 1/sqrt(64) it is 1
_LARGE, _UNITS = 133120.0, 16
_WIDE = (torch.bfloat16, torch.float32)


def _check(name: str, about: str, run: Run, *, issue: str | None = None, **fields: Any) -> Check:
    """Return a check of one long sequence.

    Args:
        fields: of the case, but for ``dtypes``, which is the check's.
    """
    dtypes = fields.pop("dtypes", ())
    case = Case(name, **({"sq": _SHORT, "sk": _SHORT} | fields))
    lengths: dict[str, Any] = {side: _LONG for side in ("sq", "sk") if side not in fields}
    return Check(name, "numbers", about, case, run, issue, case_on_gpu=replace(case, **lengths), dtypes=dtypes)


def scaled(q: float = 1.0, *, k_mean: float = 0.0, v_mean: float = 0.0) -> Callable[[Inputs, Case], Inputs]:
    """Return what multiplies q and moves k and v."""
    def change(inputs: Inputs, case: Case) -> Inputs:
        del case
        return inputs._replace(q=inputs.q * q, k=inputs.k + k_mean, v=inputs.v + v_mean)

    return change


def shifted(inputs: Inputs, case: Case, *, by: float) -> Inputs:
    """Move every score by the same number, which decides the lse and nothing else."""
    del case
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0], k[..., 0] = _DIRECTION, by
    return inputs._replace(q=q, k=k)


def _with_a_sink(inputs: Inputs, case: Case) -> Inputs:
    """Let every query give nearly all its weight to the first key, whose value is small."""
    del case
    q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v.clone()
    q[..., 0], k[..., 0] = _DIRECTION, 0.0
    k[:, :, 0, 0] = 14.0
    v[:, :, 0] *= 0.125
    return inputs._replace(q=q, k=k, v=v)


def _climbing(inputs: Inputs, case: Case) -> Inputs:
    """Let scores climb by 400 along a row: a maximum of its first tiles is too low for the last."""
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0] = _DIRECTION
    k[..., 0] = (torch.arange(case.sk, device=k.device) * (400.0 / case.sk)).to(k.dtype)
    return inputs._replace(q=q, k=k)


def _far_apart(inputs: Inputs, case: Case) -> Inputs:
    """Let scores of plus and minus thousands stand side by side, whose products float16 still has."""
    q, k = inputs.q.clone(), inputs.k.clone()
    signs = 1 - 2 * (torch.arange(case.sq, device=q.device) % 2)
    steps = torch.arange(case.sk, device=k.device) * 37 % case.sk  # each once, in no order
    q[..., 0] = (64 * signs).to(q.dtype)
    k[..., 0] = (steps % 128 * 15 - 960).to(k.dtype)
    return inputs._replace(q=q, k=k)


def _zeros(inputs: Inputs, case: Case) -> Inputs:
    del case
    return inputs._replace(q=torch.zeros_like(inputs.q), k=torch.zeros_like(inputs.k))


def _large_inputs(trial: Trial, case: Case) -> Inputs:
    """Return q and k of 10⁶ with either sign, and v as drawn."""
    inputs = trial.inputs(case)
    q, k = (1e6 * tensor.sign() for tensor in inputs[:2])
    # Scores are multiples of 2·10¹²/8: a row has its greatest where k is q.
    k[:, :, :case.sq] = q[:, :, torch.arange(case.sq - 1, -1, -1, device=q.device)]
    # Out copies a row of v, of bits that factors of any kernel have: a copy has no error to scale a budget by.
    return inputs._replace(q=q, k=k, v=inputs.v.bfloat16().to(trial.dtype))


def _constants(trial: Trial, case: Case) -> Inputs:
    """Return tensors of one large number, as torch's own test of its FlashAttention has them, and dout of ones."""
    inputs = trial.inputs(case)
    q, k, v = (torch.full_like(tensor, _LARGE) for tensor in inputs[:3])
    return inputs._replace(q=q, k=k, v=v, dout=torch.ones_like(inputs.dout))


def _right_copy(trial: Trial, case: Case) -> None:
    inputs = _large_inputs(trial, case)
    trial.judge(case, inputs, trial.results(case, inputs, backward=False), parts=("out",))


def _right_constant(trial: Trial, case: Case) -> None:
    """Demand the mean of equal numbers to 16 units in the last place: dense attention's error may be 0 by luck."""
    out = trial.results(case, _constants(trial, case), backward=False).out
    demand_finite([("out", out)])
    units = float((out - _LARGE).abs().max()) / (_LARGE * torch.finfo(trial.dtype).eps)
    if units > _UNITS:
        raise Wrong(f"out: {units:.3g} units in the last place from {_LARGE:g}; allowed are {_UNITS}")


def _finite_gradients(make: Callable[[Trial, Case], Inputs], trial: Trial, case: Case) -> None:
    demand_finite(trial.results(case, make(trial, case)).items())


def _extremes() -> tuple[Check, ...]:
    """Return the checks of inputs so large that an lse in float32 no longer tells a row's probabilities.

    What exact gradients are there a backward pass in O(s) memory cannot know; that they are finite is demanded.
    """
    checks: list[Check] = []
    for name, about, make, right in (
            ("large_constants", "q, k and v all of 133120", _constants, _right_constant),
            ("inputs_of_1e6", "q and k of ±10⁶, scores of ±10¹³", _large_inputs, _right_copy)):
        checks += [_check(name, f"{about}: the right out", right, dtypes=_WIDE),
                   replace(_check(f"{name}_gradients", f"{about}: finite out and gradients",
                                  partial(_finite_gradients, make), dtypes=_WIDE), needs=("backward",))]
    return tuple(checks)


CHECKS: tuple[Check, ...] = (
    _check("ordinary", "normally distributed inputs", held_to_budget()),
    _check("ordinary_causal", "the same under a causal mask", held_to_budget(), mask=causal()),
    _check("scale_given", "scale = 0.3", held_to_budget(), scale=0.3),
    _check("scale_of_one", "scale = 1, which compilers make a constant of", held_to_budget(scaled(0.125)), scale=1.0,
           issue=issues.SCALE_OF_ONE),
    _check("zeros", "q and k of zeros: every key weighs the same", held_to_budget(_zeros)),
    _check("sharp_rows_8", "q times 8: few keys have the weight", held_to_budget(scaled(8.0)), mask=causal()),
    _check("sharp_rows_20", "q times 20: one key has the weight", held_to_budget(scaled(20.0)), mask=causal()),
    _check("keys_with_a_mean", "k around 2, as activations are", held_to_budget(scaled(k_mean=2.0))),
    _check("values_with_a_mean", "v around 3", held_to_budget(scaled(v_mean=3.0)), mask=causal()),
    _check("means_at_head_dim_256", "k around 2 and v around 3 in a batch, at head dim 256: normally distributed "
           "inputs had hidden wrong gradients there", held_to_budget(scaled(k_mean=2.0, v_mean=3.0)), b=2, d=256,
           dv=256, mask=causal(), issue=issues.MEANS_AT_256),
    _check("sink_heavy_rows", "the first key has nearly all weight, and a small value", held_to_budget(_with_a_sink),
           mask=causal()),
    _check("climbing_scores", "scores that climb by 400 along a row", held_to_budget(_climbing)),
    _check("scores_of_thousands", "scores from -7680 to 7680 side by side, hidden ones too",
           held_to_budget(_far_apart), mask=causal()),
    _check("lse_below_minus_88", "every score near -120: exp(lse) underflows, and keys filled up with zeros would win; "
           "64 keys past whole tiles", held_to_budget(partial(shifted, by=-120.0)), issue=issues.LSE_BELOW_88),
    _check("lse_below_minus_88_causal", "the same under a causal mask", held_to_budget(partial(shifted, by=-120.0)),
           mask=causal(), issue=issues.LSE_BELOW_88),
    _check("lse_below_minus_88_masked", "the same under a boolean mask", held_to_budget(partial(shifted, by=-120.0)),
           mask_tensor="11qk", issue=issues.LSE_BELOW_88),
    _check("lse_above_88", "every score near 120: exp overflows", held_to_budget(partial(shifted, by=120.0)),
           mask=causal()),
    _check("long_rows", "64 queries of many keys, v around 1: sums of probabilities in 16 bits would stand still",
           held_to_budget(scaled(0.25, v_mean=1.0)), hq=1, hk=1, sq=64),
    _check("long_columns", "64 keys of many queries: the sums of dk and dv are as long", held_to_budget(), hq=1, hk=1,
           sk=64),
    *_extremes(),
)
