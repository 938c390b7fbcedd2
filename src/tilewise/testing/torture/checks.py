"""What a check is."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch

from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, make_operands
from tilewise.testing.torture.implementation import Implementation
from tilewise.testing.torture.trial import Got, Trial

Group = Literal["numbers", "edges", "layouts", "sizes", "determinism", "graphs", "streams"]
Need = Literal["backward", "lse", "deterministic", "batch_invariant"]
Run = Callable[[Trial, Case], None]
_LACKING: dict[Need, str] = {
    "backward": "has no backward pass",
    "lse": "returns no lse",
    "deterministic": "does not claim the same bits in every run",
    "batch_invariant": "does not claim the same bits in any batch",
}


@dataclass(frozen=True)
class Check:
    """One check of the suite.

    Attributes:
        name: what results call it.
        group: what it is about.
        about: what it does and demands, in a phrase.
        case: the problem.
        run: does it. Returning is passing; it raises :class:`~tilewise.testing.torture.trial.Wrong` or
            :class:`~tilewise.testing.torture.trial.NotApplicable`.
        issue: address of the public report that it comes from; None = there is none that we know.
        case_on_gpu: the problem on a GPU, if that is another one, longer as a rule.
        gpu_only: why it cannot be done on a CPU, as a sentence; "" = it can.
        needs: what the implementation has to declare beside what the case needs.
        dtypes: in which its numbers can be written; () = any.
        elements: how many elements of the dtype are held at once, about, where that is much; 0 = few.
    """

    name: str
    group: Group
    about: str
    case: Case
    run: Run
    issue: str | None = None
    case_on_gpu: Case | None = None
    gpu_only: str = ""
    needs: tuple[Need, ...] = ()
    dtypes: Collection[torch.dtype] = ()
    elements: int = 0

    def case_on(self, device: torch.device) -> Case:
        """Return the problem on this device."""
        return self.case_on_gpu if device.type == "cuda" and self.case_on_gpu is not None else self.case

    def lacking(self, implementation: Implementation, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the check does not apply, as a sentence, or None; the memory it takes is not asked."""
        if self.gpu_only and device.type != "cuda":
            return self.gpu_only
        if self.dtypes and dtype not in self.dtypes:
            return f"its numbers are not to be written in {str(dtype).removeprefix('torch.')}"
        lacking = next((_LACKING[need] for need in self.needs if not getattr(implementation.takes, need)), None)
        return lacking or implementation.lacking(self.case_on(device), dtype)


def held_to_budget(change: Callable[[Inputs, Case], Inputs] | None = None,
                   also: Callable[[Case, Inputs, Got], None] | None = None) -> Run:
    """Return what runs both passes and holds all results against float64.

    Of a boolean mask, each row sees its first key, unless ``also`` is there to look at rows that see none.

    Args:
        change: makes the tensors of the check from those drawn for the case.
        also: demands more of the results.
    """
    def run(trial: Trial, case: Case) -> None:
        inputs = trial.inputs(case)
        if change is not None:
            inputs = change(inputs, case)
        mask = make_operands(case, trial.dtype, trial.device).mask
        if mask is not None and also is None:
            mask = mask.clone()
            mask[..., 0] = True
        got = trial.results(case, inputs, mask=mask)
        trial.judge(case, inputs, got, mask=mask)
        if also is not None:
            also(case, inputs, got)

    return run
