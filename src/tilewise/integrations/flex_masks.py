"""FlexAttention's ``BlockMask`` as a mask of tilewise's.

A BlockMask lists blocks of pairs: full ones, whose pairs all take part, and partial ones, of whose pairs ``mask_mod``
decides. What is not listed is hidden. Here that is one mask function, which reads the state of a pair's block, asks in
a partial one what ``mask_mod`` was traced to (flex_tracing.py), and is right by itself; and lists of the visible tiles,
by which kernels skip the others. Both take memory by blocks, not by pairs.

A ``mask_mod`` that has no text in Triton is evaluated for all pairs instead, into a boolean tensor.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tilewise.errors import InvalidInput
from tilewise.functions import PAIR, MaskFunction, complete
from tilewise.integrations.flex_remembered import remembered
from tilewise.integrations.flex_symbols import Untraceable
from tilewise.integrations.flex_tracing import Formula, mask_formula, not_in_triton
from tilewise.masks import TensorMask, window
from tilewise.masks.tile_lists import TILE, listed

FROM_THE_FIRST = window(None, None, "top_left")  # hides nothing: distances are those of indices
_PARTIAL, _FULL = 1, 2
# Of each BlockMask the mask_mod that it had, and its mask.
_TRANSLATED: WeakKeyDictionary[Any, tuple[Callable[[], Any], tuple[int, ...], TensorMask]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class OwnMask(MaskFunction):
    """A mask function whose tensors the library has made and no caller writes, so that plans of it are kept."""

    def __post_init__(self) -> None:
        complete(self, "MaskFunction", None, PAIR, owns_tensors=True)

    def with_tensors(self, *tensors: torch.Tensor) -> MaskFunction:
        """Return the same function with tensors of the caller's."""
        return MaskFunction(self.triton, self.torch, tensors)


def traced_mask(block_mask: Any, *, copied: bool = False) -> TensorMask:
    """Return what a BlockMask lets take part as a mask with a function that kernels take, and lists of its tiles.

    For calls with the BlockMask's own lengths, ``seq_lengths``; its ``function`` alone, which is the same mask without
    lists of tiles, can be joined to others by ``&``. The lists of blocks are read now. Tensors that its mask_mod reads
    are read in each call as they are then, and an index past the ends of a dim reads the last or first element;
    positions are int32. Numbers that are no tensors are part of the kernels' text.

    Args:
        block_mask: a ``BlockMask``. Its mask_mod, (b, h, q_idx, kv_idx) -> bool, is made of elementwise operations and
            contiguous tensors on the lists' device, read at positions.
        copied: copy the tensors that mask_mod reads. To write them later then changes nothing, and on Hopper GPUs calls
            with the same mask share its plan, which is otherwise made in each call if there are such tensors.

    Raises:
        UnsupportedProblem: mask_mod does something else; names it.
        InvalidInput: not a ``BlockMask``, or one whose lists are of other lengths than its ``seq_lengths``.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> def dilated(b, h, q_idx, kv_idx):
    ...     return (q_idx - kv_idx) % 2 == 0
    >>> print(traced_mask(create_block_mask(dilated, None, None, 3, 3, device="cpu")).show(3, 3))
    ■ · ■
    · ■ ·
    ■ · ■
    """
    check_block_mask(block_mask)
    try:
        with torch.inference_mode(False):  # a later call may want gradients
            return _traced(block_mask, copied)
    except Untraceable as reason:
        raise not_in_triton("mask_mod", block_mask.mask_mod, reason, "MaskFunction") from None


def mask_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> TensorMask:
    """Translate a BlockMask for a call; made at its first one, and kept while mask_mod and seq_lengths are the same.

    What mask_mod finds outside of itself is looked at in that call; its tensors are read in each.

    Raises:
        InvalidInput: it is of other lengths, batch entries or heads than query and key.
    """
    check_block_mask(block_mask)
    _check_sizes(block_mask, query, key)
    kept = _TRANSLATED.get(block_mask)
    if kept is not None and kept[0]() is block_mask.mask_mod and kept[1] == tuple(block_mask.seq_lengths):
        return kept[2]
    if torch.compiler.is_compiling():  # which cannot follow what makes a function
        return _evaluated(block_mask)
    with torch.inference_mode(False):  # a later call may want gradients
        made = _translated(block_mask)
    with contextlib.suppress(TypeError):  # of a mask_mod that has no weak references, it is made in each call
        _TRANSLATED[block_mask] = weakref.ref(block_mask.mask_mod), tuple(block_mask.seq_lengths), made
    return made


