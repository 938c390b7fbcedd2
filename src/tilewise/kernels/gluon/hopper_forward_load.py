"""What the Hopper forward's loading warp does: it draws tiles, and brings their queries, keys and values.

With C.STEADY a tile is judged when it is done: has a row of it overflowed? The loading warp hands out a tile when
every warpgroup has taken the one two places before it, and so has judged the one two before that. That verdict is
looked at next, and a bad tile comes again, with a softmax that cannot overflow. At the end of a program nobody takes
tiles any more: an END then has the warpgroups say when they are done, and more tiles may follow it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.compat import tma_load
from tilewise.kernels.gluon.cuts import locate_part, numbers_of, own_steps_of
from tilewise.kernels.gluon.lengths import band_of, rows_of, tile_size
from tilewise.kernels.gluon.pipeline import END, JUDGED, ONE_WARP, OPEN, draw_number, hand_out, wait_empty
from tilewise.kernels.gluon.tiles import keys_of


@gluon.constexpr_function
def bytes_of(rows, widths):
    """Bytes of some rows with all their pieces."""
    return 2 * rows * sum(widths)


@gluon.jit
def load_rows(descs, place, barrier, tiles, slot):
    """Producer: load every piece of some rows into a slot; the second begins where the first ends."""
    batch, head, row = place
    RANK: gl.constexpr = len(descs[0].block_type.shape)
    for i in gl.static_range(len(descs)):
        if RANK == 5:  # (b, hk, sq, group, d)
            at = [batch, head, row, 0, i * descs[0].block_type.shape[4]]
        else:
            at = [batch, head, row, i * descs[0].block_type.shape[3]]
        tma_load(descs[i], at, barrier, tiles[i].index(slot))


@gluon.jit
def load_pair(sources, pairs, turn, place_k, place_v, C: gl.constexpr):
    """Producer: load K and V of one turn; a place outside the tensor gives zeros and moves nothing."""
    _q_descs, k_descs, v_descs, _out_desc = sources
    k_tiles, v_tiles, full, empty = pairs
    wait_empty(empty, turn, C.STAGES)
    slot = turn % C.STAGES
    mbarrier.expect(full.index(slot), bytes_of(C.KEYS, C.D) + bytes_of(C.KEYS, C.DV))
    load_rows(k_descs, place_k, full.index(slot), k_tiles, slot)
    load_rows(v_descs, place_v, full.index(slot), v_tiles, slot)


@gluon.jit
def load_queries(sources, queries, taken, place, C: gl.constexpr):
    """Producer: load the queries of every warpgroup, from a place on."""
    q_descs, _k_descs, _v_descs, _out_desc = sources
    q_tiles, q_full, q_empty = queries
    batch, head, row = place
    CONSUMERS: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(CONSUMERS):
        slot = taken % C.Q_STAGES * C.CONSUMERS + i
        mbarrier.wait(q_empty.index(slot), ((taken // C.Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), bytes_of(64, C.D))
        load_rows(q_descs, (batch, head, row + i * (64 // C.PACK)), q_full.index(slot), q_tiles, slot)


@gluon.jit
def load_first(sources, queries, pairs, tile, row_k, taken, turn, v_place, band, shares, group, C: gl.constexpr):
    """Producer: load the keys of a tile's first step, with the last values of the tile before, and its queries.

    Returns the tile's steps, and the place of the keys.
    """
    first = tile[0]
    head = tile[1]
    batch = tile[2]
    head_k = head if C.PACK > 1 else head // group
    spans = own_steps_of(tile, band_of(tile, band, C), shares, C)
    row = row_k + keys_of(0, spans, C)
    load_pair(sources, pairs, turn, (batch, head_k, row), v_place, C)
    load_queries(sources, queries, taken, (batch, head, rows_of(tile, band[0], C)[0] + first), C)
    return spans, batch, head_k, row


@gluon.jit
def load_steps(sources, pairs, turn, spans, row_k, batch, head_k, row, C: gl.constexpr):
    """Producer: load the keys of a tile's other steps, and with each the values of the step before.

    Returns the next turn, and where the values are that are still to come.
    """
    for step in range(1, spans[3]):
        before = row
        row = row_k + keys_of(step, spans, C)
        load_pair(sources, pairs, turn, (batch, head_k, row), (batch, head_k, before), C)
        turn += 1
    return turn, row


@gluon.jit
def load(sources, queries, pairs, next_tile, judged, counter, order, band, lengths, cut, group, C: gl.constexpr):
    """Producer, one warp: fetch tile numbers, and keep the rings full."""
    tiles, heads, batches, _section = order
    total = numbers_of(tiles * heads * batches, cut, C)
    number = gl.program_id(0)
    turn = 0
    taken = 0
    batch = 0
    head_k = 0
    row = -C.KEYS  # nowhere
    if C.STEADY:
        load_judged(number, total, turn, taken, batch, head_k, row, sources, queries, pairs, next_tile, judged,
                    counter, order, band, lengths, cut, group, C)
    else:
        while number < total:
            tile, row_k, exists = locate_part(number, order, band, lengths, cut, C)
            if exists:
                hand_out(next_tile, taken, tile, tile_size(C))
                spans, batch, head_k, row = load_first(sources, queries, pairs, tile, row_k, taken, turn,
                                                       (batch, head_k, row), band, cut[1], group, C)
                turn, row = load_steps(sources, pairs, turn + 1, spans, row_k, batch, head_k, row, C)
                taken += 1
            number = draw_number(counter, total)
        hand_out(next_tile, taken, (END, 0, 0), tile_size(C))
        nowhere = -C.KEYS
        load_pair(sources, pairs, turn, (batch, head_k, nowhere), (batch, head_k, row), C)


@gluon.jit
def verdict_on(verdicts, place, C: gl.constexpr):
    """Producer: 1 if a tile must come again for some row of it, else 0."""
    CONSUMERS: gl.constexpr = C.CONSUMERS
    bad = gl.full([64], 0, gl.int8, layout=ONE_WARP)
    for i in gl.static_range(CONSUMERS):
        bad |= verdicts.index((place & (JUDGED - 1)) * C.CONSUMERS + i).load(ONE_WARP)
    return gl.max(bad.to(gl.int32), 0)


@gluon.jit
def take_back(judged, place, C: gl.constexpr):
    """Producer: return the number of a bad tile, whose verdict is then not looked at again."""
    verdicts, numbers, _done = judged
    CONSUMERS: gl.constexpr = C.CONSUMERS
    slot = place & (JUDGED - 1)
    for i in gl.static_range(CONSUMERS):
        verdicts.index(slot * C.CONSUMERS + i).store(gl.full([64], 0, gl.int8, layout=ONE_WARP))
    return gl.sum(numbers.index(slot).load(ONE_WARP), 0)


@gluon.jit
def load_judged(number, total, turn, taken, batch, head_k, row, sources, queries, pairs, next_tile, judged, counter,
                order, band, lengths, cut, group, C: gl.constexpr):
    """Producer: keep the rings full, with a tile that has been judged to be bad once more.

    ``place``: of the next tile whose verdict is looked at, while another one is loaded, or behind the last number.
    """
    verdicts, numbers, done = judged
    place = -OPEN
    last = 1 << 30
    bad = 0
    ends = 0
    going = number < total
    while going:
        if (bad != 0) | (number < total):
            again = bad
            own = number
            if again != 0:
                own = take_back(judged, place - 1, C)
            tile, row_k, exists = locate_part(own, order, band, lengths, cut, C)
            if exists:
                hand_out(next_tile, taken, tile + (again,), tile_size(C))
                numbers.index(taken & (JUDGED - 1)).store(gl.full([1], 0, gl.int32, layout=ONE_WARP) + own)
                spans, batch, head_k, row = load_first(sources, queries, pairs, tile, row_k, taken, turn,
                                                       (batch, head_k, row), band, cut[1], group, C)
                bad = verdict_on(verdicts, place, C)  # now, since room for more keys is yet to come
                place += 1
                turn, row = load_steps(sources, pairs, turn + 1, spans, row_k, batch, head_k, row, C)
                taken += 1
            if again == 0:
                number = draw_number(counter, total)
        else:
            last = gl.minimum(last, taken)
            if row >= 0:  # values are still to come
                hand_out(next_tile, taken, (END, 0, 0), tile_size(C))
                nowhere = -256  # nor are the rows of a tile behind it
                load_pair(sources, pairs, turn, (batch, head_k, nowhere), (batch, head_k, row), C)
                load_queries(sources, queries, taken, (batch, head_k, nowhere), C)
                row = -C.KEYS
                turn += 1
                taken += 1
                mbarrier.wait(done.index(0), ends & 1)
                ends += 1
            bad = verdict_on(verdicts, place, C)
            place += 1
            going = (place < last) | (bad != 0)
    hand_out(next_tile, taken, (END, 0, 0), tile_size(C))
