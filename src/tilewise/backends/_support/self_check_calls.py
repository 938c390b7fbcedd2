"""Small calls of the Gluon kernels, and how far their results are from dense attention in float64."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from tilewise.kernels.hopper.backward.config import HopperDbiasConfig
from tilewise.kernels.hopper.backward.launch_d256 import backward_launch
from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias
from tilewise.kernels.hopper.forward.launch import HopperForward
from tilewise.kernels.triton.launch import modifiers_of
from tilewise.masks import causal
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import Operands
from tilewise.tuning.device import device_spec
from tilewise.tuning.schedules_hopper import schedule_on_grid
from tilewise.tuning.select import backward_schedule, hopper_backward_config, hopper_forward_config

Family = Literal["forward", "backward", "dbias"]
Tensors = dict[str, torch.Tensor]

# Head dims (of q and k, of v) of each family's calls: one for each kernel, as they differ by head dim.
CALLS: dict[Family, tuple[tuple[int, int], ...]] = {
    "forward": ((64, 64), (128, 128), (256, 256)),
    "backward": ((64, 64), (128, 128), (192, 128), (256, 256)),
    "dbias": ((128, 128),),
}
# Those whose backward pass also runs with a group's query heads split among tiles, which calls with few heads of k do:
# the main kernel is another build then, which writes float32, and a kernel sums what it writes.
SPLIT: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (256, 256))
# Two query heads share one of keys. The length is no multiple of a tile, and enough for steps with and without a mask
# and for a frozen row maximum; rows of the bias are multiples of 16 bytes.
_B, _HQ, _HK, _LENGTH = 2, 2, 1, 616
# Few CTAs, so that each computes several tiles one after another, as in a long call.
_CTAS = 4
# A block of a result's rows may be so many times as far from float64, by its largest and by its mean error, as dense
# attention is that rounds each step to the inputs' dtype. The tests allow 2 for results and 3 for gradients, of the
# worst of eight orders of summation; here there is one order. By blocks, since causal gradients are largest where few
# pairs are visible, and what is allowed there would hide a wrong tile elsewhere.
FACTOR = 4.0
_BLOCKS = 8
_LONGEST_WAIT = 60.0  # seconds; the kernels take less than a millisecond


class Call(NamedTuple):
    """One call: the problem, one whose config it takes, its tensors by name, and splits of a group (backward)."""

    problem: AttentionProblem
    usual: AttentionProblem
    tensors: Tensors
    group_splits: int = 1


def deviation(family: Family, dims: tuple[int, int], device: torch.device) -> str | None:
    """Make a call of the family on the device; return which result is too far off and by how much, None if none is.

    Raises:
        TimeoutError: the kernels do not end.
        Exception: what the compiler or the driver raises.
    """
    inputs = _inputs(dims, with_bias=family == "dbias")
    exact, rounded = (dense(inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
    given = inputs | {"lse": exact["lse"].float(), "delta": exact["delta"].float()}
    call = _call({name: tensor.to(device) for name, tensor in given.items()})
    for group_splits in (1, _HQ // _HK) if family == "backward" and dims in SPLIT else (1,):
        results = _LAUNCHES[family](call._replace(group_splits=group_splits))
        _wait(device)
        wrong = _first_wrong(results, exact, rounded)
        if wrong is not None:
            what, number, allowed = wrong
            splits = "" if group_splits == 1 else f", and {group_splits} splits of a group,"
            return f"the {what} at head dims {dims[0]} and {dims[1]}{splits} is {number:.2g}, allowed {allowed:.2g}"
    return None


def _first_wrong(results: Tensors, exact: Tensors, rounded: Tensors) -> tuple[str, float, float] | None:
    """Return which error of which result is too large, it and what is allowed; None if none is."""
    for name, result in results.items():
        for what, of_result, of_rounded in zip(("largest", "mean"), _errors(result.cpu(), exact[name]),
                                               _errors(rounded[name], exact[name]), strict=True):
            allowed = FACTOR * of_rounded
            wrong = (~(of_result <= allowed)).nonzero()  # NaN is no result
            if len(wrong):
                block = int(wrong[0])
                return f"{what} error of {name}", float(of_result[block]), float(allowed[block])
    return None


def dense(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Return dense causal attention and its gradients, in float64 with each step rounded to ``dtype``.

    Args:
        inputs: q, k, v and dout, (b, h, s, d) in any strides, and perhaps bias, (1, hq, s, s).
        dtype: float64: nothing is rounded.
    """
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).double()

    q, k, v, dout = (inputs[name].double() for name in ("q", "k", "v", "dout"))
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = step(q @ k.mT) * scale
    if "bias" in inputs:
        scores = scores + inputs["bias"].double()
    scores = scores.masked_fill(~causal().visible(q.shape[2], k.shape[2]), float("-inf"))
    lse = scores.logsumexp(-1)
    probs = step((scores - lse[..., None]).exp())
    out = step(probs @ v)
    delta = (out * dout).sum(-1)
    dscores = step(probs * (step(dout @ v.mT) - delta[..., None]))
    dk, dv = (torch.unflatten(each.mT @ rows, 1, (-1, group)).sum(2)
              for each, rows in ((dscores, q * scale), (probs, dout)))
    return {"out": out, "lse": lse, "delta": delta, "dq": step(dscores @ k * scale), "dk": step(dk), "dv": step(dv),
            "dbias": step(dscores.sum(0, keepdim=True))}


