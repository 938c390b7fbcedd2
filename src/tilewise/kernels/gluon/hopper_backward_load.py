"""What the Hopper backward's loading warp does: it brings keys and values, and the queries that see them.

A program has one tile of keys. With C.PERSISTENT it has tile after tile, as they are drawn or as a head has them, and
the stream of queries does not stop between them: those of a tile's first step come while the tile before is in its last
one, and so do its values and its keys, each as soon as the last product that needs those before is done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.kernels.gluon.compat import tma_load
from tilewise.kernels.gluon.lengths import clear_rows, key_tile_of, owned_of
from tilewise.kernels.gluon.pipeline import NO_TILE, ONE_WARP, fetch_next_tile, producer_acquire, publish_tile
from tilewise.kernels.gluon.softmax import LOG2E
from tilewise.kernels.gluon.tiles import QUERIES, key_tile_at, q_block_start, q_blocks_of, queries_to_and_fro


@gluon.jit
def fetch_rows(lse_ptr, delta_ptr, line, offsets, seeing):
    """Producer: read lse and delta of a step's queries; of those that see nothing -inf and 0."""
    lse = gl.load(lse_ptr + line + offsets, mask=seeing, other=float("-inf"))
    delta = gl.load(delta_ptr + line + offsets, mask=seeing, other=0.0)
    return lse, delta


@gluon.jit
def in_base_2(lse):
    """Turn lse to base 2, and to +inf where there is no query or it sees nothing: the probabilities are 0 there."""
    return gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@gluon.jit
def put_rows(rows, slot, lse, delta):
    """Producer: put lse and delta into a slot."""
    rows.index(2 * slot).store(in_base_2(lse))
    rows.index(2 * slot + 1).store(delta)


@gluon.jit
def load_rows(sources, queries, rows, turn, place, line, owned, clears, C: gl.constexpr):
    """Producer: load Q of one turn, and lse and delta of the same queries, or with C.AUGMENTED_K their tails.

    owned: the first query that sees a key and the end of them. clears: whether the tile is to be cleared before it is
    full; it arrives at the ring's spare barrier then.
    """
    q_desc, _k_desc, _v_desc, _dout_desc, lse_or_tails, delta_ptr, share = sources
    q_tiles, full, empty = queries
    batch, head, first, row = place
    see_from, sq = owned
    if not C.AUGMENTED_K:
        offsets = first + gl.arange(0, QUERIES, layout=ONE_WARP)
        seeing = offsets < sq
        if C.VARLEN:
            seeing = seeing & (offsets >= see_from)
        lse, delta = fetch_rows(lse_or_tails, delta_ptr, line, offsets, seeing)
        if C.HAS_DROPOUT:
            delta *= share
    producer_acquire(empty, turn, C.KV_STAGES)
    slot = turn % C.KV_STAGES
    arrival = slot
    if C.VARLEN:
        arrival = gl.where(clears, C.KV_STAGES, slot)
    place = [batch, head, row + first, 0]
    if C.AUGMENTED_K:
        _picks, tails = rows
        mbarrier.expect(full.index(arrival), q_desc.block_type.nbytes + lse_or_tails.block_type.nbytes)
        tma_load(q_desc, place, full.index(arrival), q_tiles.index(slot))
        tma_load(lse_or_tails, place, full.index(arrival), tails.index(slot))
    else:
        mbarrier.expect(full.index(arrival), q_desc.block_type.nbytes)
        tma_load(q_desc, place, full.index(arrival), q_tiles.index(slot))
        put_rows(rows, slot, lse, delta)
        mbarrier.arrive(full.index(arrival), count=1)


@gluon.jit
def load_dout(sources, douts, turn, place, clears, C: gl.constexpr):
    """Producer: load dO of one turn."""
    _q_desc, _k_desc, _v_desc, dout_desc, _lse_or_tails, _delta_ptr, _share = sources
    dout_tiles, full, empty = douts
    batch, head, first, row = place
    producer_acquire(empty, turn, C.OUT_STAGES)
    slot = turn % C.OUT_STAGES
    arrival = slot
    if C.VARLEN:
        arrival = gl.where(clears, C.OUT_STAGES, slot)
    mbarrier.expect(full.index(arrival), dout_desc.block_type.nbytes)
    tma_load(dout_desc, [batch, head, row + first, 0], full.index(arrival), dout_tiles.index(slot))


@gluon.jit
def clear_step(queries, douts, turn, cleared, begin, stop, C: gl.constexpr):
    """Producer: zero what of Q and dO of a turn sees no key, then say that both are full. cleared: how often before."""
    q_tiles, q_full, _q_empty = queries
    dout_tiles, dout_full, _dout_empty = douts
    mbarrier.wait(q_full.index(C.KV_STAGES), cleared & 1)
    mbarrier.wait(dout_full.index(C.OUT_STAGES), cleared & 1)
    clear_rows(q_tiles, turn % C.KV_STAGES, begin, stop, C.WIDTH)
    clear_rows(dout_tiles, turn % C.OUT_STAGES, begin, stop, C.WIDTH)
    fence_async_shared()
    mbarrier.arrive(q_full.index(turn % C.KV_STAGES), count=2)
    mbarrier.arrive(dout_full.index(turn % C.OUT_STAGES), count=1)


