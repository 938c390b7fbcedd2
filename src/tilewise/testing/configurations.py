"""Random configurations: the one generator of calls, from the whole space of attention's options.

``tilewise fuzz`` draws them by seed, :func:`draw`; the tests draw them by seed and, through strategies.py, by
hypothesis' choices, :func:`draw_from`. Hypothesis shrinks each choice towards the first or the least, so the plainest
stands there: no option, a common size.

Every dimension is drawn from a stream of its own, named after it, so that a new one changes no other dimension of the
seeds there are. To add one: a line in ``_OPTIONS`` under the name of its field of :class:`Case`, and, where it does not
go with all the others, a line in :func:`_agreeing`.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

from tilewise.errors import InvalidInput
from tilewise.masks import ALIGNMENTS, Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import TAIL_WIDTH, WIDEST
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case, Layout, OperandDtype, Packed
from tilewise.testing.inputs import Inputs, make_inputs, make_operands
from tilewise.testing.placement import each_once, far_apart, plant_nan, with_meaningless_strides

Size = Literal["tiny", "small", "large"]
Placement = Literal["as_laid_out", "meaningless_strides", "far_batch", "far_heads", "far_positions"]
SEEDS = 2**31  # make_operands adds as much, and a generator heeds 32 bits
# float64 is not among them: an oracle in float64 is no more exact than what it would judge.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LONGEST = {"tiny": 40, "small": 150, "large": 2048}
_WIDEST_TINY = 24  # head dim
_TILE_SIDES = (16, 32, 64, 128, 256, 512, 1024)
# Streams of what kernels are not compiled for, by and large: the only ones that a variation draws anew.
_VARIED = frozenset(("sq", "sk", "equal_lengths", "b", "lengths_q", "lengths_k", "equal_sequences", "window"))
_FAR_DIMS = {"far_batch": 0, "far_heads": 1, "far_positions": 2}
_T = TypeVar("_T")
Stream = Callable[[str], random.Random]  # name of a dimension -> what it is drawn from


@dataclass(frozen=True, slots=True)
class Configuration:
    """One drawn call.

    Attributes:
        seed, size: what it was drawn from; the seed is its tensors' too.
        case: the problem.
        dtype: of q, k and v.
        lse_grad: whether a gradient arrives through lse.
        shift: what is added to every scaled score by way of q's and k's first dim; 0 = nothing.
        placement: what is done to strides beyond the case's layout; see placement.py.
        variation: 0, or which of the seed's other sizes these are.
    """

    seed: int
    size: Size
    case: Case
    dtype: torch.dtype
    lse_grad: bool
    shift: float
    placement: Placement
    variation: int = 0

    def __str__(self) -> str:
        more = f", {'out and lse' if self.lse_grad else 'out'} differentiated"
        more += f", every score moved by {self.shift:.4g}" if self.shift else ""
        more += "" if self.placement == "as_laid_out" else f", {self.placement}"
        return f"{self.case!r}, {self.dtype}{more}"


class Call(NamedTuple):
    """A configuration's tensors.

    Attributes:
        inputs, operands: what a backend is given: NaN wherever it may stand, if it is to.
        clean_inputs, clean_operands: the same numbers without NaN, for the oracle.
    """

    inputs: Inputs
    operands: Operands
    clean_inputs: Inputs
    clean_operands: Operands


def draw(seed: int, size: Size = "small", variation: int = 0) -> Configuration:
    """Return the configuration of a seed; it depends on nothing else.

    Args:
        seed: 0 to 2³¹ − 1.
        size: "tiny" has lengths to 40 and head dims to 24, which any backend computes in milliseconds; "small" has
            lengths to 150, for CPUs and the interpreter; "large" has lengths to 2048, for GPUs.
        variation: 0 or more: 1, 2, ... are the seed's options with other batch sizes, lengths and window sides, for
            which few kernels have to be compiled anew.

    Raises:
        InvalidInput: the seed, the size or the variation is none of these.

    >>> draw(7) == draw(7)
    True
    """
    if not 0 <= seed < SEEDS:
        raise InvalidInput(f"seed is {seed}; allowed are 0 to {SEEDS - 1}.")
    if size not in get_args(Size):
        raise InvalidInput(f"size is {size!r}; allowed are {get_args(Size)}.")
    if variation < 0:
        raise InvalidInput(f"variation is {variation}; allowed are integers from 0.")

    def stream(name: str) -> random.Random:
        varied = f" {variation}" if variation and name in _VARIED else ""
        return random.Random(f"{size} {seed} {name}{varied}")

    return draw_from(stream, size, seed, variation)


def draw_from(stream: Stream, size: Size, seed: int = 0, variation: int = 0) -> Configuration:
    """Return the configuration that these streams make; ``seed`` is its tensors' alone."""
    fields = _sizes(stream, size) | {name: option(stream(name)) for name, option in _OPTIONS.items()}
    fields |= {"mask": draw_mask(stream, _LONGEST[size])} | _draw_lengths(stream, fields)
    fields = _agreeing(fields)
    dtype = stream("dtype").choice(_DTYPES)
    case = Case(f"{size}_{seed}" + (f"_{variation}" if variation else ""), **fields)
    placements = get_args(Placement)[1:] if size == "large" else ("meaningless_strides",)
    return Configuration(seed, size, case, dtype, lse_grad=_one_in(2, stream("lse_grad")),
                         shift=0.0 if size == "tiny" else _draw_shift(stream("shift"), case, dtype),
                         placement=_sometimes(stream("placement"), "as_laid_out", lambda one: one.choice(placements)),
                         variation=variation)