def check_block_mask(block_mask: Any) -> None:
    """Raise :class:`InvalidInput` for what is no BlockMask, or has lists of other lengths than it says."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise InvalidInput(f"block_mask is a {type(block_mask).__name__}; allowed is a BlockMask, a mask of "
                           "tilewise's, or None.")
    rows, length, side = block_mask.kv_num_blocks.shape[-1], block_mask.seq_lengths[0], block_mask.BLOCK_SIZE[0]
    if rows != -(-length // side):
        raise InvalidInput(f"block_mask has {rows} rows of blocks of {side} queries, and its seq_lengths say {length} "
                           "queries. A part of a BlockMask keeps the lengths of the whole: set its seq_lengths.")


def _check_sizes(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    lengths = query.shape[2], key.shape[2]
    if tuple(block_mask.seq_lengths) != lengths:
        of_mask = " queries and ".join(map(str, block_mask.seq_lengths))
        raise InvalidInput(f"block_mask is of {of_mask} keys, and query and key have {lengths[0]} and {lengths[1]}: "
                           "make one for these lengths.")
    own, sizes = tuple(block_mask.kv_num_blocks.shape[:2]), tuple(query.shape[:2])
    if any(count not in (1, size) for count, size in zip(own, sizes, strict=True)):
        raise InvalidInput(f"block_mask is of {own[0]} batch entries and {own[1]} heads, and query has {sizes[0]} and "
                           f"{sizes[1]}; allowed are as many, or 1.")


def _translated(block_mask: Any) -> TensorMask:
    try:
        return _traced(block_mask)
    except Untraceable as reason:
        made = _evaluated(block_mask)
        name = getattr(block_mask.mask_mod, "__name__", type(block_mask.mask_mod).__name__)
        sq, sk = block_mask.seq_lengths
        warnings.warn(f"mask_mod {name} has what no Triton is made of: {reason}. What it lets take part is read from a "
                      f"boolean tensor of {sq} x {sk}, made of it once.", RuntimeWarning, stacklevel=5)
        return made


def _traced(block_mask: Any, copied: bool = False) -> TensorMask:
    """Return the mask with a function; raises :class:`Untraceable`."""
    states, sides = _block_states(block_mask), block_mask.BLOCK_SIZE
    formula, tensors = remembered(block_mask.mask_mod, lambda mod: _traced_in_blocks(mod, states, sides), states.shape,
                                  states.device, sides)
    if copied:
        tensors = tuple([tensor.detach().to(states.device, copy=True).contiguous() for tensor in tensors])
    for tensor in tensors:
        if tensor.is_inference():
            raise Untraceable("a tensor that was made in inference mode, which no gradient can be kept beside")
        if tensor.device != states.device or not tensor.is_contiguous():
            raise Untraceable(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
                              + ("" if tensor.is_contiguous() else " that is not contiguous"))
    kind = OwnMask if copied or not tensors else MaskFunction
    tensors = (states, *(tensor.detach() for tensor in tensors))
    function = kind(formula.triton, formula.torch, (_sizes(tensors), *tensors))
    tiles = listed(_tile_states(states, sides, block_mask.seq_lengths))
    return TensorMask(FROM_THE_FIRST, tiles=tiles, function=function)


def _traced_in_blocks(mask_mod: Callable[..., Any], states: torch.Tensor,
                      sides: tuple[int, int]) -> tuple[Formula, tuple[torch.Tensor, ...], bool]:
    """Trace what blocks of these states make of a mask_mod; return it and the tensors that are read beside ``states``.

    Whatever goes wrong on the way has a symbol as its reason: what does not is raised when mask_mod is evaluated.
    """
    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch, head = (own if size > 1 else 0 for own, size in zip((b, h), states.shape[:2], strict=True))
        state = states[batch, head, q_idx // sides[0], kv_idx // sides[1]]
        return (state == _FULL) | ((state == _PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    try:
        formula, tensors, is_of_tensors = mask_formula(visible, states.device)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {error}") from error
    return formula, tensors[1:], is_of_tensors


def _sizes(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sizes of all of them, int64, filled on their device: to copy them there would wait for it."""
    return torch.stack([torch.full((), size, device=tensor.device) for tensor in tensors for size in tensor.shape])


def _block_states(block_mask: Any) -> torch.Tensor:
    """Return the state of each block, 0 where it is not listed: (b|1, h|1, blocks of queries, of keys), uint8."""
    states = _is_listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices).to(torch.uint8) * _PARTIAL
    if block_mask.full_kv_num_blocks is None:
        return states
    is_full = _is_listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return torch.where(is_full, _FULL, states)


def _is_listed(block_mask: Any, counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which blocks are listed: of each row of ``indices`` the first ``counts``."""
    key_blocks = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    is_one = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # What is not listed goes into a column that is cut off.
    places = torch.where(is_one, indices.long(), key_blocks)
    is_listed = torch.zeros(*counts.shape, key_blocks + 1, dtype=torch.bool, device=indices.device)
    return is_listed.scatter(-1, places, is_one)[..., :key_blocks]


def _tile_states(states: torch.Tensor, sides: tuple[int, int], lengths: tuple[int, int]) -> torch.Tensor:
    """Return the states of tiles of TILE x TILE pairs, as :func:`listed` takes them, of those of blocks."""
    # Of the blocks that a tile touches: how many are visible, are full, and are there.
    counts = torch.stack((states > 0, states == _FULL, torch.ones_like(states, dtype=torch.bool))).int()
    cut = []  # which tiles reach past the end
    for dim, side, length in zip((-2, -1), sides, lengths, strict=True):
        begin = torch.arange(0, length, TILE, device=states.device)
        end = begin + TILE
        first, stop = begin // side, (end.clamp(max=length) - 1) // side + 1
        sums = torch.nn.functional.pad(counts.cumsum(dim), (0, 0, 1, 0) if dim == -2 else (1, 0))
        counts = sums.index_select(dim, stop) - sums.index_select(dim, first)
        cut.append(end > length)
    visible, full, all_of_them = counts
    is_cut = cut[0][:, None] | cut[1]
    return torch.where((full == all_of_them) & ~is_cut, 2, (visible > 0).int())


def _evaluated(block_mask: Any) -> TensorMask:
    """Return the mask with a boolean tensor of all pairs: full blocks, and others pair by pair."""
    from torch.nn.attention.flex_attention import create_mask

    sq, sk = block_mask.seq_lengths
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    pairs = create_mask(block_mask.mask_mod, batch, heads, sq, sk, device=block_mask.kv_num_blocks.device)
    states = _block_states(block_mask)
    for dim, side, length in zip((-2, -1), block_mask.BLOCK_SIZE, (sq, sk), strict=True):
        states = states.index_select(dim, torch.arange(length, device=states.device) // side)
    visible = (states == _FULL) | ((states == _PARTIAL) & pairs)
    return TensorMask(FROM_THE_FIRST, visible).tiled(sq, sk)
