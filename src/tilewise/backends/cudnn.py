"""Runs cuDNN's attention engines through graphs of its front end: 16-bit calls, packed views in place.

cuDNN is handed only the core of a dense call, the queries that see a key and the keys that are seen, as views; where
lengths are data, all, and rows without keys are zeroed afterwards (kernels/triton/zero_fill.py). So the contract of the
other backends holds for what cuDNN leaves open. Its graphs are made in kernels/cudnn.
"""

import contextlib
import importlib.util
from functools import lru_cache

import torch

from tilewise.backends._support.cudnn_plan import (
    Alignment,
    alignment,
    backward_plan,
    described,
    empty,
    forward_plan,
    index_of,
)
from tilewise.backends._support.current import is_current
from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.kernels.cudnn.description import Borders, Core, core_of, plain_strides
from tilewise.kernels.cudnn.graph import Graph, graph_of
from tilewise.kernels.cudnn.lengths import constant_lengths
from tilewise.kernels.cudnn.library import frontend_version, library_version
from tilewise.kernels.triton.launch import Launch, modifiers_of
from tilewise.kernels.triton.operand_gradients import OperandGradients
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, Sizes, are_aligned
from tilewise.problem.options import NO_OPERANDS, Operands
from tilewise.support.caches import registered
from tilewise.support.packages import version_text
from tilewise.tuning.select import delta_config

OLDEST_FRONTEND = (1, 28)  # its graphs and handles are as library.py and graph.py use them
# 9.10.0 and 9.10.1 compute 16-bit attention wrongly, 9.14.0 long windows, and 9.15.0 wants guards of its own, by the
# front end's word; torch 2.11, the oldest that we take, comes with this one.
OLDEST_LIBRARY = (9, 19, 0)
_EVERY = Needs()
Tensors = dict[str | Borders, torch.Tensor]
_MOST_ELEMENTS = 2**31 - 1  # from a packed tensor's first to its last
_ALIGNMENT = 8  # elements of 16 bit in 16 bytes, by which the engines move rows without a check of their own


class CudnnBackend:
    """cuDNN's engines behind tilewise's contract, but for one clause: where lengths are data, padding must be finite.

    The engines multiply it, and what a mask hides beside lengths, by 0: a NaN there reaches results. dq is summed in no
    fixed order. Lengths of padded sequences reach cuDNN as they are given, in int32: none may pass the tensor's.
    """

    name = "cudnn"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return the reason against, if there is one. The last to be asked is cuDNN: that builds the call's graph."""
        return (_wrong_machine(problem) or _wrong_dtype_or_dims(problem) or _wrong_options(problem)
                or _wrong_lengths(problem) or _wrong_strides(problem) or _wrong_bias(problem)
                or _too_far_apart(problem) or graph_refusal(problem))

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        plan = forward_plan(problem, _alignment(operands))
        device = problem.device
        out = empty(plan.out, problem.dtype, device)
        lse = torch.empty(plan.lse, dtype=torch.float32, device=device)
        part = None if plan.part is None else empty(plan.part, torch.float32, device)
        tensors: Tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse if part is None else part}
        if plan.core is not None:
            _cut_all(tensors, plan.core)
        if operands.sinks is not None:
            tensors["sinks"] = _aligned(operands.sinks.float().contiguous())
        with _on(device):
            _run(problem, plan.graph, tensors, operands)
            if plan.blank is not None:
                plan.blank(out, lse, part, operands.sinks, operands.cu_seqlens_q, operands.seqlens_q,
                           operands.cu_seqlens_k, operands.seqlens_k)
        if plan.core is not None:
            queries = plan.core.queries
            if part is not None:
                _cut(lse, queries).copy_(part)
            # What sees nothing has the sink alone in its denominator.
            _fill_around(lse, queries, float("-inf") if operands.sinks is None else operands.sinks[:, None])
            _fill_around(out, queries, 0.0)
        if operands.bias is not None:  # its −inf may hide every key of a query
            out.masked_fill_((lse == float("-inf"))[..., None], 0.0)
        return Results(out, lse)

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = _EVERY) -> Gradients:
        """See :class:`tilewise.backends.base.Backend`. An out or dout that is laid out unlike out is copied first."""
        q, k, v, out, lse, operands = saved
        plan = backward_plan(problem, needs.dbias, _alignment(operands))
        out, dout = _laid_out(out, plan.out_strides), _laid_out(dout, plan.out_strides)
        dq, dk, dv = [empty(layout, problem.dtype, problem.device) for layout in plan.gradients]
        part = lse
        if plan.part is not None:
            part = empty(plan.part, torch.float32, problem.device)
            seeing = lse.detach() if plan.core is None else _cut(lse.detach(), plan.core.queries)
            if plan.blind:  # exp(score − lse) is to be 0 for all that a query without a visible key is paired with
                torch.nan_to_num(seeing, nan=float("nan"), posinf=float("inf"), neginf=float("inf"), out=part)
            else:
                part.copy_(seeing)
        tensors: Tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": part, "dq": dq, "dk": dk, "dv": dv}
        if plan.core is not None:
            _cut_all(tensors, plan.core)
        if needs.dbias and operands.bias is not None:
            tensors["dbias"] = _new_dbias(plan.graph, operands.bias)
        with _on(problem.device):
            _run(problem, plan.graph, tensors, operands)
            if plan.blank is not None:
                plan.blank(dq, dk, dv, operands.cu_seqlens_q, operands.seqlens_q, operands.cu_seqlens_k,
                         operands.seqlens_k)
            dsinks = _sink_gradient(problem, saved, (out, dout), lse) if needs.dsinks else None
        if operands.bias is not None:
            dq.masked_fill_((lse == float("-inf"))[..., None], 0.0)
        if plan.core is not None:
            _fill_around(dq, plan.core.queries, 0.0)
            for gradient in (dk, dv):
                _fill_around(gradient, plan.core.keys, 0.0)
        dbias = _whole_dbias(problem, operands.bias, tensors["dbias"]) if "dbias" in tensors else None
        return Gradients(dq if needs.dq else None, dk if needs.dkv else None, dv if needs.dkv else None, dbias, None,
                         dsinks)


