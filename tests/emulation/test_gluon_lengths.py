"""Where a Hopper kernel's tiles lie when lengths are data: jit functions called as plain Python on CPU tensors."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from emulation.hopper_calls import bound_backward, bound_forward
from tilewise.kernels.hopper.arguments import MaskBounds
from tilewise.kernels.hopper.backward.config import HopperD128Config
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec
from tilewise.problem.sequences import Sequences
from tilewise.testing.strategies import windows

lengths = pytest.importorskip("tilewise.kernels.hopper.varlen", reason="Triton is not installed")
tiles = pytest.importorskip("tilewise.kernels.hopper.tile_scheduler")
mask_ranges = pytest.importorskip("tilewise.kernels.hopper.mask_ranges")
ROWS = 64  # queries a warpgroup
BLOCK_N, STEP = 128, 64  # of a program of the backward kernel, and its queries a step
CONFIG = HopperForwardConfig(block_n=128, consumers=2)
MASKS = windows(600)
PACKS = st.sampled_from((1, 2, 8))  # rows of a tile that are heads at one query


class Pointer:
    """What a kernel reads a tensor by; an address outside of it may be there under a mask alone."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, step):
        return Pointer(self.values, self.at + step)


def load(pointer, mask=True, other=0):
    at, mask = torch.as_tensor(pointer.at), torch.as_tensor(mask)
    assert torch.all((at >= 0) & (at < len(pointer.values)) | ~mask), "reads outside"
    found = torch.tensor(pointer.values or [0])[torch.where(mask, at, 0)]
    return torch.where(mask, found, other)


def maximum(one, other):
    return one.clamp(min=other) if isinstance(one, torch.Tensor) and one.ndim else max(one, other)


@pytest.fixture(scope="module", autouse=True)
def plain_python():
    """The functions of gl that are called here, on numbers and tensors; sequences are looked through by fours."""
    language = SimpleNamespace(minimum=min, maximum=maximum, where=lambda test, a, b: a if test else b,
                               int32=torch.int32, arange=lambda first, last, layout: torch.arange(first, last),
                               load=load, sum=torch.sum)
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiles, mask_ranges, lengths):
            patch.setattr(module, "gl", language)
        for module in (mask_ranges, lengths):
            patch.setattr(module, "QUERIES", STEP)
        for module, name in ((tiles, "_swizzled"), (mask_ranges, "masked_q_blocks_of"), (lengths, "tile_at"),
                             (lengths, "sequence_of"), (lengths, "border_at"), (lengths, "extent"),
                             (lengths, "waits_for_its_own")):
            patch.setattr(module, name, getattr(module, name).fn)
        patch.setattr(lengths, "_CHUNK", 4)
        yield


def facts(size):
    return OperandSpec((size,), (1,), torch.int32)


class Packed:
    """Sequences one behind the other; ``used`` rows of each take part, and ``behind`` rows follow the last one."""

    def __init__(self, rows, used, behind):
        self.borders = [list(accumulate(side, initial=0)) for side in rows]
        self.rows, self.used, self.totals = rows, used, [sum(side) + behind for side in rows]

    def bound(self, mask, heads=1, backward=False, pack_gqa=1):
        """Return the kernel's arguments for them: order, band, lengths and what is fixed."""
        count = len(self.rows[0])
        said = [None if side is None else facts(count) for side in self.used]
        problem = replace(problem_of(self.totals, 1, heads, mask,
                                     Sequences(count, facts(count + 1), facts(count + 1), *said)), hq=heads * pack_gqa)
        pointers = [Pointer(side) for side in self.borders] + [
            None if side is None else Pointer(side) for side in self.used]
        return arguments_of_backward(problem, (*pointers, count)) if backward else arguments(
            problem, (*pointers, count), pack_gqa)

    def lengths(self, sequence):
        """Queries and keys that take part."""
        return [(rows if used is None else [min(pair) for pair in zip(rows, used, strict=True)])[sequence]
                for rows, used in zip(self.rows, self.used, strict=True)]


