"""CUDA streams: a call waits for its inputs, and for nothing that others hold."""

from typing import Any

import torch

from tilewise.masks import causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.torture import issues
from tilewise.testing.torture.checks import Check, Need, Run
from tilewise.testing.torture.trial import Got, Trial

_CUDA: Any = torch.cuda  # whose stubs leave its streams untyped
_GPU_ONLY = "CUDA streams are for GPUs"
_A_WHILE = 20_000_000  # cycles, about 10 ms: far longer than the host takes to launch a call
_STREAMS, _ROUNDS = 4, 5


def _unfilled(inputs: Inputs) -> list[torch.Tensor]:
    """Return tensors of NaN for q, k, v and dout."""
    return [torch.full_like(tensor, float("nan")) for tensor in inputs[:4]]


def _training_step(trial: Trial, case: Case, tensors: list[torch.Tensor], given: Inputs) -> Got:
    """Fill the tensors behind a long wait of the current stream, and call at once, without a wait of the host."""
    _CUDA._sleep(_A_WHILE)
    for tensor, values in zip(tensors, given, strict=False):
        tensor.copy_(values)
    backward = trial.implementation.takes.backward
    q, k, v = (tensor.detach().requires_grad_(backward) for tensor in tensors[:3])
    out, _ = trial.attend(case, q, k, v)
    if not backward:
        return Got(out.detach())
    return Got(out.detach(), None, *torch.autograd.grad(out, (q, k, v), tensors[3]))


def _side_stream(trial: Trial, case: Case) -> None:
    """Make the inputs on a stream beside and call there: what is launched elsewhere reads NaN."""
    inputs = trial.inputs(case)
    tensors, stream = _unfilled(inputs), _CUDA.Stream()
    _CUDA.synchronize()

    def work() -> Got:
        with _CUDA.stream(stream):
            return _training_step(trial, case, tensors, inputs)

    trial.judge(case, inputs, trial.guarded(work))


def _handed_over(trial: Trial, case: Case) -> None:
    """Make the inputs on one stream, call on another that waits for its event, and read on a third that waits too."""
    inputs = trial.inputs(case)
    tensors = _unfilled(inputs)
    makers, callers, readers = (_CUDA.Stream() for _ in range(3))
    _CUDA.synchronize()

    def work() -> Got:
        with _CUDA.stream(makers):
            _CUDA._sleep(_A_WHILE)
            for tensor, values in zip(tensors, inputs, strict=False):
                tensor.copy_(values)
        callers.wait_event(makers.record_event())
        with _CUDA.stream(callers):
            q, k, v = (tensor.detach() for tensor in tensors[:3])
            out, _ = trial.attend(case, q, k, v)
        readers.wait_event(callers.record_event())
        with _CUDA.stream(readers):
            return Got(out.clone())

    trial.judge(case, inputs, trial.guarded(work))


def _at_once(trial: Trial, case: Case) -> None:
    """Run calls of other inputs on four streams at once: what they share, as a counter, would mix them up."""
    given = [trial.inputs(case, seed) for seed in range(_STREAMS)]
    tensors = [_unfilled(inputs) for inputs in given]
    streams = [_CUDA.Stream() for _ in given]
    _CUDA.synchronize()

    def work() -> list[list[Got]]:
        rounds = []
        for _ in range(_ROUNDS):
            made = []
            for number, stream in enumerate(streams):
                with _CUDA.stream(stream):
                    made.append(_training_step(trial, case, tensors[number], given[number]))
            rounds.append(made)
        return rounds

    for made in trial.guarded(work):
        for inputs, got in zip(given, made, strict=True):
            trial.judge(case, inputs, got)


def _slow_producer(trial: Trial, case: Case) -> None:
    """Write dout by the kernel right ahead of the backward pass, and NaN into it before, twenty times over."""
    inputs = trial.inputs(case)
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    dout = torch.empty_like(inputs.dout)

    def work() -> list[Got]:
        made = []
        for _ in range(20):
            out, _ = trial.attend(case, q, k, v)
            dout.fill_(float("nan"))
            _CUDA._sleep(_A_WHILE // 100)
            dout.copy_(inputs.dout)
            made.append(Got(out.detach(), None, *torch.autograd.grad(out, (q, k, v), dout)))
        return made

    for got in trial.guarded(work):
        trial.judge(case, inputs, got)


def _check(name: str, about: str, run: Run, *needs: Need, issue: str | None = None) -> Check:
    case = Case(name, b=2, hq=4, hk=4, sq=320, sk=320, mask=causal())
    return Check(name, "streams", about, case, run, issue, gpu_only=_GPU_ONLY, needs=needs)


CHECKS: tuple[Check, ...] = (
    _check("side_stream", "inputs made on a stream beside, and the call there", _side_stream),
    _check("handed_over", "inputs of one stream, the call on a second, the result read on a third, with events",
           _handed_over),
    _check("streams_at_once", "calls of other inputs on four streams at once", _at_once),
    _check("slow_producer", "dout written right ahead of the backward pass, twenty times", _slow_producer, "backward",
           issue=issues.SLOW_PRODUCER),
)