def make_call(configuration: Configuration, device: torch.device | str, *, nan: bool = True) -> Call:
    """Draw a configuration's tensors; q, k, v, bias, slopes and sinks of what a backend is given are leaves.

    Without ``nan`` what is hidden holds numbers like the rest, but for the padding of the layout "moat".
    """
    case, dtype, seed = configuration.case, configuration.dtype, configuration.seed
    (clean_inputs, clean_operands), (inputs, operands) = (
        (_shifted(make_inputs(case, dtype, device, seed), configuration), make_operands(case, dtype, device, seed))
        for _ in range(2))
    if configuration.placement == "meaningless_strides":
        inputs = Inputs._make(map(with_meaningless_strides, inputs))
        alone = [operand if operand is None else with_meaningless_strides(operand) for operand in operands.alone]
        operands = Operands._make([*alone, operands.score_tensors, operands.mask_tensors])
    elif configuration.placement in _FAR_DIMS:
        inputs = Inputs._make((*far_apart(inputs[:4], _FAR_DIMS[configuration.placement]), inputs.dlse))
    if nan:
        plant_nan(case, inputs, operands)
    leaves = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    trainable = {name: operand.detach().requires_grad_() for name in ("bias", "alibi_slopes", "sinks")
                 if (operand := getattr(operands, name)) is not None}
    return Call(Inputs._make((*leaves, *inputs[3:])), operands._replace(**trainable), clean_inputs, clean_operands)


def _sometimes(stream: random.Random, otherwise: _T, option: Callable[[random.Random], _T]) -> _T:
    """Draw an option with a probability of 1/3, so that every two of them meet in a ninth of all configurations."""
    return option(stream) if _one_in(3, stream) else otherwise


def _one_in(count: int, stream: random.Random) -> bool:
    return stream.randrange(count) == count - 1


def _pattern(stream: random.Random) -> str:
    return "".join(stream.choice((letter, letter, "1")) for letter in "bhqk")


def _operand_dtype(stream: random.Random) -> OperandDtype:
    return stream.choice(get_args(OperandDtype))