def problem_of(sizes, b, heads, mask, sequences):
    strides = (heads * sizes[1] * 128, sizes[1] * 128, 128, 1)
    return AttentionProblem(b=b, hq=heads, hk=heads, sq=sizes[0], sk=sizes[1], d=128, dv=128, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=mask, sequences=sequences,
                            k_strides=strides, v_strides=strides)


def arguments(problem, operands, pack_gqa=1):
    numbers, constants = bound_forward(problem, CONFIG, pack_gqa=pack_gqa).scalars
    assert numbers.num_sequences == operands[-1]
    return numbers.grid, numbers.bounds, operands, constants


def arguments_of_backward(problem, operands):
    numbers, constants = bound_backward(problem, HopperD128Config()).scalars
    assert numbers.num_sequences == operands[-1]
    return numbers.grid, numbers.bounds, operands, constants


def located_keys(order, band, operands, shape):
    """Every tile of keys: (first key, head, batch), its band, what else there is to know."""
    for number in range(order[0] * order[1] * order[2]):
        tile = tiles.kv_tile_at.fn(number, order, shape)
        found = [int(part) for part in lengths.locate_keys.fn(tile, band, operands, shape)]
        yield found[:3], MaskBounds(*found[3:7]), found[7:]


def located(order, band, operands, shape):
    """Every tile that is handed out, with the first row of its keys."""
    for number in range(order[0] * order[1] * order[2]):
        tile, row_k, exists = lengths.locate_tile.fn(number, order, band, operands, shape)
        if exists:
            yield lengths.WorkTile(*map(int, tile)), int(row_k)


@st.composite
def packed(draw):
    count = draw(st.integers(0, 9))
    length = st.sampled_from((0, 1, 127, 128, 129)) | st.integers(0, 500)
    many = st.lists(length, min_size=count, max_size=count)
    return Packed([draw(many), draw(many)], [draw(st.none() | many), draw(st.none() | many)], draw(st.integers(1, 200)))


@given(packed(), MASKS, PACKS)
@example(Packed([[128, 0, 0, 1, 300], [5, 700, 0, 0, 129]], [None, None], 0), causal("bottom_right"), 1)
@example(Packed([[100, 300], [300, 100]], [[50, 0], [0, 300]], 70), window(10, 0, "bottom_right"), 1)
def test_every_row_of_packed_sequences_is_in_one_tile_and_tiles_know_their_sequence(sequences, mask, pack_gqa):
    order, band, operands, shape = sequences.bound(mask, heads=2, pack_gqa=pack_gqa)
    queries = ROWS * CONFIG.consumers // pack_gqa
    written = Counter()
    for tile, row_k in located(order, band, operands, shape):
        first, head, batch, row_q, rows, sq, *_ = tile
        assert batch in range(len(sequences.rows[0])) or not sequences.rows[0], "no sequence at all is refused"
        assert first % queries == 0
        written.update((head, row_q + row) for row in range(first, min(rows, first + queries)))
        if row_q == sequences.borders[0][-1] and sq == 0:
            continue  # behind the last one, or a sequence without queries
        sequence = next(n for n, start in enumerate(sequences.borders[0])
                        if start == row_q and sequences.rows[0][n] == rows)
        assert sq == sequences.lengths(sequence)[0]
        if sequences.rows[0].count(rows) == 1:
            assert row_k == sequences.borders[1][sequence]
            assert batch == sequence
    assert written == Counter((head, row) for head in range(2) for row in range(sequences.totals[0]))


