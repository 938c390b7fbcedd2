"""What a call of :func:`tilewise.attention_decode` is: checked once; frozen, hashable, no tensors in it.

Letters as in problem.py; ``capacity`` is how many positions of a sequence its cache can hold.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from tilewise.masks import Mask
from tilewise.problem.problem import dense_strides, is_symbolic, padded_dim
from tilewise.validate.call import check_each
from tilewise.validate.decode import check_angles, check_cache_operands, check_caches
from tilewise.validate.tensors import Sizes, SpecKey, TensorSpec, spec_of
from tilewise.validate.values import check_mask_to_decode, checked_scale, checked_softcap, checked_splits


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


def specs_of_inputs(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[SpecKey, SpecKey, SpecKey]:
    """Read q and the caches; raises :class:`InvalidInput` for what is no tensor."""
    return spec_of("q", q), spec_of("k_cache", k_cache), spec_of("v_cache", v_cache)


def specs_of_present(operands: CacheOperands) -> tuple[SpecKey, ...]:
    """Read the operands that are there; raises :class:`InvalidInput` for what is no tensor."""
    return tuple([spec_of(name, tensor) for name, tensor in zip(CacheOperands._fields, operands, strict=True)
                  if tensor is not None])


def decode_problem(tensors: tuple[SpecKey, SpecKey, SpecKey], operands: tuple[SpecKey, ...],
                   options: DecodeOptions) -> DecodeProblem:
    """Check q, the caches and the operands against one another and describe them.

    Raises:
        InvalidInput: what no backend could give a meaning; names the argument.
        UnsupportedProblem: a mask with exceptions.
    """
    q, k, v = specs = tuple(map(TensorSpec._make, tensors))
    check_each(*specs)
    given = {own[0]: TensorSpec._make(own) for own in operands}
    check_caches(q, k, v, given)
    (b, hq, sq, d), (_, hk, page, _), dv = q.shape, k.shape, v.shape[3]
    table, angles = given.get("block_table"), given.get("rotary_cos")
    capacity = page if table is None or len(table.shape) != 2 else page * table.shape[1]
    new = given["k"].shape[2] if "k" in given and len(given["k"].shape) == 4 else 0
    check_cache_operands(q, given, {"hk": hk, "dv": dv, "capacity": capacity, "new": new})
    if angles is not None:
        check_angles(angles, given["rotary_sin"], d, capacity, q.device)
    check_mask_to_decode(options.mask, is_mask=isinstance(options.mask, Mask))
    return DecodeProblem(
        b=b, hq=hq, hk=hk, sq=sq, d=d, dv=dv, dtype=q.dtype, device=q.device, capacity=capacity,
        page=0 if table is None else page, new=new, rotary_dim=0 if angles is None else int(2 * angles.shape[1]),
        positions=0 if angles is None else angles.shape[0], scale=checked_scale(options.scale, d),
        mask=options.mask, softcap=checked_softcap(options.softcap), interleaved=options.rotary_interleaved,
        num_splits=checked_splits(options.num_splits), deterministic=options.deterministic,
        tensors=tuple((own.name, tuple(own.strides), own.dtype) for own in (*specs, *given.values())))
