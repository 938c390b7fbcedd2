"""What the launches of both passes share: compiler options, mask bounds, scales, the tile scheduler's counter."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tilewise.kernels.driver import raw_stream
from tilewise.kernels.hopper.arguments import BiasPlace, DropoutNumbers, FirstPair, ScoreFunction
from tilewise.problem import AttentionProblem
from tilewise.problem.options import DRAWS

# Counters allocated for captured graphs, and those of each device that are left: each is given out once.
_SPARES = 4096
_SPARE: dict[torch.device, Iterator[torch.Tensor]] = {}
STREAM_OF_THREAD = 2  # cudaStreamPerThread: one handle, by which each thread of the host means a stream of its own
# A warpgroup is four warps. Contracting a·b + c into one rounding is what the softmax's cost counts on; Triton 3.10
# changes the default, and 3.9 warns of it.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def gluon_dtype(dtype: torch.dtype) -> Any:
    """Return Gluon's name of a dtype that the kernels read or write."""
    from triton.experimental.gluon import language as gl

    return {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]


def bounds_of(problem: AttentionProblem) -> tuple[int | None, int | None, int | None, bool]:
    """Return the band's lower and upper bound, the number of variable-length sequences, and whether the kernel aligns.

    A bound that does not exist is None, and so is the number where lengths are not on the device. Keys count from the
    first visible one: those before it are not read. With lengths on the device the bounds are those of a diagonal
    through a sequence's first query and key, and the last item says whether the kernel moves it to the last ones
    (bottom-right alignment); ALiBi's distances count from it, too. Beside a mask plan there are no bounds.
    """
    if not problem.is_banded:
        return None, None, None, False
    mask, sequences, first = problem.mask, problem.sequences, problem.seen_keys.start
    if sequences.are_data:
        return (None if mask.left is None else -mask.left, mask.right, problem.pairs[0],
                (mask.is_bounded or problem.scores.alibi_slopes is not None) and mask.alignment == "bottom_right")
    band = problem.band
    return (None if band.lower is None else band.lower - first, None if band.upper is None else band.upper - first,
            None, False)


def scaling_of(problem: AttentionProblem) -> tuple[float, float | None]:
    """Return what scores, or their tanh, are multiplied by, to base 2, and with a softcap what precedes tanh."""
    log2e, softcap = math.log2(math.e), problem.scores.softcap
    if softcap is None:
        return problem.scale * log2e, None
    return softcap * log2e, 2.0 * log2e * problem.scale / softcap


def diagonal_of(problem: AttentionProblem) -> int | None:
    """Return the key that query 0 stands on, counted from the first one that is seen (arguments.ForwardNumbers)."""
    if problem.scores.alibi_slopes is None or problem.sequences.are_data:
        return None
    return problem.mask.offset(problem.sq, problem.sk) - problem.seen_keys.start


def dropout_of(problem: AttentionProblem, first_query: int) -> DropoutNumbers:
    """Return a kernel's numbers for dropout, whose rows count from a query."""
    dropout_p = problem.scores.dropout_p
    if not dropout_p:
        return DropoutNumbers()
    return DropoutNumbers(int(dropout_p * DRAWS), 2.0 * (1.0 - dropout_p), 1.0 / (1.0 - dropout_p), first_query,
                          problem.seen_keys.start)


def function_of(problem: AttentionProblem) -> ScoreFunction:
    """Return a call's score function and its derivative, without tensors."""
    spec = problem.scores.score_function
    if spec is None:
        return ScoreFunction()
    return ScoreFunction(spec.code.triton, spec.code.derivative)


def with_tensors(function: ScoreFunction, tensors: Sequence[Any]) -> ScoreFunction:
    """Return a function with its tensors, of which torch's operators make a list.

    Without a function they stay None: Triton would pass an empty tuple on as an argument.
    """
    return function if function.call is None else function._replace(tensors=tuple(tensors))


def function_flags(problem: AttentionProblem) -> dict[str, bool]:
    """Return what is fixed of a score function when a kernel is compiled."""
    has_function = problem.scores.score_function is not None
    return {"HAS_FUNCTION": has_function, "INT64": has_function and problem.positions_are_int64}


def first_pair_of(problem: AttentionProblem, first_query: int) -> FirstPair:
    """Return where the queries and keys of a kernel begin whose rows count from a query."""
    if problem.scores.score_function is None:
        return FirstPair()
    return FirstPair(first_query, problem.seen_keys.start)


def counter_of(device: torch.device) -> torch.Tensor:
    """Return the tile scheduler's counter: an int32 zero that a launch counts up from and resets to zero.

    Launches of one stream run one after another and share a counter; a handle that stands for several streams gets a
    new one each time. A launch in a captured graph may run beside anything, and gets a counter of its own that was
    cleared before: to clear it inside the graph would be a launch in every replay. Replays of a graph run one after
    another if it was instantiated once, as torch does.
    """
    if not torch.cuda.is_current_stream_capturing():
        stream = raw_stream()(device.index)
        if stream != STREAM_OF_THREAD:
            return _counter_of_stream(device, stream)
        return torch.zeros(1, dtype=torch.int32, device=device)
    spare = next(_SPARE.get(device, iter(())), None)
    return torch.zeros(1, dtype=torch.int32, device=device) if spare is None else spare


@functools.cache
def _counter_of_stream(device: torch.device, stream: int) -> torch.Tensor:
    """Make a stream's counter; with a device's first one, those for graphs, which may be replayed on any stream."""
    del stream
    if device not in _SPARE:
        cleared = torch.zeros(_SPARES, 4, dtype=torch.int32, device=device)  # 16 bytes each, as is what torch allocates
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once, beside which the kernel is compiled
        _SPARE[device] = map(cleared[:, :1].__getitem__, range(_SPARES))
    return torch.zeros(1, dtype=torch.int32, device=device)


def place_of_bias(problem: AttentionProblem) -> BiasPlace | None:
    """Return which part of the bias a call reads; an expanded dim is a shared one."""
    bias = problem.scores.bias
    if bias is None:
        return None
    own_batch, own_head = (int(size > 1 and stride != 0)
                           for size, stride in zip(bias.shape[:2], bias.strides[:2], strict=True))
    return BiasPlace(own_batch, own_head, problem.seen_keys.start)
