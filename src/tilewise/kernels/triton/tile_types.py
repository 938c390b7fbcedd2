"""What the kernels hand to their loops: named tuples of a tile, of the blocks that it meets, and of the mask."""

from typing import Any, NamedTuple


class Band(NamedTuple):
    """The mask's band inside a kernel: arguments.Bounds, and ``shift``.

    Each is None where the mask does not have it, which Triton knows at compile time: what is not there costs nothing.
    Where the lengths of a sequence move the diagonal, ``shift`` is to be added to lower, upper and offset.
    """

    lower: Any
    upper: Any
    prefix: Any
    sink_tokens: Any
    chunk: Any
    offset: Any
    shift: Any


class Rows(NamedTuple):
    """Rows of one sequence of a head, of which tiles are loaded (primitives.load_tile).

    source: a pointer to the first row, or a tensor descriptor. place: (batch, head, first row), for the descriptor.
    tensor: the kernel's argument, for the strides.
    """

    source: Any
    place: Any
    tensor: Any


class Tile(NamedTuple):
    """The tile of queries or of keys that a CTA computes.

    row: sequence * hq + head, for the draws of dropout. first, offs: its first position and all of them, counted in the
    sequence. length: of the sequence. numbers: the documents of its rows, broadcast to a tile of scores, or None.
    """

    row: Any
    sequence: Any
    head: Any
    first: Any
    offs: Any
    length: Any
    numbers: Any


class BlockRange(NamedTuple):
    """The blocks that the loops of a tile visit: of keys for a tile of queries, of queries for one of keys.

    steps: of mask_ranges.blocks_of_range or blocks_of_list. seen_from: the first visible row. listed: the tile's list,
    or None. documents: pointer to the document numbers of the rows, or None.
    """

    steps: Any
    seen_from: Any
    listed: Any
    documents: Any


class ScoreBlock(NamedTuple):
    """Where a block of scores lies: in which head, from which query and key on, and where the queries and keys stop."""

    row: Any
    sequence: Any
    head: Any
    first_query: Any
    first_key: Any
    stop_q: Any
    stop_k: Any