@pytest.mark.parametrize("rows", [[100, 300], [300, 100], [50, 400, 30]], ids=str)
@pytest.mark.parametrize("behind", [-20, -110, -390])
def test_a_border_behind_the_tensor_leads_no_tile_there(rows, behind):
    """Each row of the tensors is in one tile, and no tile has other rows, of queries or of keys."""
    sequences = Packed([rows, rows], [None, None], behind)
    total = sequences.totals[0]
    order, band, operands, shape = sequences.bound(Mask())
    written = Counter()
    for tile, row_k in located(order, band, operands, shape):
        assert row_k + tile.sk <= total
        written.update(tile.row_start + row for row in range(tile.first, min(
            tile.rows, tile.first + ROWS * CONFIG.consumers)))
    assert written == Counter(range(total))
    written = Counter()
    for (first, *_), bounds, (row_q, row_k, *_begins, of_tile, _block, _rows_q) in located_keys(
            *sequences.bound(Mask(), backward=True)):
        assert row_q + bounds.sq <= total
        written.update(row_k + key for key in range(first, min(of_tile, first + 128)))
    assert written == Counter(range(total))


@pytest.mark.parametrize("borders", [(0, -64, 400), (0, -600, -1, 400), (0, 300, -2000, 400)], ids=str)
def test_a_border_in_front_of_the_tensor_leads_no_tile_there(borders):
    sequences = Packed([[0] * (len(borders) - 2) + [400]] * 2, [None, None], 30)
    sequences.borders = [list(borders)] * 2
    written = Counter()
    for tile, row_k in located(*sequences.bound(Mask())):
        assert min(tile.row_start + tile.first, row_k) >= 0
        written.update(tile.row_start + row for row in range(tile.first, min(
            tile.rows, tile.first + ROWS * CONFIG.consumers)))
    assert set(written) <= set(range(430))
    assert set(written) == set(range(430)) or max(borders[:-1]) > 0, "of borders that fall some rows may be left out"
    for (first, *_), _bounds, (row_q, row_k, *_others) in located_keys(*sequences.bound(Mask(), backward=True)):
        assert min(row_k + first, row_q) >= 0


@given(packed(), MASKS, PACKS)
@example(Packed([[128, 0, 0, 1, 300], [5, 700, 0, 0, 129]], [None, None], 0), causal("bottom_right"), 1)
@example(Packed([[300], [700]], [None, [300]], 0), causal("top_left"), 1)
@example(Packed([[300], [700]], [[200], None], 0), causal("top_left"), 1)
@example(Packed([[700], [300]], [None, None], 0), window(100, 50, "bottom_right"), 1)
def test_kv_blocks_hold_every_visible_key_and_only_the_first_passes_the_last_visible_key(sequences, mask, pack_gqa):
    order, band, operands, shape = sequences.bound(mask, pack_gqa=pack_gqa)
    rows_of_warpgroup = ROWS // pack_gqa
    queries = rows_of_warpgroup * CONFIG.consumers
    for tile, _ in located(order, band, operands, shape):
        first, _head, _batch, row_q, rows, sq, seen, *_ = tile
        same = [n for n, start in enumerate(sequences.borders[0][:-1])
                if start == row_q and sequences.rows[0][n] == rows]
        own_band = lengths.bounds_of_tile.fn(tile, band, shape)
        spans = mask_ranges.kv_blocks_of.fn(first, own_band, shape)
        begins = [mask_ranges.n_block_start.fn(step, spans, shape) for step in range(spans[3])]
        assert begins[0] >= 0
        assert all(begin >= 0 and begin + CONFIG.block_n <= seen for begin in begins[1:])
        if not same or first >= sq:
            assert seen == 0
            assert len(begins) == 1, "one step, that hides all"
            assert all(mask_ranges.masked_blocks_of.fn(row, spans, own_band, shape) == 1
                       for row in (first, first + rows_of_warpgroup))
            continue
        visible = mask.visible(sq, sequences.lengths(same[0])[1])
        any_sees = visible.any(0).nonzero().flatten().tolist()
        assert seen == (any_sees[-1] + 1 if any_sees else seen), "keys that nobody sees are read"
        keys = visible[first:first + queries].any(0).nonzero().flatten().tolist()
        assert all(any(begin <= key < begin + CONFIG.block_n for begin in begins) for key in keys)
        for row in range(first, min(sq, first + queries), rows_of_warpgroup):
            for begin in begins[mask_ranges.masked_blocks_of.fn(row, spans, own_band, shape):]:
                part = visible[row:row + rows_of_warpgroup, begin:begin + CONFIG.block_n]
                assert part.all()
                assert part.shape[1] == CONFIG.block_n


