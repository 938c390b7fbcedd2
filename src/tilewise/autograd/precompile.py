"""Compiling a backward pass beside its forward pass: a first training step waits for the longer one, not for both.

A call whose inputs need a gradient has :func:`begin` called before a kernel of its forward pass is compiled
(:mod:`tilewise.kernels.compiling`). From there a thread runs the host code of the backward pass up to its launches, on
tensors without memory. It takes the backward pass for the usual one: dout lies in memory as out does, and lse has no
gradient. What another one needs beside is compiled when it is called, as everything is where nothing was precompiled.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise.backends._support.current import is_current
from tilewise.backends._support.hopper import RUN_ON_GPU, triton_version
from tilewise.backends._support.memory import Form, on_meta
from tilewise.backends.base import Backend, Needs, PrecompilingBackend, Saved
from tilewise.kernels.hooks import compile_only
from tilewise.problem import AttentionProblem, are_aligned
from tilewise.problem.options import NO_OPERANDS, Operands

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v
Choose = Callable[[], tuple[AttentionProblem, Backend]]
_Forms = tuple[list[Form | None], list[list[Form]]]  # of operands that are one tensor or None, of those of functions


def begin(inputs: Inputs, operands: Operands, choose: Choose) -> None:
    """Begin to compile the backward pass of a call in a thread, where that can be done and will be used.

    Args:
        inputs, operands: of the call; the thread keeps none of these tensors.
        choose: returns the problem of the backward pass, without a gradient of lse, and the backend that serves it.
    """
    if not inputs[0].is_cuda or torch.version.hip is not None or not are_aligned(*inputs, *operands.present):
        return
    # Kernels of a later Triton are run before they are chosen (self_check.py): that is for the backward pass to do.
    if triton_version() not in RUN_ON_GPU or torch.cuda.is_current_stream_capturing() or not _is_running():
        return
    from triton.runtime import driver

    driver.active.get_current_target()  # what Triton makes once for a process is made here, not in two threads at once
    needs = Needs(inputs[0].requires_grad, inputs[1].requires_grad or inputs[2].requires_grad,
                  *[own is not None and own.requires_grad
                    for own in (operands.bias, operands.alibi_slopes, operands.sinks)])
    _start(partial(_compile, [_form_of(tensor) for tensor in inputs], _forms_of(operands), choose, needs))


def _compile(inputs: list[Form], operands: _Forms | None, choose: Choose, needs: Needs) -> None:
    """Find the kernels that the backward pass launches, and compile each in a thread."""
    problem, backend = choose()
    if not isinstance(backend, PrecompilingBackend):
        return
    q, k, v = (on_meta(*form) for form in inputs)
    rows = (problem.b, problem.hq, problem.sq)
    out, dout = (on_meta((*rows, problem.dv), problem.out_strides, problem.dtype) for _ in range(2))
    lse = on_meta(rows, (problem.hq * problem.sq, problem.sq, 1), problem.lse_dtype)
    saved = Saved(q, k, v, out, lse, _operands_of(operands))
    with _current(problem.device), torch.no_grad(), compile_only(partial(_take, problem.device)):
        backend.precompile_backward(problem, saved, dout, needs)


def _take(device: torch.device, name: str, compile_kernel: Callable[[], Any], file: Path | None = None) -> None:
    """Compile a kernel of Triton's in a thread of its own."""

    def compile_there() -> None:
        with _current(device):
            compile_kernel()

    if file is None:
        _start(compile_there)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)


def _start(work: Callable[[], None]) -> None:
    """Start a thread, if there is one to be had.

    No daemon, which the interpreter's exit would leave inside of the compiler while that is taken down: the exit waits.
    """
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_quietly, args=(work,), name="tilewise-precompile").start()


def _quietly(work: Callable[[], None]) -> None:
    """Do it unless the interpreter ends; what it raises the backward pass raises again where it is called."""
    if _is_running():
        with contextlib.suppress(Exception):
            work()


def _is_running() -> bool:
    """Whether the interpreter runs on; when it ends it waits for threads, with the main one ended."""
    return threading.main_thread().is_alive()


def _form_of(tensor: torch.Tensor) -> Form:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _forms_of(operands: Operands) -> _Forms | None:
    if operands is NO_OPERANDS:  # by which a plain call is known
        return None
    return ([None if own is None else _form_of(own) for own in operands.alone],
            [[_form_of(own) for own in tensors] for tensors in (operands.score_tensors, operands.mask_tensors)])


def _operands_of(forms: _Forms | None) -> Operands:
    if forms is None:
        return NO_OPERANDS
    alone, of_functions = forms
    return Operands._make([*[None if form is None else on_meta(*form) for form in alone],
                           *[tuple([on_meta(*form) for form in own]) for own in of_functions]])