def _inputs(dims: tuple[int, int], *, with_bias: bool) -> Tensors:
    """Draw q, k, v and dout on the CPU, stored as (b, s, h, d), and perhaps a bias that the batch shares."""
    d, dv = dims
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16()

    widths = {"q": (_HQ, d), "k": (_HK, d), "v": (_HK, dv), "dout": (_HQ, dv)}
    made = {name: drawn(_B, _LENGTH, *width).transpose(1, 2) for name, width in widths.items()}
    return made | ({"bias": drawn(1, _HQ, _LENGTH, _LENGTH)} if with_bias else {})


def _call(tensors: Tensors) -> Call:
    """Describe the call, and a usual one of training, whose config is the one that matters."""
    problem = AttentionProblem.from_tensors(tensors["q"], tensors["k"], tensors["v"],
                                            Operands(bias=tensors.get("bias")), mask=causal())
    return Call(problem, replace(problem, b=8, hq=32, hk=16, sq=4096, sk=4096), tensors)


def _forward(call: Call) -> Tensors:
    problem, tensors = call.problem, call.tensors
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    config = hopper_forward_config(call.usual, device_spec(problem.device))
    launch = HopperForward(problem, config, schedule_on_grid(problem, config), _CTAS)
    shape = (problem.b, problem.hq, problem.sq, problem.dv)
    made = {"out": q.new_empty_strided(shape, problem.out_strides), "lse": torch.empty_like(tensors["lse"])}
    _twice(made, lambda: launch(lambda: (q, k, v), addresses, made["out"], made["lse"]))
    return made


def _backward(call: Call) -> Tensors:
    problem, usual, tensors = (call.problem.backward(lse_grad=False), call.usual.backward(lse_grad=False),
                               call.tensors)
    names = "q", "k", "v", "dout", "lse", "delta"
    made = {f"d{name}": torch.empty_strided(tensors[name].shape, dense_strides(tensors[name].shape,
                                                                              tensors[name].stride()),
                                            dtype=problem.dtype, device=problem.device) for name in "qkv"}
    config = hopper_backward_config(usual, device_spec(problem.device))
    schedule = backward_schedule(problem, config, call.group_splits)
    launch = backward_launch(problem, config, schedule, made["dq"].stride(), _CTAS)
    _twice(made, lambda: launch(*(tensors[name] for name in names), *made.values()))
    return made


def _dbias(call: Call) -> Tensors:
    problem, tensors = call.problem.backward(lse_grad=False), call.tensors
    names = "q", "k", "v", "dout", "lse", "delta"
    launch = HopperDbias(problem, HopperDbiasConfig(2, 2), _CTAS)
    modifiers = modifiers_of(problem, Operands(bias=tensors["bias"]))
    made = {"dbias": torch.empty_like(tensors["bias"])}
    _twice(made, lambda: launch(*(tensors[name] for name in names), made["dbias"], modifiers))
    return made


_LAUNCHES: dict[Family, Callable[[Call], Tensors]] = {"forward": _forward, "backward": _backward, "dbias": _dbias}


def _twice(made: Tensors, launch: Callable[[], None]) -> None:
    """Launch as a first call does, through Triton, and as every later one; what is not written stays NaN."""
    for _ in range(2):
        for result in made.values():
            result.fill_(float("nan"))
        launch()


def _wait(device: torch.device) -> None:
    """Wait for the kernels, but not for ever: machine code that is wrong may wait for what never comes."""
    new_event: Any = torch.cuda.Event  # untyped in torch
    event = new_event()
    event.record(torch.cuda.current_stream(device))
    end = time.monotonic() + _LONGEST_WAIT
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the kernels did not end within {_LONGEST_WAIT:g} s")
        time.sleep(0.001)


def _errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and the mean error of each block of rows, of each head and batch entry."""
    blocks = (result.double() - exact).abs().reshape(len(exact) * exact.shape[1] * _BLOCKS, -1)
    return blocks.amax(1), blocks.mean(1)