@given(packed(), MASKS, st.integers(-500, 10_000))
@example(Packed([[300, 100], [100, 300]], [None, None], 70), causal("bottom_right"), 200)
def test_the_first_border_is_taken_for_0_so_that_nothing_is_read_in_front_of_the_tensors(sequences, mask, border):
    for find, backward in ((located, False), (located_keys, True)):
        called = sequences.bound(mask, heads=2, backward=backward)
        wanted = list(find(*called))
        for side in sequences.borders:
            side[0] = border
        assert list(find(*called)) == wanted
        for side in sequences.borders:
            side[0] = 0


@given(packed(), MASKS)
def test_a_sequences_tiles_are_those_that_it_has_alone(sequences, mask):
    """So its bits are no neighbour's affair."""
    def tiles_of(packed):
        return Counter((tile[0], *tile[4:]) for tile, _ in located(*packed.bound(mask))
                       if tile[3] < packed.borders[0][-1])

    alone = Counter()
    for n in range(len(sequences.rows[0])):
        alone += tiles_of(Packed([[side[n]] for side in sequences.rows],
                                 [None if side is None else [side[n]] for side in sequences.used], 1))
    assert tiles_of(sequences) == alone


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), min_size=1, max_size=4), MASKS,
       st.booleans(), st.booleans())
def test_padded_entries_have_the_tiles_of_their_shape_and_the_lengths_of_their_own(pairs, mask, of_q, of_k):
    b, (queries, keys) = len(pairs), zip(*pairs, strict=True)
    sequences = Sequences(None, None, None, facts(b) if of_q else None, facts(b))
    operands = (None, None, Pointer(list(queries)) if of_q else None, Pointer(list(keys)), b)
    order, band, operands, shape = arguments(problem_of((300, 400), b, 2, mask, sequences), operands)
    found = list(located(order, band, operands, shape))
    assert Counter(tuple(tile[:3]) for tile, _ in found) == Counter(
        (first, head, batch) for first in range(0, 300, ROWS * CONFIG.consumers) for head in range(2)
        for batch in range(b))
    for (first, _head, batch, row, rows, sq, seen, *_shift), row_k in found:
        assert (row, rows, row_k, sq) == (0, 300, 0, queries[batch] if of_q else 300)
        visible = mask.visible(sq, keys[batch]).any(0).nonzero().flatten().tolist()
        if first >= sq:
            assert seen == 0
        elif visible:
            assert seen == visible[-1] + 1


def test_tile_metadata_has_room_for_each_number_of_a_tile():
    for sequences in (Packed([[5], [5]], [None, None], 0), Packed([[5], [5]], [[3], [4]], 2)):
        for mask in (Mask(), causal("top_left"), causal("bottom_right"), window(None, None, "bottom_right")):
            order, band, operands, shape = sequences.bound(mask)
            assert shape.BOTTOM_RIGHT is (mask == causal("bottom_right"))
            assert all(len(lengths.numbers_of_tile.fn(tile, shape)) == lengths.tile_size(shape)
                       for tile, _ in located(order, band, operands, shape))


@given(packed(), MASKS)
@example(Packed([[5, 700, 0, 0, 129], [128, 0, 0, 1, 300]], [None, None], 0), causal("bottom_right"))
@example(Packed([[300, 100], [100, 300]], [[0, 100], [50, 0]], 70), window(10, 0, "bottom_right"))
def test_every_row_of_packed_keys_is_in_one_tile_that_writes_its_gradient(sequences, mask):
    written = Counter()
    for (first, head, batch), _, (_row_q, row_k, _see_from, _seen_from, rows, _step, _rows_q) in located_keys(
            *sequences.bound(mask, heads=2, backward=True)):
        assert batch == 0
        assert first % BLOCK_N == 0
        written.update((head, row_k + row) for row in range(first, min(rows, first + BLOCK_N)))
    assert written == Counter((head, row) for head in range(2) for row in range(sequences.totals[1]))