@gluon.jit
def load_keys(sources, keys, place, owned, C: gl.constexpr):
    """Producer: load K and V of each consumer; owned: the first key that is seen and the end of them."""
    _q_desc, k_desc, v_desc, _dout_desc, _lse_or_tails, _delta_ptr, _share = sources
    k_tiles, v_tiles, full = keys
    batch, head_k, first, row = place
    seen_from, sk = owned
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        key = first + i * 64
        arrival = i
        if C.VARLEN:
            clears = (seen_from > key) | (sk < key + 64)
            arrival = gl.where(clears, NC + i, i)
        mbarrier.expect(full.index(arrival), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [batch, head_k, row + key, 0], full.index(arrival), k_tiles.index(i))
        tma_load(v_desc, [batch, head_k, row + key, 0], full.index(arrival), v_tiles.index(i))
        if C.VARLEN:
            if clears:
                mbarrier.wait(full.index(NC + i), 0)
                begin = gl.minimum(seen_from - key, 64)
                stop = gl.maximum(sk - key, 0)
                clear_rows(k_tiles, i, begin, stop, C.WIDTH)
                clear_rows(v_tiles, i, begin, stop, C.WIDTH)
                fence_async_shared()
                mbarrier.arrive(full.index(i), count=1)


@gluon.jit
def load_next_keys(sources, keys, place, taken, C: gl.constexpr):
    """Producer: load V and K of each consumer when those of the tile before have been left, V first; taken: tiles."""
    _q_desc, k_desc, v_desc, _dout_desc, _lse_or_tails, _delta_ptr, _share = sources
    k_tiles, v_tiles, full, k_empty, v_empty = keys
    batch, head_k, first, row = place
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        mbarrier.wait(v_empty.index(i), (taken & 1) ^ 1)
        mbarrier.expect(full.index(i), v_desc.block_type.nbytes)
        tma_load(v_desc, [batch, head_k, row + first + i * 64, 0], full.index(i), v_tiles.index(i))
    mbarrier.wait(k_empty.index(0), (taken & 1) ^ 1)
    for i in gl.static_range(NC):
        mbarrier.expect(full.index(i), k_desc.block_type.nbytes)
        tma_load(k_desc, [batch, head_k, row + first + i * 64, 0], full.index(i), k_tiles.index(i))


@gluon.jit
def load_tile(loaded, tile, turn, taken, C: gl.constexpr):
    """Producer: a tile's keys and values, and the queries of every head of the group. Returns the turn behind them.

    taken: tiles before; with C.PERSISTENT the keys come behind the first step's queries, for which there is room
    earlier, and every tile has a step.
    """
    sources, keys, queries, douts, rows, _tile_source, spot, band, heads, group = loaded
    total, _sk, _lower, _upper = band  # queries of all sequences
    tile, band = key_tile_of(spot, tile, band, 1, C)
    first, head_k, batch = tile
    spans = q_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    first_rows, owned, seen = owned_of(spot, band, C)
    row_q, row_k = first_rows
    see_from, sq = owned
    begun = turn
    if not C.PERSISTENT:
        load_keys(sources, keys, (batch, head_k, first, row_k), seen, C)
    cleared = 0
    clears = False
    for member in range(group):
        head = head_k * group + member
        line = (batch * heads * group + head).to(gl.int64) * total + row_q
        for step in range(steps):
            if C.HEAD_PERSISTENT:
                query = queries_to_and_fro(step, first, spans, C)
            else:
                query = q_block_start(step, spans, C)
            place = (batch, head, query, row_q)
            if C.VARLEN:
                clears = (query < see_from) | (query + QUERIES > sq)
            load_rows(sources, queries, rows, turn, place, line, owned, clears, C)
            load_dout(sources, douts, turn, place, clears, C)
            if C.PERSISTENT:
                if turn == begun:
                    load_next_keys(sources, keys, (batch, head_k, first, row_k), taken, C)
            if C.VARLEN:
                if clears:
                    clear_step(queries, douts, turn, cleared, see_from - query, sq - query, C)
                    cleared += 1
            turn += 1
    if C.S_AHEAD:
        if turn > 0:  # the last step, too, computes a next S
            load_rows(sources, queries, rows, turn, (batch, head_k * group, sq, row_q), 0, owned, False, C)
    return turn


@gluon.jit
def load(loaded, C: gl.constexpr):
    """Producer, one warp: keep the rings full. With C.PERSISTENT it fetches tiles, else it has one.

    With C.HEAD_PERSISTENT nothing is drawn: heads are as long as each other.
    """
    _sources, _keys, _queries, _douts, _rows, tile_source, _spot, _band, _heads, _group = loaded
    turn = 0
    taken = 0
    if C.PERSISTENT:
        next_tile, counter, order = tile_source
        tiles, heads, batches, _section = order
        total = tiles * heads * batches
        number = gl.program_id(0)
        if C.HEAD_PERSISTENT:  # its head's last tile
            number = (number + 1) * tiles - 1
        while number < total:
            tile = key_tile_at(number, order, C)
            publish_tile(next_tile, taken, tile, 3)
            turn = load_tile(loaded, tile, turn, taken, C)
            taken += 1
            if C.HEAD_PERSISTENT:  # the one before it, or the last one of the next head
                if number % tiles == 0:
                    number += (gl.num_programs(0) + 1) * tiles
                number -= 1
            else:
                number = fetch_next_tile(counter, total)
        publish_tile(next_tile, taken, (NO_TILE, 0, 0), 3)
    else:
        load_tile(loaded, tile_source, turn, taken, C)
