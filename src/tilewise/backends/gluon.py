"""Launches the Gluon kernels: Hopper GPUs, 16-bit calls."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends._support.bias_gradients import dq_launches
from tilewise.backends._support.current import is_current
from tilewise.backends._support.hopper import awaits_dbias_check, untrusted, wrong_triton
from tilewise.backends._support.mask_plans import backward_planners, mask_plan, planner_of, too_large
from tilewise.backends._support.memory import Allocate, Form, allocator, forms_of_gradients, forms_of_results
from tilewise.backends._support.triton import precision_of
from tilewise.backends.base import BoundBackward, BoundForward, Gradients, Needs, Results, Saved, Three
from tilewise.kernels.hopper.arguments import NO_BACKWARD_OPERANDS, BackwardOperands, Lengths
from tilewise.kernels.hopper.backward.launch import HopperBackward
from tilewise.kernels.hopper.backward.launch_d256 import HopperBackwardApart, backward_launch
from tilewise.kernels.hopper.backward.launch_splits import HopperBackwardOfSplits
from tilewise.kernels.hopper.forward.launch import NO_PLAN, HopperForward
from tilewise.kernels.triton.arguments import Modifiers
from tilewise.kernels.triton.launch import Launch, modifiers_of, takes_descriptors
from tilewise.kernels.triton.operand_gradients import OperandGradients
from tilewise.problem import (
    AttentionProblem,
    Sizes,
    alignment_of,
    are_aligned,
    dense_strides,
    has_legal_bias_strides,
    has_legal_strides,
)
from tilewise.problem.options import DRAW_SPAN, LARGE_SOFTCAP, NO_OPERANDS, NO_OPTIONS, Operands
from tilewise.support.caches import registered
from tilewise.tuning.device import device_spec
from tilewise.tuning.select import (
    backward_schedule,
    choose_group_splits,
    delta_config,
    forward_schedule,
    hopper_backward_config,
    hopper_forward_config,
    triton_config,
    wants_descriptors,
)

if TYPE_CHECKING:
    from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias
    from tilewise.kernels.triton.bias_gradient import BiasGradientSums
    from tilewise.kernels.triton.mask_plan import MaskPlanner

# tanh errs by up to 2^-21 near 0, four times as much as Triton's (softmax.squashed).
LARGEST_SOFTCAP = LARGE_SOFTCAP / 4
WIDEST = 256
WIDEST_WITH_EVERY_OPTION = 128  # in the backward pass: the kernels of wider heads lack some options
_EVERY = Needs()


class GluonBackend:
    """Warp-specialised kernels for sm_90.

    All but dq is the same on every run; dq is where a deterministic result is requested, where CTAs own heads, or
    where dq has a kernel of its own; else it is summed in no fixed order.
    """

    name = "gluon"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return the reason against, if there is one."""
        return (_wrong_machine(problem) or _wrong_dtype_or_dims(problem) or _wrong_options(problem)
                or _wrong_strides(problem) or untrusted(problem.direction, problem.device))

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`. A bias that begins where TMA cannot move it is copied first."""
        plan = _plan(problem)
        if operands.bias is not None and plan.launch.place_of_bias is not None and not are_aligned(operands.bias):
            problem, operands = _with_dense_bias(problem, operands, operands.bias)
            plan = _plan(problem)
        with contextlib.nullcontext() if is_current(problem.device) else torch.cuda.device(problem.device):
            return Results(*plan.attend(lambda: (q, k, v), (q.data_ptr(), k.data_ptr(), v.data_ptr()), operands))

    def bind_forward(self, problem: AttentionProblem) -> BoundForward:
        """See :class:`tilewise.backends.base.BindingBackend`."""
        attend = _plan(problem).attend
        return lambda tensors, addresses, operands: attend(tensors, addresses, operands, aligned=True)

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = _EVERY) -> Gradients:
        """See :class:`tilewise.backends.base.Backend`.

        A dout that TMA cannot move is copied first, and so is a bias that begins where it cannot.
        """
        q, k, v, out, lse, operands = saved
        if not (are_aligned(dout) and _is_movable(dout)):
            dout = _movable(dout, problem)
        if operands.bias is not None and not are_aligned(operands.bias):
            problem, operands = _with_dense_bias(problem, operands, operands.bias)
        # A plan holds a choice of kernels, and is kept unless a later call may choose otherwise.
        plan_of = _backward_plan.__wrapped__ if needs.dbias and awaits_dbias_check(problem) else _backward_plan
        plan = plan_of(problem, (out.stride(), dout.stride(), None if dlse is None else dlse.stride()),
                       alignment_of([tensor.data_ptr() for tensor in (
                           out, lse, *(() if dlse is None else (dlse,)), *operands.present)]),
                       needs.dalibi_slopes, needs.dbias)
        with contextlib.nullcontext() if is_current(problem.device) else torch.cuda.device(problem.device):
            modifiers = plan.fixed if plan.fixed or plan.launch.takes_out else modifiers_of(problem, operands)
            dq, dk, dv, delta = plan.differentiate((q, k, v, out, lse, dout, dlse), modifiers, operands)
            made = (dq if needs.dq else None, *((dk, dv) if needs.dkv else (None, None)))
            if not (needs.dsinks or needs.dalibi_slopes or needs.dbias):
                return Gradients(*made)
            sums = OperandGradients(problem, operands, dbias=needs.dbias, dalibi_slopes=needs.dalibi_slopes,
                                    dsinks=needs.dsinks)
            plan.sum_up((q, k, v, dout, lse, delta), dq, sums, modifiers)
            return Gradients(*made, *sums.gradients(lse, delta))

    def bind_backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                      needs: Needs) -> BoundBackward:
        """See :class:`tilewise.backends.base.BindingBackend`."""
        moves = _is_movable(dout)
        plan = _backward_plan(problem, (saved.out.stride(), dout.stride() if moves else problem.out_strides,
                                        None if dlse is None else dlse.stride()), (True,) * (2 if dlse is None else 3))

        def differentiate(tensors: tuple[Any, ...], addresses: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
            if not moves:
                tensors = (*tensors[:5], _movable(tensors[5], problem), tensors[6])
            return plan.differentiate(tensors, plan.fixed)[:3]

        return differentiate


@dataclass(frozen=True)
class _Plan:
    """What allocates, how out and lse lie in memory, and the launch.

    combine: with split-KV how the partial results lie in memory, and the launch that combines them; else None.
    planner: builds the mask plan where the mask is no band, else None. max_logit: whether it is wanted.
    """

    allocate: Allocate
    out: Form
    lse: Form
    launch: HopperForward
    combine: tuple[Form, Launch] | None
    planner: "MaskPlanner | None"
    max_logit: bool

    def attend(self, tensors: Callable[[], Three], addresses: tuple[int, int, int], operands: Operands,
               aligned: bool = False) -> tuple[torch.Tensor, ...]:
        """Return out, lse and, where it is wanted, max_logit; launched on the current device, that of the tensors.

        Args:
            tensors: returns q, k and v.
            addresses: where these lie.
            operands: of the call.
            aligned: whether each operand, too, is known to begin at a multiple of 16 bytes.
        """
        allocate = self.allocate
        out, lse = allocate(*self.out), allocate(*self.lse)
        if self.combine is not None:
            form, combine = self.combine
            partial = allocate(*form)
            self.launch(tensors, addresses, out, lse, more=partial)
            combine(partial, out, lse, operands.sinks, self.launch.sinks_stride)
        else:
            plan = NO_PLAN if self.planner is None else mask_plan(self.planner, operands, allocate)
            largest = allocate(*self.lse) if self.max_logit else None
            self.launch(tensors, addresses, out, lse, operands, largest, aligned, plan)
            if largest is not None:
                return out, lse, largest
        return out, lse


@registered
@lru_cache(maxsize=1024)
def _plan(problem: AttentionProblem) -> _Plan:
    num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
    config = hopper_forward_config(problem, device_spec(problem.device), num_sms)
    schedule = forward_schedule(problem, config, num_sms)
    planner = planner_of(problem, rows=config.consumers, columns=config.block_n // 64, keys_first=False)
    launch = HopperForward(problem, config, schedule, num_sms, None if planner is None else planner.strides)
    combine = None
    if schedule.split_kv is not None:
        from tilewise.kernels.triton.combine import combine_splits_launch

        shape = launch.partial_shape
        combine = ((shape, (shape[1] * shape[2], shape[2], 1), torch.float32),
                   combine_splits_launch(problem, launch.split_rows, shape, overlapped=True))
    return _Plan(allocator(problem.device), *forms_of_results(problem), launch, combine, planner,
                 problem.scores.max_logit)


@dataclass(frozen=True)
class _BackwardPlan:
    """What makes memory, what dq, dk, dv and delta are, two launches, and modifiers without a tensor.

    Where delta has a kernel of its own, its launch comes first, then that of the others. planners: they build the mask
    plans where the mask is no band.
    again: the Triton kernel for dQ, which sums what few calls want on its way, the gradients of ALiBi's slopes and of a
    bias, and writes dq once more; or None. dbias: where the latter has a kernel of its own, this.
    """

    allocate: Allocate
    forms: tuple[Form, Form, Form, Form]
    delta: Launch
    launch: HopperBackward | HopperBackwardApart | HopperBackwardOfSplits
    fixed: Modifiers | None
    planners: "tuple[MaskPlanner, ...]"
    again: "Launch | BiasGradientSums | None"
    dbias: "Launch | HopperDbias | None"

    def differentiate(self, tensors: tuple[Any, ...], modifiers: Modifiers | None,
                      operands: Operands = NO_OPERANDS) -> tuple[Any, ...]:
        """Return dq, dk, dv and delta, launched on the current device, which is that of the tensors.

        delta is None where nobody else wants it. ``tensors``: q, k, v, out, lse, dout and dlse or None.
        """
        q, k, v, out, lse, dout, dlse = tensors
        allocate = self.allocate
        dq, dk, dv = [allocate(*form) for form in self.forms[:3]]
        if not self.launch.reads_all:
            for gradient in (dq, dk, dv):
                gradient.zero_()
        if self.launch.takes_out:
            self.launch(q, k, v, dout, lse, out, dq, dk, dv, operands=self._read(operands))
            return dq, dk, dv, None
        delta = allocate(*self.forms[3])
        given: tuple[Any, ...] = out, dout, out if dlse is None else dlse, delta
        self.delta(*given, modifiers)
        self.launch(q, k, v, dout, lse, delta, dq, dk, dv, operands=self._read(operands))
        return dq, dk, dv, delta

    def sum_up(self, inputs: tuple[torch.Tensor, ...], dq: torch.Tensor, sums: OperandGradients,
               modifiers: Modifiers | None) -> None:
        """Fill the buffers of gradients of operands. ``inputs``: q, k, v, dout, lse and delta."""
        pairs = sums.pairs if self.dbias is None else None
        if self.again is not None and not (sums.moments is None and pairs is None):
            self.again(*inputs, dq, None, sums.moments, pairs, None, None, modifiers)
        if self.dbias is not None and sums.pairs is not None:
            self.dbias(*inputs, sums.pairs, modifiers)

    def _read(self, operands: Operands) -> BackwardOperands:
        """Return what the launch takes beside the tensors that every call has."""
        if operands is NO_OPERANDS and not self.planners:
            return NO_BACKWARD_OPERANDS
        plans = [part for planner in self.planners for part in mask_plan(planner, operands, self.allocate)]
        return BackwardOperands(Lengths(*operands.lengths), operands.seed, slopes=operands.alibi_slopes,
                                bias=operands.bias, score_tensors=operands.score_tensors,
                                **dict(zip(("lists", "bits", "dq_lists", "dq_bits"), plans, strict=False)))


@registered
@lru_cache(maxsize=1024)
def _backward_plan(problem: AttentionProblem, incoming: tuple[Sizes, Sizes, Sizes | None],
                   alignment: tuple[bool, ...], moments: bool = False, dbias: bool = False) -> _BackwardPlan:
    # ``alignment``: a launch keeps the kernel of its first call, which counts on addresses alike. ``moments``,
    # ``dbias``: whether the kernels that sum the gradients of ALiBi's slopes and of a bias read delta, too.
    from tilewise.kernels.triton.backward import delta_launch

    strides = _gradient_strides(problem)
    num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
    config = hopper_backward_config(problem, device_spec(problem.device), num_sms)
    out_strides, dout_strides, dlse_strides = incoming
    # Nobody else wants delta: the launch may make it of out on its way.
    nobody_else = (dlse_strides is None and problem.scores.sinks is None and not moments and not dbias
                   and out_strides[-1:] == (1,))
    forms = *forms_of_gradients(problem, strides), forms_of_results(problem)[1]
    scores = problem.scores
    has_operands = bool(problem.sequences.are_data or scores.sinks or scores.mask or scores.documents_q
                        or scores.alibi_slopes or scores.bias or any(function.dtypes for function in scores.functions))
    planners = backward_planners(problem, config)
    schedule = backward_schedule(problem, config, choose_group_splits(problem, config, num_sms))
    return _BackwardPlan(allocator(problem.device), forms, delta_launch(problem, delta_config(problem), *incoming),
                         backward_launch(problem, config, schedule, strides[0], num_sms,
                                         (out_strides, dout_strides) if nobody_else else None,
                                         allocator(problem.device), tuple(planner.strides for planner in planners)),
                         None if has_operands else modifiers_of(problem, NO_OPERANDS), planners,
                         *_launches_of_sums(problem, dout_strides, strides[0], alignment, dbias))


def _launches_of_sums(
        problem: AttentionProblem, dout_strides: Sizes, dq_strides: Sizes, alignment: tuple[bool, ...],
        dbias: bool) -> "tuple[Launch | BiasGradientSums | None, Launch | HopperDbias | None]":
    """Return the Triton kernel for dQ where it sums the gradient of slopes or of a bias, and the bias's own."""
    has_slopes = problem.scores.alibi_slopes is not None
    if not dbias:
        if not has_slopes:
            return None, None
        from tilewise.kernels.triton.dq import dq_launch

        config = triton_config("dq", problem, device_spec(problem.device), descriptors=False)
        return dq_launch(problem, config, precision_of(problem.dtype), dout_strides, dq_strides), None
    descriptors = all(alignment) and wants_descriptors(problem, device_spec(problem.device)) and takes_descriptors(
        problem, problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    again, own = dq_launches(problem, precision_of(problem.dtype), dout_strides, dq_strides, descriptors=descriptors,
                             dbias=True, dq_is_made=True)
    return again if own is None or has_slopes else None, own


def _gradient_strides(problem: AttentionProblem) -> tuple[Sizes, Sizes, Sizes]:
    """Of dq, dk and dv: dense, in the order of their inputs."""
    return (dense_strides((problem.b, problem.hq, problem.sq, problem.d), problem.q_strides),
            dense_strides((problem.b, problem.hk, problem.sk, problem.d), problem.k_strides),
            dense_strides((problem.b, problem.hk, problem.sk, problem.dv), problem.v_strides))


def _wrong_machine(problem: AttentionProblem) -> str | None:
    """Hopper, and a Triton that has Gluon."""
    if problem.device.type != "cuda":
        return f"runs on Hopper GPUs (sm_90), got {problem.device}"
    arch = device_spec(problem.device).arch
    if arch != "sm_90":
        return f"runs on Hopper GPUs (sm_90), got {arch}"
    return wrong_triton()


def _wrong_dtype_or_dims(problem: AttentionProblem) -> str | None:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, got {problem.dtype}"
    if max(problem.d, problem.dv) > WIDEST:
        return f"takes head dims up to {WIDEST}, got {problem.d} and {problem.dv}"
    if problem.direction == "backward" and max(problem.d, problem.dv) > WIDEST_WITH_EVERY_OPTION:
        wanted = {"a bias": problem.scores.bias is not None,
                  "ALiBi": problem.scores.alibi_slopes is not None,
                  "a score function": problem.scores.score_function is not None}
        if any(wanted.values()):
            return (f"takes, in its backward pass, head dims up to {WIDEST_WITH_EVERY_OPTION} with "
                    f"{' and '.join(name for name, is_wanted in wanted.items() if is_wanted)}, got {problem.d} and "
                    f"{problem.dv}")
    return None


def _wrong_options(problem: AttentionProblem) -> str | None:
    of_mask = None if problem.is_banded else _wrong_mask(problem)
    return of_mask or _wrong_scores(problem) or _wrong_bias(problem) or _wrong_function(problem)


def _wrong_mask(problem: AttentionProblem) -> str | None:
    """Say why the mask, which is no band, has no plan (kernels/triton/mask_plan.py)."""
    scores = problem.scores
    got = ", ".join(part for part in (str(problem.mask), str(scores)) if part)
    if problem.sequences.are_data:
        return f"takes causal masks and windows with lengths that are data, got {got}"
    if scores.mask_function is not None and scores.mask_function.code.triton is None:
        return (f"needs a triton function, got {scores.mask_function.code.name} without one; backend='reference' takes "
                "a torch function")
    # A key that no query sees may lie among the others where query i does not stand on key i.
    if problem.mask.has_exceptions and (problem.sq != problem.sk or problem.mask.offset(problem.sq, problem.sk)):
        return (f"takes prefixes, sink tokens and chunks of as many queries as keys, got {problem.sq} and {problem.sk} "
                f"with {problem.mask}")
    if problem.direction == "backward":
        if problem.deterministic and max(problem.d, problem.dv) <= WIDEST_WITH_EVERY_OPTION:
            return (f"takes, in its backward pass, causal masks and windows where deterministic=True at head dims up "
                    f"to {WIDEST_WITH_EVERY_OPTION}, got {got}")
        if problem.distinct_masks[1] > 1 and problem.group > 1:
            return (f"takes, in its backward pass, a mask of each head's own where no heads share keys, got "
                    f"{problem.hq} and {problem.hk} heads")
    return too_large(problem)


def _wrong_scores(problem: AttentionProblem) -> str | None:
    plain = problem.scores._replace(softcap=None, sinks=None, max_logit=False, dropout_p=0.0, mask=None,
                                    documents_q=None, documents_k=None, tiles_q=None, tiles_k=None,
                                    mask_function=None, score_function=None, alibi_slopes=None, bias=None)
    if plain != NO_OPTIONS:
        return ("takes functions, bias, ALiBi, softcap, sinks and dropout and nothing else that changes scores, got "
                f"{problem.scores}")
    if problem.scores.softcap is not None and problem.scores.softcap > LARGEST_SOFTCAP:
        return f"takes softcaps up to {LARGEST_SOFTCAP:g}, got {problem.scores.softcap:g}"
    widest, mask = max(problem.d, problem.dv), problem.mask
    if (problem.scores.dropout_p and problem.sequences.are_data and mask.left is not None
            and mask.alignment == "bottom_right"
            and (problem.direction == "forward" or widest > WIDEST_WITH_EVERY_OPTION)):
        # A block begins at a multiple of 16 keys there, at up to 15 that no query sees, whose NaN the kernels let in.
        return f"takes dropout under a window where lengths are data if it is aligned at the top left, got {mask}"
    # Lengths that are data may not be known to be 0, but the tensors' are.
    if problem.is_empty or not (problem.sk and problem.pairs[0]):
        return "needs a pair that is visible, got none"
    # A tile of either begins there; in the forward pass those of queries begin with the first of all.
    firsts = problem.seeing_queries.start if problem.direction == "backward" else 0, problem.seen_keys.start
    if problem.scores.dropout_p and any(first % DRAW_SPAN for first in firsts):
        return (f"takes dropout where the first query that sees a key and the first key that is seen are multiples of "
                f"{DRAW_SPAN}, got {firsts[0]} and {firsts[1]}")
    return None


def _wrong_function(problem: AttentionProblem) -> str | None:
    """Say why a score function is not inlined."""
    function = problem.scores.score_function
    if function is None:
        return None
    code, is_backward = function.code, problem.direction == "backward"
    if code.triton is None:
        return f"needs a triton function, got {code.name} without one; backend='reference' takes a torch function"
    # Which pairs are dropped stands in the sign of P, and a derivative may be negative.
    if is_backward and problem.scores.dropout_p and code.derivative is not None:
        return f"takes, in its backward pass, dropout beside score functions without a derivative, got {problem.scores}"
    from tilewise.kernels.hopper.inlining import why_not_inlined

    return why_not_inlined(code, function.dtypes, backward=is_backward, int64=problem.positions_are_int64)


def _wrong_bias(problem: AttentionProblem) -> str | None:
    """Say why the backward kernels, to which TMA brings a bias block by block, do not take this one.

    Along a dim of batch entries or heads that share it a bias makes no step.
    """
    bias, widest = problem.scores.bias, max(problem.d, problem.dv)
    if bias is None or problem.direction == "forward":
        return None
    if problem.sequences.are_data:
        return f"takes, in its backward pass, a bias where lengths are no data, got {problem.sequences}"
    if problem.scores.dropout_p:
        return f"takes, in its backward pass, a bias without dropout, got {problem.scores}"
    if problem.deterministic and widest > 64:
        return ("takes, in its backward pass, a bias at head dims up to 64 where deterministic=True, got "
                f"{problem.d} and {problem.dv}")
    if bias.shape[2:] != (problem.sq, problem.sk):
        return (f"takes, in its backward pass, a bias of {problem.sq} queries and {problem.sk} keys, got one of "
                f"{bias.shape[2]} and {bias.shape[3]}")
    # Such a bias has its gradient of sums over queries or keys (OperandGradients), which no kernel here makes.
    if 1 in bias.shape[2:]:
        return ("takes, in its backward pass, a bias of more than one query and more than one key, got one of "
                f"{bias.shape[2]} and {bias.shape[3]}")
    if not has_legal_bias_strides(bias):
        return ("needs, in its backward pass, a bias with a last stride of 1 and others that are positive multiples of "
                f"{16 // bias.dtype.itemsize} elements, got one with {bias.strides}")
    return None


def _wrong_strides(problem: AttentionProblem) -> str | None:
    """Say which tensor TMA cannot move: it wants 16-byte multiples, but for a last stride of 1."""
    itemsize = problem.dtype.itemsize
    if not problem.aligned:
        return "needs q, k and v at addresses that are multiples of 16 bytes"
    queries, keys = (problem.b, problem.hq, problem.sq), (problem.b, problem.hk, problem.sk)
    # Some rows of packed sequences do not go by TMA, but in pieces of as many bytes, be there one row.
    moved = [("q", queries, problem.q_strides), ("k", keys, problem.k_strides), ("v", keys, problem.v_strides)]
    if problem.direction == "forward":
        moved.append(("out", queries if problem.sequences.packed is None else (2, 2, 2), problem.out_strides))
    else:
        keys = keys if problem.sequences.packed is None else (2, 2, 2)
        if max(problem.d, problem.dv) > WIDEST_WITH_EVERY_OPTION:
            queries = queries if problem.sequences.packed is None else (2, 2, 2)
        moved += zip(("dq", "dk", "dv"), (queries, keys, keys), _gradient_strides(problem), strict=True)
    for name, sizes, strides in moved:
        if not has_legal_strides(sizes, strides, itemsize):
            return (f"needs a last stride of 1 and the others positive multiples of {16 // itemsize} elements, got "
                    f"{name} with {strides}")
    return None


_known_legal_strides = registered(lru_cache(maxsize=4096)(has_legal_strides))  # dout's may change from call to call


def _is_movable(dout: torch.Tensor) -> bool:
    return _known_legal_strides(dout.shape, dout.stride(), dout.element_size())


def _movable(dout: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    return torch.empty_strided(dout.shape, problem.out_strides, dtype=dout.dtype, device=dout.device).copy_(dout)


def _with_dense_bias(problem: AttentionProblem, operands: Operands,
                     bias: torch.Tensor) -> tuple[AttentionProblem, Operands]:
    """Copy a bias to where all rows begin at multiples of 16 bytes; return the call with the copy.

    Not with the strides that it has: a view of a few positions of a large bias spans most of this one's memory.
    """
    once = bias[tuple([slice(1 if stride == 0 else None) for stride in bias.stride()])]
    *lines, keys = once.shape
    each = 16 // bias.element_size()
    made = bias.new_empty((*lines, -(-keys // each) * each))[..., :keys].copy_(once).expand(bias.shape)
    return _of_bias_strides(problem, made.stride()), operands._replace(bias=made)


@registered
@lru_cache(maxsize=1024)
def _of_bias_strides(problem: AttentionProblem, strides: Sizes) -> AttentionProblem:
    """Return the problem with other strides of its bias."""
    scores = problem.scores
    assert scores.bias is not None
    return replace(problem, scores=scores._replace(bias=scores.bias._replace(strides=strides)))


backend = GluonBackend()