@given(packed(), MASKS)
@example(Packed([[5, 700, 0, 0, 129], [128, 0, 0, 1, 300]], [None, None], 0), causal("bottom_right"))
@example(Packed([[700], [300]], [None, None], 0), window(100, 50, "bottom_right"))
@example(Packed([[300], [700]], [None, None], 0), window(100, None, "top_left"))
@example(Packed([[700], [300]], [None, [200]], 5), window(70, None, "bottom_right"))
@example(Packed([[77], [400]], [[70], None], 0), Mask())
def test_a_kv_tile_knows_its_visible_queries_and_keys_and_its_q_blocks_hold_every_visible_score(sequences, mask):
    order, band, operands, shape = sequences.bound(mask, backward=True)
    owners, pairs = {}, Counter()
    for (first, *_), own_band, (row_q, row_k, see_from, seen_from, rows, first_step, rows_q) in located_keys(
            order, band, operands, shape):
        spans = mask_ranges.q_blocks_of.fn(first, own_band, shape)
        same = [n for n, start in enumerate(sequences.borders[1][:-1])
                if start == row_k and sequences.rows[1][n] == rows > 0]
        visible = mask.visible(*sequences.lengths(same[0])) if same and row_k < sequences.borders[1][-1] else None
        if visible is None or not visible[:, first:first + BLOCK_N].any():
            assert spans[3] == 0
            continue
        sq, sk = visible.shape
        assert (row_q, rows_q) == (sequences.borders[0][same[0]], sequences.rows[0][same[0]])
        seeing, seen = (visible.any(side).nonzero().flatten().tolist() for side in (1, 0))
        assert (see_from, own_band[0]) == (seeing[0], seeing[-1] + 1), "the others' rows are zeroed"
        assert (seen_from, own_band[1]) == (seen[0], seen[-1] + 1)
        begins = [mask_ranges.q_block_start.fn(step, spans, shape) for step in range(spans[3])]
        for begin in begins:
            assert 0 <= begin < sq
            assert owners.setdefault(first_step + begin // STEP, (same[0], begin)) == (same[0], begin)
            pairs[same[0]] += int(visible[begin:begin + STEP, first:first + BLOCK_N].sum())
        for key in range(first, first + BLOCK_N, ROWS):
            ends = mask_ranges.phases_of.fn(key, spans, own_band, shape)
            for step in range(ends[1], ends[2]):
                assert key + ROWS <= sk
                assert visible[begins[step]:begins[step] + STEP, key:key + ROWS].all()
                assert begins[step] == spans[0] + (spans[1] - spans[2] + step) * STEP
    count = len(sequences.rows[0])
    assert +pairs == +Counter({n: int(mask.visible(*sequences.lengths(n)).sum()) for n in range(count)})
    steps = sequences.totals[0] // STEP + count + 1
    assert all(0 <= step < steps for step in owners), "steps of the sums that there are"


@given(packed(), MASKS)
def test_a_fixed_order_of_dq_leaves_no_tile_out(sequences, mask):
    order, band, operands, shape = sequences.bound(mask, backward=True)
    ordered = shape._replace(DETERMINISTIC=True, HAS_UPPER=True)  # then tiles come in the same order, too
    assert list(located_keys(order, band, operands, ordered)) == list(located_keys(
        order, band, operands, shape._replace(HAS_UPPER=True)))


@given(st.lists(st.integers(-300, 900), min_size=3, max_size=6),
       st.lists(st.integers(-300, 900), min_size=6, max_size=6))
@example([0, 300, 100, 400], [0, 100, 200, 400, 0, 0])
@example([0, 100, 200, 400], [0, 300, 100, 400, 0, 0])
@example([0, 350, 30, 60, 400], [0, 10, 20, 400, 0, 0])
def test_whatever_the_borders_tiles_wait_for_those_that_are_there_and_share_no_block(of_keys, of_queries):
    """In a fixed order of dQ a tile waits for the tiles of its sequence before it, and counts at its blocks."""
    sequences = Packed([[0] * (len(of_keys) - 2) + [400]] * 2, [None, None], 0)
    sequences.borders = [[0, *of_queries[1:len(of_keys)]], [0, *of_keys[1:]]]
    order, band, operands, shape = sequences.bound(Mask(), backward=True)
    tiles_of, owners = {}, {}
    for (first, *_), bounds, (row_q, row_k, *_rows, first_block, _rows_q) in located_keys(
            order, band, operands, shape._replace(DETERMINISTIC=True)):
        if bounds.sq <= 0:
            continue
        sequence = first_block - row_q // STEP
        assert first == BLOCK_N * len(tiles_of.setdefault(sequence, []))
        tiles_of[sequence].append(row_k)
        for block in range(first_block, first_block + -(-bounds.sq // STEP)):
            assert owners.setdefault(block, sequence) == sequence


@given(packed(), MASKS)
def test_a_sequences_kv_tiles_are_those_that_it_has_alone(sequences, mask):
    """So the bits of its dk and dv are no neighbour's affair."""
    def tiles_of(packed):
        return Counter((first, *band, *more[2:5]) for (first, *_), band, more in located_keys(
            *packed.bound(mask, backward=True)) if more[1] < packed.borders[1][-1] and first < more[4])

    alone = Counter()
    for n in range(len(sequences.rows[0])):
        alone += tiles_of(Packed([[side[n]] for side in sequences.rows],
                                 [None if side is None else [side[n]] for side in sequences.used], 1))
    assert tiles_of(sequences) == alone


@given(packed(), MASKS, st.booleans())
def test_with_dropout_a_kv_tiles_metadata_ends_with_its_sequences_number(sequences, mask, drops):
    order, band, operands, shape = sequences.bound(mask, backward=True)
    named = set()
    for (first, *_), _, (_row_q, row_k, _see_from, _seen_from, rows, first_step, _rows_q, *number) in located_keys(
            order, band, operands, shape._replace(HAS_DROPOUT=drops)):
        assert len(number) == drops
        if drops and first < rows and row_k < sequences.borders[1][-1]:
            assert sequences.borders[1][number[0]] == row_k
            assert sequences.rows[1][number[0]] == rows
            assert first_step == sequences.borders[0][number[0]] // STEP + number[0]
            named.update(number)
    assert not drops or named == {n for n, rows in enumerate(sequences.rows[1]) if rows}


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), min_size=1, max_size=4), MASKS, st.booleans())
def test_padded_keys_have_the_tiles_of_their_shape(pairs, mask, of_q):
    b, (queries, keys) = len(pairs), zip(*pairs, strict=True)
    sequences = Sequences(None, None, None, facts(b) if of_q else None, facts(b))
    operands = (None, None, Pointer(list(queries)) if of_q else None, Pointer(list(keys)), b)
    order, band, operands, shape = arguments_of_backward(problem_of((300, 400), b, 2, mask, sequences), operands)
    found = list(located_keys(order, band, operands, shape))
    assert Counter(tuple(tile) for tile, *_ in found) == Counter(
        (first, head, batch) for first in range(0, 400, BLOCK_N) for head in range(2) for batch in range(b))
    for (first, _head, batch), own_band, (row_q, row_k, see_from, _seen_from, rows, first_step, rows_q) in found:
        assert (row_q, row_k, rows, first_step, rows_q) == (0, 0, 400, 0, 300)
        visible = mask.visible(queries[batch] if of_q else 300, keys[batch])
        seeing = visible.any(1).nonzero().flatten().tolist()
        if visible[:, first:first + BLOCK_N].any():
            assert (see_from, own_band[0]) == (seeing[0], seeing[-1] + 1)
        else:
            assert mask_ranges.q_blocks_of.fn(first, own_band, shape)[3] == 0
