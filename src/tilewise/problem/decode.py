"""What a call of :func:`tilewise.attention_decode` is: checked once; frozen, hashable, no tensors in it.

Letters as in problem.py; ``capacity`` is how many positions of a sequence its cache can hold.
"""

import numbers
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.masks import Mask
from tilewise.problem.options import Sizes, check_operand, checked_softcap
from tilewise.problem.problem import Facts, check_each, checked_scale, dense_strides, facts_of, is_symbolic, padded_dim
from tilewise.shape_hints import layout_hint

_INTEGERS = (torch.int32, torch.int64)


class CacheOperands(NamedTuple):
    """The tensors of a call beside q and the caches; None where the call has none. See ``attention_decode``."""

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class DecodeOptions(NamedTuple):
    """The rest of a call: numbers and flags, unchecked."""

    mask: Mask = Mask()
    scale: float | None = None
    softcap: float | None = None
    rotary_interleaved: bool = True
    num_splits: int | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class DecodeProblem:
    """What a backend needs to know to accept, configure and launch one call.

    Attributes:
        b, hq, hk, sq, d, dv: sizes; ``hq`` is a multiple of ``hk``.
        dtype, device: of q and both caches.
        capacity: positions that a sequence's cache can hold.
        page: positions of a page, 0 where the cache has none.
        new: keys that are appended.
        rotary_dim: head dims that are turned, 0 = none.
        positions: rows of the angles, 0 = none; a place behind the last one is turned as that is.
        scale, mask, softcap, interleaved, deterministic: as the call has them; the mask's diagonal ends at the last
            query and key.
        num_splits: how often the keys are split; None = as many as fill the device.
        tensors: name, strides and dtype of q, the caches and those operands that are there: what a kernel is compiled
            for.
    """

    b: int
    hq: int
    hk: int
    sq: int
    d: int
    dv: int
    dtype: torch.dtype
    device: torch.device
    capacity: int
    page: int
    new: int
    rotary_dim: int
    positions: int
    scale: float
    mask: Mask
    softcap: float | None
    interleaved: bool
    num_splits: int | None
    deterministic: bool
    tensors: tuple[tuple[str, Sizes, torch.dtype], ...]
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        strides = (stride for _, own, _ in self.tensors for stride in own)
        if is_symbolic((self.b, self.sq, self.capacity, self.new, *strides)):
            return  # a traced call: it has no hash and is never looked up
        # Looked up twice a call: hashed once here instead.
        names = [own.name for own in fields(self) if own.name != "_hash"]
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in names)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.hq // self.hk

    @property
    def width(self) -> int:
        """Width of every head inside tiles; one for keys and values, as in the forward pass."""
        return padded_dim(max(self.d, self.dv))

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def out_strides(self) -> Sizes:
        """Strides of out: dense, with b, h and s in q's memory order."""
        return dense_strides((self.b, self.hq, self.sq, self.dv), self.strides_of("q"))

    def strides_of(self, name: str) -> Sizes:
        """Strides of a tensor that the call has."""
        return next(strides for own, strides, _ in self.tensors if own == name)

    def has(self, name: str) -> bool:
        """Whether the call has this operand."""
        return any(name == own for own, _, _ in self.tensors)

    def __str__(self) -> str:
        heads = f"{self.hq}" if self.hq == self.hk else f"{self.hq}/{self.hk}"
        cache = f"{self.capacity}" + (f" in pages of {self.page}" if self.page else "")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"decode b{self.b} h{heads} s{self.sq} cache {cache} d{self.d} {dtype} {self.mask} on {self.device}"