def _layout(stream: random.Random) -> Layout:
    """Any layout, the orders that few have being drawn where a "bshd" was: they are one kind to the other options."""
    kinds: tuple[Layout, ...] = ("bhsd", "bshd", "bhds", "packed_qkv", "packed_kv", "expanded", "moat")
    orders: tuple[Layout, ...] = ("bshd", "bshd", "sbhd", "shbd", "hbsd", "hsbd")
    kind = stream.choice(kinds)
    return stream.choice(orders) if kind == "bshd" else kind


# Field of Case -> how it is drawn.
_OPTIONS: Mapping[str, Callable[[random.Random], Any]] = {
    "layout": _layout,
    "scale": lambda stream: _sometimes(stream, None, lambda one: one.choice((one.uniform(0.05, 2.0), 10.0))),
    "bias": lambda stream: _sometimes(stream, "", _pattern),
    "mask_tensor": lambda stream: _sometimes(stream, "", _pattern),
    "operand_dtype": _operand_dtype,
    "alibi": lambda stream: _sometimes(stream, "", lambda one: one.choice(("h", "bh"))),
    "sinks": lambda stream: _sometimes(stream, False, lambda _: True),
    "softcap": lambda stream: _sometimes(stream, None, lambda one: one.uniform(0.5, 50.0)),
    "dropout_p": lambda stream: _sometimes(stream, 0.0, lambda one: one.uniform(0.01, 0.9)),
    "max_logit": lambda stream: _sometimes(stream, False, lambda _: True),
    "documents": lambda stream: _sometimes(stream, "", lambda one: one.choice(("runs", "interleaved"))),
}
# How sequences are packed, and whether queries' and keys' lengths are data.
_Storage = tuple[Packed, bool, bool]
_STORAGES: tuple[_Storage, ...] = (("", True, True), ("", True, False), ("", False, True), ("tight", True, True),
                                   ("gaps", True, True), ("gaps", True, True))
_DENSE: _Storage = ("", False, False)


def _sizes(stream: Stream, size: Size) -> dict[str, Any]:
    """Draw the sizes: at most nine query heads in all; lengths and head dims, in half of all cases, equal."""
    hk, group = stream("heads").choice(((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)))
    sq, sk = (_length(stream(name), _LONGEST[size]) for name in ("sq", "sk"))
    d, dv = (_head_dim(stream(name), size) for name in ("d", "dv"))
    b = stream("b").choice((1, 1, 2, 2, 3) if hk * group <= 3 else (1, 2))
    b = 0 if _one_in(100, stream("no_batch")) else b
    sk = sk if _one_in(2, stream("equal_lengths")) else sq
    return {"b": b, "hq": hk * group, "hk": hk, "sq": sq, "sk": sk, "d": d,
            "dv": dv if _one_in(2, stream("equal_dims")) else d}


def _length(stream: random.Random, longest: int) -> int:
    """Any length; in a third of all cases one beside a side of a tile, and now and then 0 or 1."""
    length = stream.randint(1, longest)
    near = stream.choice(_TILE_SIDES) + stream.choice((-1, 0, 1))
    chosen = stream.randrange(100)
    if chosen >= 94:
        return 0 if chosen >= 97 else 1
    return near if chosen >= 60 and near <= longest else length


def _head_dim(stream: random.Random, size: Size) -> int:
    """Draw a common one or any up to 256; now and then a wider one, which takes a backend its time."""
    if size == "tiny":
        return stream.randint(1, _WIDEST_TINY)
    usual = stream.choice((16, 32, 40, 64, 72, 80, 96, 128, 192, 256))
    narrow = stream.choice((usual, stream.randint(1, 64), stream.randint(1, 256)))
    return stream.randint(257, WIDEST + TAIL_WIDTH) if _one_in(33, stream) else narrow