def graph_refusal(problem: AttentionProblem) -> str | None:
    """Return the sentence with which cuDNN refuses the problem's graph; where it takes it, the graph is built now."""
    backward_bias = problem.direction == "backward" and problem.scores.bias is not None
    answer = graph_of(described(problem, dbias=backward_bias), problem.device)
    return answer if isinstance(answer, str) else None


def _new_dbias(graph: Graph, bias: torch.Tensor) -> torch.Tensor:
    """Return zeros as the graph has the gradient: cuDNN may pass over what no query sees, and sums what is shared."""
    port = graph.description.outputs[-1]
    return torch.empty_strided(port.sizes, port.strides, dtype=bias.dtype, device=bias.device).zero_()


def _whole_dbias(problem: AttentionProblem, bias: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient in the bias's shape, contiguous, given that of the core."""
    if bias is None or (part.shape == bias.shape and part.is_contiguous()):
        return part
    whole = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    _cut_pairs(whole, problem).copy_(part)
    return whole


def _run(problem: AttentionProblem, graph: Graph, tensors: Tensors, operands: Operands) -> None:
    """Run the graph with a bias, lengths and borders beside the tensors."""
    if operands.bias is not None:
        tensors["bias"] = _aligned(_cut_pairs(operands.bias, problem))
    if graph.description.lengths:
        tensors |= _whole_lengths(problem, graph, operands) or _written_lengths(problem, graph, operands)
    graph(tensors)


def _whole_lengths(problem: AttentionProblem, graph: Graph, operands: Operands) -> Tensors | None:
    """Return the lengths of both sides as they were given, and constants for those that were not.

    None where they must be written: of packed sequences, of another dtype, and off where cuDNN takes them.
    """
    if problem.sequences.packed is not None:
        return None
    q, k, *_ = graph.description.inputs
    found: Tensors = {}
    for name, given, port in (("seqlens_q", operands.seqlens_q, q), ("seqlens_k", operands.seqlens_k, k)):
        if given is None:
            given = constant_lengths(graph.description.lengths, port.sizes[2], problem.device)
        if given is None or given.dtype is not torch.int32 or given.data_ptr() & 15:
            return None
        found[name] = given
    return found


def _written_lengths(problem: AttentionProblem, graph: Graph, operands: Operands) -> Tensors:
    """Return each sequence's lengths, no more than there are, and the borders of packed ones: by one launch."""
    given = operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k
    index = index_of(problem, graph.description.borders, alignment(given))
    written = torch.empty(index.shape, dtype=torch.int32, device=problem.device)
    index.launch(written, *given)
    return dict(zip(index.rows, written.unbind(0), strict=True))


def _sink_gradient(problem: AttentionProblem, saved: Saved, outs: tuple[torch.Tensor, torch.Tensor],
                   lse: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the sinks, made of lse and of delta as the Triton backend does."""
    out, dout = outs
    delta = torch.empty_like(lse)
    launch = _delta_launch(problem, out.stride(), dout.stride(), _alignment(saved.operands))
    launch(out, dout, out, delta, modifiers_of(problem, saved.operands))
    sums = OperandGradients(problem, saved.operands, dbias=False, dalibi_slopes=False, dsinks=True)
    return sums.gradients(lse, delta)[2]


@registered
@lru_cache(maxsize=1024)
def _delta_launch(problem: AttentionProblem, out_strides: Sizes, dout_strides: Sizes, operands: Alignment) -> Launch:
    from tilewise.kernels.triton.backward import delta_launch

    return delta_launch(problem, delta_config(problem), out_strides, dout_strides, None)


def _alignment(operands: Operands) -> Alignment:
    return () if operands is NO_OPERANDS else alignment(operands.present)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)


def _cut_all(tensors: Tensors, core: Core) -> None:
    """Leave of each tensor the core; lse is that of the core already."""
    for name, tensor in tensors.items():
        if name != "lse":
            tensors[name] = _cut(tensor, core.keys if name in ("k", "v", "dk", "dv") else core.queries)


def _cut(tensor: torch.Tensor, positions: Span) -> torch.Tensor:
    return tensor[:, :, positions.start:positions.stop]


def _cut_pairs(bias: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Return the pairs of the core."""
    queries, keys = core_of(problem)
    return _cut(bias, queries)[..., keys.start:keys.stop]


def _fill_around(tensor: torch.Tensor, positions: Span, value: float | torch.Tensor) -> None:
    """Write the value at the positions (dim 2) outside of the span."""
    for outside in (tensor[:, :, :positions.start], tensor[:, :, positions.stop:]):
        if outside.shape[2]:
            outside[...] = value


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy with its strides where it does not begin at a multiple of 16 bytes."""
    if are_aligned(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _laid_out(tensor: torch.Tensor, strides: Sizes) -> torch.Tensor:
    """Return out, or a tensor like it, with out's strides: the graph's; as it is, if they are."""
    if tensor.data_ptr() & 15 == 0 and (tensor.stride() == strides or plain_strides(tensor.shape, tensor.stride())
                                == plain_strides(tensor.shape, strides)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _wrong_machine(problem: AttentionProblem) -> str | None:
    """A GPU of NVIDIA's, and versions of cuDNN and its front end that are known."""
    if problem.device.type != "cuda" or torch.version.hip is not None:
        return f"runs on CUDA devices, got {'ROCm' if problem.device.type == 'cuda' else problem.device}"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which CUDA builds of torch bring, and it is not installed"
    frontend, library = frontend_version(), library_version()
    if frontend is None:
        return "needs cuDNN's front end (nvidia-cudnn-frontend), which tilewise[cudnn] brings, and it is not installed"
    if frontend < OLDEST_FRONTEND:
        return f"needs nvidia-cudnn-frontend {_text(OLDEST_FRONTEND)} or newer, got {version_text(frontend)}"
    if library is None or library < OLDEST_LIBRARY:
        found = "none" if library is None else _text(library)
        return f"needs cuDNN {_text(OLDEST_LIBRARY)} or newer, as CUDA builds of torch bring it, got {found}"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability < (8, 0):
        return f"needs CUDA compute capability 8.0 or newer, got {_text(capability)}"
    return None


def _wrong_dtype_or_dims(problem: AttentionProblem) -> str | None:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, got {problem.dtype}"
    if problem.float32_results:
        return f"writes results in the inputs' dtype, got {problem.dtype} with results in float32"
    dims = problem.d, problem.dv
    if dims[0] % 8 or dims[1] % 8:
        return f"takes head dims that are multiples of 8, got {dims[0]} and {dims[1]}"
    major = torch.cuda.get_device_capability(problem.device)[0]
    widest = 256 if problem.direction == "forward" or major == 9 else 128
    if max(dims) > widest and not (major == 10 and dims == (192, 128)):
        return (f"takes head dims up to {widest} in its {problem.direction} pass on this device, got {dims[0]} and "
                f"{dims[1]}")
    return None


def _wrong_options(problem: AttentionProblem) -> str | None:
    """Say which option cuDNN has not, or has with another meaning."""
    scores = problem.scores
    if problem.deterministic:
        return "promises no bits that are the same in every batch, and a deterministic result was asked for"
    if problem.lse_grad:
        return "has no gradient through lse"
    if scores.dropout_p or scores.dropout_origin_q or scores.dropout_origin_k:
        return "takes no dropout: cuDNN draws the pairs to drop in its own way, and a seed would mean another draw"
    if scores.alibi_slopes is not None:
        return "takes no ALiBi slopes: cuDNN makes its own of the number of heads; a bias can hold them"
    options = {"mask tensor": scores.mask is not None, "documents": scores.documents_q is not None,
               "softcap": scores.softcap is not None, "max_logit": scores.max_logit,
               "score function": scores.score_function is not None, "mask function": scores.mask_function is not None}
    lacking = next((name for name, is_there in options.items() if is_there), None)
    if lacking is not None:
        return f"takes no {lacking}"
    if problem.mask.has_exceptions:
        return f"takes causal masks and windows, got {problem.mask}"
    # Lengths that are data may not be known to be 0, but the tensors' are, and how many sequences there are.
    if problem.is_empty or not problem.sk or problem.sequences.packed == 0:
        return "needs a pair that is visible, got none"
    core = core_of(problem)
    if scores.sinks is not None and len(core.queries) == 1:
        return "takes no sinks with one query"
    if problem.direction == "backward" and len(core.queries) == len(core.keys) == 1:
        return "needs more than one query or more than one key in its backward pass"
    return None


def _wrong_lengths(problem: AttentionProblem) -> str | None:
    """Say what is not taken beside lengths that are data."""
    if not problem.sequences.are_data:
        return None
    if problem.scores.bias is not None:
        if problem.sequences.packed is not None:
            return "takes no bias with packed sequences"
        if problem.direction == "backward":
            return "has no gradient beside a bias where lengths are data"
        if problem.mask.is_bounded and problem.mask.alignment == "bottom_right":
            return f"takes no bias beside a mask aligned bottom-right where lengths are data, got {problem.mask}"
    if problem.sequences.packed is not None and problem.direction == "backward":
        capability = torch.cuda.get_device_capability(problem.device)
        if capability[0] not in (9, 10):
            return ("takes packed sequences in its backward pass on devices of compute capability 9 and 10, got "
                    f"{_text(capability)}")
    return None


def _wrong_strides(problem: AttentionProblem) -> str | None:
    """Say which tensor the engines would read wrongly: they move 16 bytes at a time, and check nothing."""
    if not problem.aligned:
        return "needs q, k and v at addresses that are multiples of 16 bytes"
    queries, keys = (problem.b, problem.hq, problem.sq), (problem.b, problem.hk, problem.sk)
    for name, sizes, strides in (("q", queries, problem.q_strides), ("k", keys, problem.k_strides),
                                 ("v", keys, problem.v_strides)):
        if strides[3] != 1 or _uneven(sizes, strides, _ALIGNMENT):
            return (f"needs a last stride of 1 and the others positive multiples of {_ALIGNMENT} elements, got {name} "
                    f"with {strides}")
    return None


def _wrong_bias(problem: AttentionProblem) -> str | None:
    facts = problem.scores.bias
    if facts is None:
        return None
    batch, heads, *pairs = facts.shape
    # 9.19 broadcasts one dim of queries or keys to wrong results, and says nothing; one of heads alone is not known.
    if pairs != [problem.sq, problem.sk] or (batch > 1 and heads < problem.hq):
        return ("takes a bias that has every query and key, and every head if it has every batch entry, got "
                f"{'x'.join(map(str, facts.shape))}")
    if problem.direction == "backward" and facts.dtype is not problem.dtype:
        return f"makes the gradient of a bias in the inputs' dtype alone, {problem.dtype}, got a bias in {facts.dtype}"
    step = 16 // facts.dtype.itemsize
    if (facts.strides[3] != 1 and facts.shape[3] > 1) or _uneven(facts.shape, facts.strides, step):
        return (f"needs a bias with a last stride of 1 and the others positive multiples of {step} elements, got "
                f"{facts.strides}")
    first = core_of(problem).keys.start
    if first % step:
        return f"needs the first key that is seen at a multiple of {step} beside a bias, got {first}"
    return None


def _too_far_apart(problem: AttentionProblem) -> str | None:
    """Say which tensor of packed sequences is too large: beyond 2³¹ elements 9.19 reads what is not there."""
    description = described(problem, dbias=False)
    for port in (*description.inputs, *description.outputs):
        elements = 1 + sum((size - 1) * stride for size, stride in zip(port.sizes[1:], port.strides[1:], strict=True))
        elements = max(elements, port.sizes[2] * port.strides[2])  # where the last sequence ends, in 32 bits
        if port.side and elements > _MOST_ELEMENTS:
            return f"takes packed sequences within {_MOST_ELEMENTS} elements of memory, got {port.name} over {elements}"
    return None


def _uneven(sizes: Sizes, strides: Sizes, step: int) -> bool:
    """Whether a row begins off a multiple of ``step`` elements, or two begin at one; dims of size 1 make no step."""
    return any(size > 1 and (stride <= 0 or stride % step)
               for size, stride in zip(sizes[:3], strides[:3], strict=False))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


backend = CudnnBackend()
