"""Masks that Transformers describes as functions of indices, translated into masks that kernels skip tiles by.

Transformers builds a layer's mask out of closures of ``masking_utils``, joined by ``and_masks``: causal, sliding
window, chunked, packed, padded. Those are known here by their names, and become bands, documents and lengths: nothing
of size queries x keys is made, and nothing is waited for. Any other is evaluated, pair by pair, into a boolean tensor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tilewise.integrations.mask_as_tensor import AsTensor
from tilewise.masks import Mask, TensorMask, chunk, window
from tilewise.masks.document_ranges import documents_of
from tilewise.masks.tile_lists import TILE

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class ModelMask(AsTensor):
    """What a model hands from its mask function to its layers; a tensor of four dims where models compute with it.

    Attributes:
        visible: who sees whom.
        seqlens_k: (b,): keys in use of a cache that is longer; None = all.
        shape: (b, 1, queries, keys).
        is_band: whether the band of ``visible`` says it all, packed sequences aside.
        dtype, device, made: as of :class:`AsTensor`.
    """

    visible: Mask | TensorMask
    seqlens_k: torch.Tensor | None
    shape: tuple[int, int, int, int]
    is_band: bool = True
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    made: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def band(self) -> Mask:
        """Who sees whom by position alone."""
        return self.visible.band if isinstance(self.visible, TensorMask) else self.visible

    @property
    def hides_nothing(self) -> bool:
        """Whether that is known without a look at a tensor."""
        return self.visible == Mask() and self.seqlens_k is None

    def pairs(self) -> torch.Tensor:
        """Return which pairs take part: (b, 1, queries, keys), bool, as Transformers' own mask function for SDPA."""
        _, _, query_length, key_length = self.shape
        queries = torch.arange(query_length, device=self.device)[:, None]
        keys = torch.arange(key_length, device=self.device)
        used = None if self.seqlens_k is None else self.seqlens_k.view(-1, 1, 1, 1)
        if used is not None and self.band.alignment == "bottom_right":
            queries = queries + used - key_length  # the last query stands on the last key in use
        seen = self.band.band(query_length, key_length).sees(queries, keys)
        if used is not None:
            seen = seen & (keys < used)
        if isinstance(self.visible, TensorMask):
            others = TensorMask(Mask(), self.visible.tensor, self.visible.documents)
            seen = seen & others.visible(query_length, key_length)
        return seen.expand(self.shape)

    def to(self, *where: Any, **options: Any) -> Any:
        """Move the tensors, for a model whose layers lie on several devices; another dtype makes it a tensor."""
        like = [other for other in (*where, *options.values()) if isinstance(other, torch.Tensor)]
        dtypes = [other for other in (*where, *options.values()) if isinstance(other, torch.dtype)]
        if any(dtype is not self.dtype for dtype in (*dtypes, *(other.dtype for other in like))):
            return self.added.to(*where, **options)
        devices = [*where[:1], options.get("device"), *(other.device for other in like)]
        devices = [device for device in devices if isinstance(device, torch.device | str | int)]
        if not devices:
            return self
        device, non_blocking = torch.device(devices[0]), options.get("non_blocking", False)

        def moved(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        visible = self.visible
        if isinstance(visible, TensorMask):
            parts = {name: type(lists)(*map(moved, lists)) for name in ("documents", "tiles")
                     if (lists := getattr(visible, name)) is not None}
            visible = replace(visible, tensor=moved(visible.tensor), **parts)
        return replace(self, visible=visible, seqlens_k=moved(self.seqlens_k), device=device)


class Places(NamedTuple):
    """Where the queries and keys of a mask stand in their sequence.

    Attributes:
        batch, queries, keys: how many.
        query_offset, key_offset: the position of the first; the query's may be a tensor of one element.
        device: of the mask.
        dtype: of the model, for what computes with the mask.
    """

    batch: int
    queries: int
    keys: int
    query_offset: int | torch.Tensor
    key_offset: int
    device: torch.device | str
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What the mask broadcasts over."""
        return self.batch, 1, self.queries, self.keys

    def mask(self, visible: Mask | TensorMask, seqlens_k: torch.Tensor | None = None, *, is_band: bool) -> ModelMask:
        """Say who sees whom here."""
        return ModelMask(visible, seqlens_k, self.shape, is_band, self.dtype, torch.device(self.device))


class Pattern(NamedTuple):
    """A mask function with a name: what it hides by position, and the ids of packed sequences.

    Attributes:
        left, right: keys kept on either side of the query's own position; None = all.
        chunk: positions a chunk; None = no chunks.
        left_padding: (b,): where the chunks of a sequence begin.
        packed: (b|1, s): which sequence a position belongs to.
        empty: True where no key is seen, as in a window of no keys that a model describes and does not use.
    """

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    left_padding: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    empty: bool | None = None


def pattern_of(mask_function: MaskFunction) -> Pattern | None:
    """Name a mask function; None if a part of it is unknown, or two parts do not go together."""
    pattern = parts_of(mask_function)
    # Chunks of packed sequences begin anew with each, or not: Transformers' versions differ.
    return None if pattern is not None and pattern.packed is not None and pattern.chunk is not None else pattern


def parts_of(mask_function: MaskFunction) -> Pattern | None:
    """Name all parts of a mask function, chunks and packed sequences beside each other too."""
    pattern = Pattern()
    for part in _parts(mask_function):
        said = _read(part)
        if said is None:
            return None
        for name, value in said.items():
            own = getattr(pattern, name)
            if own is not None and name in ("left", "right"):
                value = min(own, value)
            elif own is not None:
                return None
            pattern = pattern._replace(**{name: value})
    return pattern


def translate(pattern: Pattern, places: Places, padding: torch.Tensor | None) -> ModelMask | None:
    """Make the mask of a pattern; None where no band fits the queries' offset, or packed sequences have padding.

    Args:
        pattern: what is hidden by position.
        places: where queries and keys stand.
        padding: (b, keys), bool, True = a token; None = all are.
    """
    if pattern.empty:
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=places.device)
        return places.mask(TensorMask(Mask(), nothing), is_band=False)
    aligned = _aligned(pattern, places)
    if aligned is None or (pattern.packed is not None and padding is not None):
        return None
    band, seqlens_k = aligned
    if padding is not None and places.queries == 1 and pattern.chunk is None:
        # One query has no tiles to skip: the padding mask as it is, broadcast over heads, costs nothing to make.
        return places.mask(TensorMask(band, padding[:, None, None, :]), seqlens_k, is_band=False)
    chunked = pattern.chunk is not None and not (padding is None and _is_on_grid(pattern, places))
    if pattern.chunk is not None and not chunked:
        band = band & chunk(pattern.chunk, band.alignment)
    ids = _ids(pattern if chunked else pattern._replace(chunk=None), places, padding)
    visible = band if ids is None else TensorMask(band, documents=documents_of(*ids))
    return places.mask(visible, seqlens_k, is_band=padding is None and not chunked)


def evaluated(dense: torch.Tensor, places: Places) -> ModelMask:
    """Wrap a boolean tensor (b, 1, queries, keys), with lists of its visible tiles where there are several tiles."""
    _, _, queries, keys = dense.shape
    visible = TensorMask(Mask(), dense)
    if queries > TILE and not torch.compiler.is_compiling():
        visible = visible.tiled(queries, keys)
    return places.mask(visible, is_band=False)


def _aligned(pattern: Pattern, places: Places) -> tuple[Mask, torch.Tensor | None] | None:
    """Return the band, and the keys in use where only they put its diagonal in place; None if nothing does.

    Query i stands on key i + shift.
    """
    if pattern.left is None and pattern.right is None and pattern.chunk is None:
        return Mask(), None
    if isinstance(places.query_offset, torch.Tensor):
        if pattern.right != 0:  # keys past the last query take part too
            return None
        used = places.query_offset.reshape(-1)[:1] + (places.queries - places.key_offset)
        return window(pattern.left, 0, "bottom_right"), used.expand(places.batch)
    shift = places.query_offset - places.key_offset
    # Bounds that hide nothing here are left out: what is left is a plainer call.
    left = pattern.left if pattern.left is not None and pattern.left < places.queries - 1 + shift else None
    right = pattern.right if pattern.right is not None and pattern.right < places.keys - 1 - shift else None
    if shift == places.keys - places.queries:
        return window(left, right, "bottom_right"), None
    if shift == 0 or (left is None and right is None and pattern.chunk is None):
        return window(left, right, "top_left"), None
    used_keys = places.queries + shift
    if right != 0 or not 0 < used_keys < places.keys:
        return None
    return (window(left, right, "bottom_right"),
            torch.full((places.batch,), used_keys, dtype=torch.int32, device=places.device))


def _is_on_grid(pattern: Pattern, places: Places) -> bool:
    """Whether chunks begin at key 0 of the call: the padding that may move them is known to be none."""
    return not isinstance(places.query_offset, torch.Tensor) and places.key_offset % (pattern.chunk or 1) == 0


def _ids(pattern: Pattern, places: Places,
         padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Number queries and keys so that those see each other that have one number, the band aside; None = all do."""
    if pattern.packed is not None:
        return pattern.packed, None
    if padding is None and pattern.chunk is None:
        return None
    queries = torch.arange(places.queries, device=places.device) + places.query_offset
    keys = torch.arange(places.keys, device=places.device) + places.key_offset
    if pattern.chunk is not None:
        start = 0 if pattern.left_padding is None else pattern.left_padding[:, None]
        query_ids, key_ids = ((positions - start) // pattern.chunk for positions in (queries, keys))
    else:
        query_ids, key_ids = torch.zeros_like(queries), torch.zeros_like(keys)
    if padding is not None:
        # No query has the least of all numbers.
        key_ids = torch.where(padding, key_ids, torch.iinfo(torch.int64).min)
    return query_ids, key_ids


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """Take apart what and_masks joined, and see through what moves packed positions to the start."""
    held = _held(mask_function)
    if _is_made_by("and_masks", mask_function):
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif _is_made_by("remap_positions_for_packed_sequence", mask_function):
        # Within a sequence, distances stay; pairs of two sequences are hidden by the mask that comes with this one.
        yield from _parts(held["mask_function"])
    else:
        yield mask_function


def _read(part: MaskFunction) -> dict[str, Any] | None:
    """Say what one function hides; None = unknown."""
    utils = _masking_utils()
    if part is utils.causal_mask_function:
        return {"right": 0}
    if part is utils.bidirectional_mask_function:
        return {}
    held = _held(part)
    if _is_made_by("sliding_window_overlay", part):  # W keys, the query's own among them
        keys = held["sliding_window"]
        return {"left": keys - 1} if keys > 0 else {"empty": True}
    if _is_made_by("sliding_window_bidirectional_overlay", part):  # W keys on either side of it
        return {"left": held["sliding_window"], "right": held["sliding_window"]}
    if _is_made_by("chunked_overlay", part):
        return {"chunk": held["chunk_size"], "left_padding": held["left_padding"]}
    if _is_made_by("packed_sequence_mask_function", part):
        return {"packed": held["packed_sequence_mask"]}
    return None


def _held(function: MaskFunction) -> dict[str, Any]:
    """Return what a closure holds, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _is_made_by(maker: str, function: MaskFunction) -> bool:
    """Whether a function is a closure that this one of ``masking_utils`` returns."""
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    return home == "transformers.masking_utils" and name.startswith(f"{maker}.<locals>.")


def _masking_utils() -> Any:
    from transformers import masking_utils

    return masking_utils