def facts_of_inputs(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[Facts, Facts, Facts]:
    """Read q and the caches; raises :class:`InvalidInput` for what is no tensor."""
    return facts_of("q", q), facts_of("k_cache", k_cache), facts_of("v_cache", v_cache)


def facts_of_present(operands: CacheOperands) -> tuple[Facts, ...]:
    """Read the operands that are there; raises :class:`InvalidInput` for what is no tensor."""
    return tuple([facts_of(name, tensor) for name, tensor in zip(CacheOperands._fields, operands, strict=True)
                  if tensor is not None])


def decode_problem(tensors: tuple[Facts, Facts, Facts], operands: tuple[Facts, ...],
                   options: DecodeOptions) -> DecodeProblem:
    """Check q, the caches and the operands against one another and describe them.

    Raises:
        InvalidInput: what no backend could give a meaning; names the argument.
        UnsupportedProblem: a mask with exceptions.
    """
    check_each(*tensors)
    q, k, v = tensors
    given = {facts[0]: facts for facts in operands}
    _check_caches(q, k, v, given)
    (b, hq, sq, d), (_, hk, page, _), dv, dtype = q[1], k[1], v[1][3], q[3]
    table = given.get("block_table")
    capacity = page if table is None or len(table[1]) != 2 else page * table[1][1]
    new = given["k"][1][2] if "k" in given and len(given["k"][1]) == 4 else 0
    _check_operands(q, given, {"hk": hk, "dv": dv, "capacity": capacity, "new": new})
    rotary_dim = _rotary_dim(given, d, capacity, q[4])
    check_mask(options.mask)
    return DecodeProblem(
        b=b, hq=hq, hk=hk, sq=sq, d=d, dv=dv, dtype=dtype, device=q[4], capacity=capacity,
        page=0 if table is None else page, new=new, rotary_dim=rotary_dim,
        positions=given["rotary_cos"][1][0] if rotary_dim else 0, scale=checked_scale(options.scale, d),
        mask=options.mask, softcap=checked_softcap(options.softcap), interleaved=options.rotary_interleaved,
        num_splits=checked_splits(options.num_splits), deterministic=options.deterministic,
        tensors=tuple((facts[0], tuple(facts[2]), facts[3]) for facts in (*tensors, *operands)))


def _check_caches(q: Facts, k: Facts, v: Facts, given: dict[str, Facts]) -> None:
    (b, hq, _, d), (rows, hk, page, own_d) = q[1], k[1]
    names = q[0], k[0], v[0]
    if own_d != d:
        raise InvalidInput(f"k_cache has head dim {own_d} and q has {d}: they must be equal (v_cache's may differ).")
    if tuple(v[1][:3]) != tuple(k[1][:3]):
        raise InvalidInput(f"v_cache has shape {tuple(v[1])} and k_cache {tuple(k[1])}: they may differ in their head "
                           f"dim alone.{layout_hint(names, q[1], k[1], v[1])}")
    if hk == 0 or hq % hk:
        hint = layout_hint(names, q[1], k[1], v[1]) or " Did you transpose (b, h, s, d)?"
        raise InvalidInput(f"k_cache has {hk} heads and q has {hq}: q heads must be a multiple of k heads.{hint}")
    for name, shape, strides, _, _ in (k, v):
        if strides[3] != 1:
            raise InvalidInput(f"{name} has stride {strides[3]} along its head dim; allowed is 1: a cache is not "
                               "copied.")
        if "k" in given and any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
            raise InvalidInput(f"{name} is expanded (strides {tuple(strides)}) and k is given, which would be written "
                               "to one place for several of its positions; allowed is memory for each: "
                               f"{name}.clone().")
    if "block_table" in given and "cache_batch_idx" in given:
        raise InvalidInput("cache_batch_idx is given and so is block_table; allowed is one of them: a table says "
                           "already where a sequence lies.")
    if "block_table" in given and page == 0:
        raise InvalidInput(f"k_cache has shape {tuple(k[1])}: pages of 0 positions; allowed are 1 and more.")
    if rows != b and "block_table" not in given and "cache_batch_idx" not in given:
        raise InvalidInput(f"k_cache has batch size {rows} and q has {b}: they must be equal, unless cache_batch_idx "
                           "or block_table says where a sequence lies.")


def _check_operands(q: Facts, given: dict[str, Facts], sizes: dict[str, int]) -> None:
    """Check shapes, dtypes and devices, and what comes in pairs."""
    (b, hq, _, d), dtype, device = q[1], q[3], q[4]
    hk, new = sizes["hk"], sizes["new"]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    table = given["block_table"][1][-1:] if "block_table" in given else (0,)
    allowed: dict[str, tuple[Sizes, tuple[torch.dtype, ...]]] = {
        "k": ((b, hk, new, d), (dtype,)), "v": ((b, hk, new, sizes["dv"]), (dtype,)),
        **dict.fromkeys(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), ((b,), _INTEGERS)),
        "block_table": ((b, *table), _INTEGERS), "alibi_slopes": ((b, hq), (wide,)), "sinks": ((hq,), (dtype, wide))}
    for name, shape, strides, own_dtype, own_device in given.values():
        if name in allowed:
            check_operand(name, (shape, own_dtype, own_device), *allowed[name], device)
            if own_dtype in _INTEGERS and shape[-1] > 1 and strides[-1] != 1:
                raise InvalidInput(f"{name} has stride {strides[-1]}; allowed is 1: call contiguous() on it.")
    for one, other in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if one in given and other not in given:
            raise InvalidInput(f"{one} is given without {other}; allowed are both, or none.")
    for one, other, why in (("k", "cache_seqlens", "where they are to be written"),
                            ("rotary_cos", "k", "which keys turn; those of the cache have turned already")):
        if one in given and other not in given:
            raise InvalidInput(f"{one} is given without {other}, which says {why}.")
    if new > sizes["capacity"]:
        raise InvalidInput(f"k has {new} positions and the cache holds {sizes['capacity']}; allowed are no more.")


