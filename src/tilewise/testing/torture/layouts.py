"""How tensors lie in memory, and what a call leaves of them."""

from typing import Any

import torch

from tilewise.masks import Mask, causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.placement import with_meaningless_strides
from tilewise.testing.torture import issues
from tilewise.testing.torture.checks import Check, Need, Run, held_to_budget
from tilewise.testing.torture.trial import Trial, demand_equal


def _check(name: str, about: str, run: Run | None = None, *, issue: str | None = None, needs: tuple[Need, ...] = (),
           **fields: Any) -> Check:
    given: dict[str, Any] = {"b": 2, "sq": 70, "sk": 70, "mask": causal()} | fields
    return Check(name, "layouts", about, Case(name, **given), run or held_to_budget(), issue, needs=needs)


def _one_number(inputs: Inputs, case: Case) -> Inputs:
    """Make dout one number with stride 0 in every dim, as ``out.sum().backward()`` does."""
    del case
    return inputs._replace(dout=inputs.dout.new_ones(()).expand(inputs.dout.shape))


def _strides_of_single_dims(inputs: Inputs, case: Case) -> Inputs:
    del case
    return Inputs(*map(with_meaningless_strides, inputs))


def _all_untouched(trial: Trial, case: Case) -> None:
    inputs = trial.inputs(case)
    before = [tensor.clone() for tensor in inputs]
    trial.results(case, inputs)
    demand_equal([(name, one, other) for name, one, other in
                  zip(Inputs._fields[:4], before[:4], inputs[:4], strict=True)], "behind the call")


def _one_learns(trial: Trial, case: Case) -> None:
    """Ask for the gradient of v alone, of k alone and of q alone."""
    inputs = trial.inputs(case)
    got = trial.results(case, inputs, backward=False)
    for learns, name in reversed(list(enumerate(("dq", "dk", "dv")))):
        tensors = [tensor.detach().requires_grad_(place == learns) for place, tensor in enumerate(inputs[:3])]

        def gradient(tensors: list[torch.Tensor] = tensors, learns: int = learns) -> torch.Tensor:
            out, _ = trial.attend(case, tensors[0], tensors[1], tensors[2])
            return torch.autograd.grad(out, tensors[learns], inputs.dout)[0]

        got = got._replace(**{name: trial.guarded(gradient)})
    trial.judge(case, inputs, got)


CHECKS: tuple[Check, ...] = (
    _check("storage_bshd", "transposed views of (b, s, h, d) storage, dout too", layout="bshd",
           issue=issues.TRANSPOSED),
    _check("storage_bhds", "the head dim's stride is not 1, in dout neither", layout="bhds"),
    _check("packed_qkv", "q, k and v are slices of one tensor", layout="packed_qkv"),
    _check("packed_kv", "k and v are slices of one tensor, 34 queries of 70 keys", layout="packed_kv", sq=34,
           mask=Mask()),
    _check("expanded", "stride 0: q and dout over the batch, k and v over the heads", layout="expanded",
           issue=issues.EXPANDED),
    _check("one_number_as_dout", "dout of stride 0 in every dim, as out.sum().backward() makes it",
           held_to_budget(_one_number), needs=("backward",)),
    _check("moat", "NaN before, between and behind the rows of every dim", layout="moat"),
    _check("strides_of_single_dims", "dims of size 1 with odd strides, which move nothing",
           held_to_budget(_strides_of_single_dims), b=1, hq=1, hk=1),
    _check("inputs_untouched", "q, k, v and dout have the same bits behind both passes", _all_untouched),
    _check("one_learns", "only v, only k, only q has a gradient", _one_learns, needs=("backward",)),
)