def draw_window(stream: Stream, longest: int) -> Mask:
    """Return a window, a causal mask, both, or one that hides nothing; its alignment is named."""
    kind, sides = stream("mask"), stream("window")
    left, right = (sides.choice((0, sides.randint(0, 20), sides.randint(0, longest // 2))) for _ in range(2))
    alignment = stream("alignment").choice(ALIGNMENTS)
    return kind.choice((
        window(None, None, alignment), causal(alignment), causal(alignment), window(left, right, alignment),
        window(left, None, alignment), window(None, right, alignment), causal(alignment) & window(left, 0)))


def draw_mask(stream: Stream, longest: int) -> Mask:
    """Return a mask of any kind: a window joined now and then to chunks and exceptions."""
    mask = draw_window(stream, longest)
    for make, least in ((prefix, 0), (sink_tokens, 0), (chunk, 1)):
        own = stream(make.__name__)
        if _one_in(4, own):
            mask = mask & make(own.choice((least, own.randint(least, 20), own.randint(least, longest // 2))))
    return mask


def _draw_lengths(stream: Stream, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Draw which lengths are data, and these; where queries are as many as keys, half of all times in each sequence."""
    packed, *given = stream("storage").choice((*(_DENSE for _ in _STORAGES), *_STORAGES))
    lengths_q, lengths_k = (
        tuple(_length_up_to(own, sizes[side]) for _ in range(sizes["b"])) if is_given else None
        for side, own, is_given in zip(("sq", "sk"), map(stream, ("lengths_q", "lengths_k")), given, strict=True))
    if lengths_q and lengths_k and sizes["sq"] == sizes["sk"] and not _one_in(2, stream("equal_sequences")):
        lengths_k = lengths_q
    return {"packed": packed, "lengths_q": lengths_q, "lengths_k": lengths_k}


def _length_up_to(stream: random.Random, most: int) -> int:
    """Any length, its ends more often than the others."""
    return stream.choice((0, most, *(stream.randint(0, most) for _ in range(4))))


def _agreeing(fields: dict[str, Any]) -> dict[str, Any]:
    """Change what does not go with the rest."""
    if fields["packed"] and fields["layout"] not in ("bhsd", "bshd", "bhds", "moat"):
        fields = fields | {"layout": "bshd"}  # packed sequences have one batch entry, and queries apart from keys
    if fields["layout"].startswith("packed"):
        fields = fields | {"dv": fields["d"]}
    if fields["layout"] == "packed_qkv" and fields["sk"] != fields["sq"]:
        lengths_k = fields["lengths_k"]
        fields = fields | {"sk": fields["sq"], "lengths_k": lengths_k and tuple(
            min(length, fields["sq"]) for length in lengths_k)}
    return fields


def _draw_shift(stream: random.Random, case: Case, dtype: torch.dtype) -> float:
    """Draw how far scores are moved: past −88.7, where float32's exponential of lse underflows, or past its overflow.

    Under a softcap they go where it bends. Further on all of them are one number: there the yardsticks of
    tolerance.py round alike in every order, and do not tell what the dtype costs. Of a tiny call's few rows, chance
    decides what they err by.
    """
    shift = _sometimes(stream, 0.0, lambda one: one.choice((-100.0, -1000.0, 1000.0)))
    if case.softcap is not None:
        shift = math.copysign(1.5 * case.softcap, shift) if shift else shift
    scale = case.d**-0.5 if case.scale is None else case.scale
    # Dense attention in float16 holds products before they are scaled, and must not overflow.
    most = 1.6e4 * scale if dtype is torch.float16 else abs(shift)
    return max(-most, min(shift, most))


def _shifted(inputs: Inputs, configuration: Configuration) -> Inputs:
    """Move all scores, in place; q's part is a power of two, so that it adds no rounding of its own."""
    if configuration.shift:
        case, part = configuration.case, 32.0
        scale = case.d**-0.5 if case.scale is None else case.scale
        for tensor, value in ((inputs.q, part), (inputs.k, configuration.shift / (scale * part))):
            each_once(tensor)[..., 0] = value
    return inputs