def _rotary_dim(given: dict[str, Facts], d: int, capacity: int, device: torch.device) -> int:
    """Check the angles, and return how many head dims they turn."""
    if "rotary_cos" not in given:
        return 0
    name, shape, _, dtype, _ = given["rotary_cos"]
    if len(shape) != 2 or shape[0] < capacity or not 0 < 2 * shape[1] <= d:
        raise InvalidInput(f"{name} has shape {tuple(shape)}; allowed is (positions, rotary_dim / 2) with at least "
                           f"{capacity} positions, the capacity of the cache, and a rotary_dim of 2 to {d}.")
    if not dtype.is_floating_point:
        raise InvalidInput(f"{name} has dtype {dtype}; allowed are floating-point dtypes.")
    for name, own_shape, strides, own_dtype, own_device in (given["rotary_cos"], given["rotary_sin"]):
        check_operand(name, (own_shape, own_dtype, own_device), tuple(shape), (dtype,), device)
        if shape[1] > 1 and strides[1] != 1:
            raise InvalidInput(f"{name} has stride {strides[1]}; allowed is 1: call contiguous() on it.")
    return int(2 * shape[1])


def checked_splits(splits: Any) -> int | None:
    """Return the number of splits; raises :class:`InvalidInput` for what is none."""
    is_count = isinstance(splits, numbers.Integral) and not isinstance(splits, bool)
    if splits is not None and (not is_count or splits < 1):
        raise InvalidInput(f"num_splits is {splits!r}; allowed is an integer >= 1, or None to choose.")
    return None if splits is None else int(splits)


def check_mask(mask: Any) -> None:
    """Check that a mask is a band whose diagonal ends at the last query and key."""
    if not isinstance(mask, Mask):
        hint = " Padding is told by cache_seqlens and cache_leftpad." if isinstance(mask, torch.Tensor) else ""
        raise InvalidInput(f"mask is a {type(mask).__name__}; allowed is None, causal() or window(left, right).{hint}")
    if mask.alignment == "top_left":
        raise InvalidInput(f"mask is {mask}; allowed is alignment='bottom_right', or none: the last query stands on "
                           "the last key of the cache.")
    if mask.has_exceptions:
        raise UnsupportedProblem(f"mask is {mask}; decoding takes causal() and window(left, right).", {})

