"""The same bits again, where an implementation claims them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tilewise.masks import causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.torture.checks import Check, Need, Run
from tilewise.testing.torture.trial import Got, Trial, demand_equal

_RUNS = 5


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Ask torch for deterministic algorithms; what lacks one only warns, since its bits are looked at anyway."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=warns)


def _same_bits(trial: Trial, case: Case, *, backward: bool) -> None:
    inputs = trial.inputs(case)
    with deterministic_algorithms():
        first = trial.results(case, inputs, backward=backward)
        for number in range(2, _RUNS + 1):
            again = trial.results(case, inputs, backward=backward)
            demand_equal(_pairs(first, again), f"in run {number} than in the first")


def _same_bits_in_any_batch(trial: Trial, case: Case) -> None:
    """Compare a batch of three with each of its entries alone."""
    inputs = trial.inputs(case)
    with deterministic_algorithms():
        together = trial.results(case, inputs)
        for entry in range(case.b):
            part = slice(entry, entry + 1)
            alone = trial.results(replace(case, b=1), Inputs(*(tensor[part] for tensor in inputs)))
            of_entry = Got(**{name: tensor[part] for name, tensor in together.items()})
            demand_equal(_pairs(of_entry, alone), f"of batch entry {entry} in its batch than alone")


def _pairs(one: Got, other: Got) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return [(name, tensor, getattr(other, name)) for name, tensor in one.items()]


def _forward_bits(trial: Trial, case: Case) -> None:
    _same_bits(trial, case, backward=False)


def _all_bits(trial: Trial, case: Case) -> None:
    _same_bits(trial, case, backward=True)


def _check(name: str, about: str, run: Run, *needs: Need, b: int = 2, hq: int = 4, hk: int = 4) -> Check:
    case = Case(name, b=b, hq=hq, hk=hk, sq=192, sk=192, mask=causal())
    return Check(name, "determinism", about, case, run, case_on_gpu=replace(case, sq=1088, sk=1088), needs=needs)


CHECKS: tuple[Check, ...] = (
    _check("same_bits_forward", "five forward passes have the same bits", _forward_bits, "deterministic"),
    _check("same_bits_of_gradients", "five backward passes have the same bits", _all_bits, "deterministic",
           "backward"),
    _check("same_bits_of_grouped_heads", "the same with grouped heads, whose dk and dv are sums over heads", _all_bits,
           "deterministic", "backward", hk=2),
    _check("same_bits_in_any_batch", "a batch entry has the same bits alone and beside others",
           _same_bits_in_any_batch, "batch_invariant", b=3),
)
