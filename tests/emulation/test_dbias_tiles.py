"""The tiles in which the gradient of a shared bias is summed: jit functions called as plain Python."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tilewise.kernels.hopper.arguments import MaskBounds
from tilewise.kernels.hopper.backward.config import HopperDbiasConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.testing.strategies import windows
from tilewise.tuning.heuristics_hopper import LEAST_TILES, hopper_dbias_config

dbias_tiles = pytest.importorskip("tilewise.kernels.hopper.backward.dbias_tiles", reason="Triton is not installed")
hopper_dbias = pytest.importorskip("tilewise.kernels.hopper.backward.dbias")
launch_dbias = pytest.importorskip("tilewise.kernels.hopper.backward.launch_dbias")
ROWS, BLOCKS = int(dbias_tiles.TILE_QUERIES), int(dbias_tiles.BLOCKS_PER_TILE)
KEYS = 64 * BLOCKS
NAMES = ("strides", "bounds", "sharing", "grid", "heads", "scale_log2", "C")


@pytest.fixture(scope="module", autouse=True)
def plain_python():
    """The functions of gl that dbias_tiles.py calls, on numbers, and its own ones called as such."""
    language = SimpleNamespace(minimum=min, maximum=max, where=lambda test, a, b: a if test else b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dbias_tiles, "gl", language)
        patch.setattr(dbias_tiles, "TILE_QUERIES", ROWS)
        patch.setattr(dbias_tiles, "BLOCKS_PER_TILE", BLOCKS)
        for called in ("visible_keys_of", "visible_tiles_of"):
            patch.setattr(dbias_tiles, called, getattr(dbias_tiles, called).fn)
        yield


def problem_of(sq=512, sk=512, mask=None, *, b=4, heads=(4, 2), shape=None, strides=None,
               dtype=torch.bfloat16, d=128, dv=128):
    shape = shape or (1, heads[0], sq, sk)
    strides = strides or (shape[1] * sq * sk, sq * sk, sk, 1)
    return AttentionProblem(b=b, hq=heads[0], hk=heads[1], sq=sq, sk=sk, d=d, dv=dv, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=0.5, mask=Mask() if mask is None else mask,
                            direction="backward", scores=ScoreOptions(bias=OperandSpec(shape, strides, dtype)))


def launch_of(*args, **fields):
    return launch_dbias.HopperDbias(problem_of(*args, **fields), HopperDbiasConfig(), 132)


def scalars_of(launch):
    return SimpleNamespace(**dict(zip(NAMES, launch.scalars, strict=True)))




def walk(scalars, programs):
    """Return the tiles (bias head, block of queries, block of keys) that each program sums."""
    grid, bounds = scalars.grid, scalars.bounds
    for number in range(programs):
        found, tile = [], dbias_tiles.find_tile.fn(0, 0, number, grid, bounds, scalars.C)
        while tile.bias_head < scalars.grid.bias_heads:
            found.append((tile.bias_head, tile.m_block, tile.n_block))
            tile = dbias_tiles.find_tile.fn(tile.bias_head, tile.m_block, tile.rank + programs, grid, bounds, scalars.C)
        yield found


SIZES, MASKS = st.integers(2, 900), windows(1800)


@given(SIZES, SIZES, MASKS, st.integers(1, 3), st.integers(1, 9))
@example(900, 900, Mask(), 2, 7)
@example(512, 512, causal("top_left"), 2, 5)
@example(300, 700, causal("bottom_right"), 1, 3)
@example(700, 300, causal("bottom_right"), 2, 3)  # queries that see nothing
@example(800, 800, window(127, 0, "top_left"), 2, 9)
@example(200, 900, window(0, 0, "bottom_right"), 1, 4)
@example(257, 2, window(0, None, "top_left"), 1, 1)  # the last queries see none of the few keys
@example(100, 900, window(0, 0, "top_left"), 1, 2)  # keys that nobody sees
def test_every_visible_tile_is_summed_once_and_ctas_have_as_many_of_them_as_one_another(
        sq, sk, mask, lines, programs):
    scalars = scalars_of(launch_of(sq, sk, mask, heads=(lines, 1)))
    bounds = scalars.bounds
    visible = mask.visible(sq, sk)
    numbers = product(range(lines), range(scalars.grid.m_blocks), range(scalars.grid.n_blocks))
    seen = {(line, row, tile) for line, row, tile in numbers
            if visible[row * ROWS:(row + 1) * ROWS, tile * KEYS:(tile + 1) * KEYS].any()}
    found = list(walk(scalars, programs))
    summed = Counter(tile for tiles in found for tile in tiles)
    counts = [len(tiles) for tiles in found]
    assert max(counts) - min(counts) <= 1
    assert set(summed.values()) <= {1}
    assert seen <= set(summed), "a tile that is seen and left out"
    # Under both bounds the first key of the first query and the last of the last may be of tiles that nobody sees.
    for row in range(scalars.grid.m_blocks):
        first, count = dbias_tiles.visible_tiles_of(row, bounds, scalars.C)
        assert {tile for _line, own, tile in summed if own == row} == set(range(first, first + count))
        assert not count or first + count <= scalars.grid.n_blocks, "zeros are written by tiles up to the last"


@given(SIZES, SIZES, MASKS)
@example(512, 512, causal("top_left"))
@example(300, 700, causal("bottom_right"))
@example(700, 300, causal("bottom_right"))
@example(800, 800, window(127, 0, "top_left"))
@example(1000, 1000, Mask())
def test_blocks_left_out_are_hidden_and_tiles_without_a_mask_are_wholly_visible(sq, sk, mask):
    scalars = scalars_of(launch_of(sq, sk, mask, heads=(1, 1)))
    bounds, visible = scalars.bounds, mask.visible(sq, sk)
    for row in range(scalars.grid.m_blocks):
        first, count = dbias_tiles.visible_tiles_of(row, bounds, scalars.C)
        for tile in range(first, first + count):
            begin, end, whole = dbias_tiles.visible_blocks_of.fn(row, tile, bounds, scalars.C)
            part = visible[row * ROWS:(row + 1) * ROWS, tile * KEYS:(tile + 1) * KEYS]
            assert whole == part.all()
            assert 0 <= begin < end <= BLOCKS, "the queries' slots are given back by a block"
            hidden = [block for block in range(BLOCKS) if not begin <= block < end]
            assert not any(part[:, 64 * block:64 * block + 64].any() for block in hidden)
            assert (begin, end) == (0, BLOCKS) or not whole


@pytest.mark.parametrize(("shape", "entries"), [
    ((1, 6), {line: [(b, line) for b in range(4)] for line in range(6)}),
    ((1, 1), {0: [(b, head) for b in range(4) for head in range(6)]}),
    ((4, 1), {line: [(line, head) for head in range(6)] for line in range(4)}),
    ((4, 6), {line: [divmod(line, 6)] for line in range(24)}),
], ids=str)
def test_a_lines_entries_are_the_batch_entries_and_heads_that_share_it(shape, entries):
    scalars = scalars_of(launch_of(heads=(6, 3), shape=(*shape, 512, 512)))
    sharing = scalars.sharing
    found = {line: [hopper_dbias.member_of.fn(line, member, sharing) for member in range(sharing.members)]
             for line in range(scalars.grid.bias_heads)}
    assert found == entries
    assert sharing.group == 2


def test_the_kernel_gets_the_bias_by_its_strides_and_mask_bounds_from_the_first_key():
    launch = launch_of(100, 1000, window(255, 0, "bottom_right"), shape=(1, 4, 100, 1000), strides=(7, 5, 3, 2))
    scalars = scalars_of(launch)
    assert scalars.strides == (7, 5, 3, 2)
    assert scalars.bounds == (100, 1000, 645, 900)
    assert (scalars.C.HAS_LOWER, scalars.C.HAS_UPPER) == (True, True)
    assert (scalars.grid.m_blocks, scalars.grid.n_blocks, scalars.heads, launch.grid) == (1, 8, 4, (32,))
    assert scalars.scale_log2 == pytest.approx(0.5 * 1.442695)
    full = scalars_of(launch_of())
    assert (full.C.HAS_LOWER, full.C.HAS_UPPER, full.C.WIDTH) == (False, False, 128)
    assert launch_of(4096, 4096).grid == (132,)
    assert [scalars_of(launch_of(d=d, dv=dv)).C.WIDTH for d, dv in ((16, 40), (64, 65), (96, 8))] == [64, 128, 128]


@pytest.mark.parametrize(("sk", "strides", "dtype", "reads", "writes"), [
    (512, None, torch.bfloat16, 8, 8), (512, None, torch.float32, 4, 4), (500, None, torch.float32, 4, 4),
    (500, None, torch.bfloat16, 1, 1), (512, (512 * 512, 0, 512, 1), torch.bfloat16, 8, 8),
    (512, (0, 512 * 512, 1, 512), torch.bfloat16, 1, 8), (512, (0, 0, 513, 1), torch.bfloat16, 1, 8),
    (512, (3, 512 * 512, 512, 1), torch.bfloat16, 8, 8),
])
def test_sixteen_bytes_move_at_once_where_rows_of_the_bias_and_of_its_gradient_begin_and_end_at_such(
        sk, strides, dtype, reads, writes):
    shape = scalars_of(launch_of(sk=sk, strides=strides, dtype=dtype)).C
    assert (reads, writes) == (shape.BIAS_VECTOR, shape.DBIAS_VECTOR)


def test_a_row_of_64_keys_is_as_many_threads_as_move_16_bytes():
    for bits, warps in product((16, 32), (1, 4)):
        layout = hopper_dbias.coalesced_layout.fn(bits, warps)
        each, (rows, lanes) = layout.size_per_thread, layout.threads_per_warp
        assert each == [1, 128 // bits]
        assert lanes * each[1] == 64
        assert rows * lanes == 32
        assert layout.warps_per_cta == [warps, 1]


@pytest.mark.parametrize("vector", [1, 4, 8])
def test_scores_past_the_last_query_or_key_are_left_out(vector):
    rows, keys = torch.arange(64) + 64, torch.arange(64) + 128
    found = hopper_dbias.inside.fn(rows, keys, MaskBounds(100, 152, 0, 0), vector)
    assert torch.equal(found, (rows < 100)[:, None] & (keys < 152)[None, :])


@pytest.mark.parametrize(("heads", "sq", "sk", "tiles"), [
    (LEAST_TILES, ROWS, KEYS, LEAST_TILES), (LEAST_TILES // 2, ROWS, KEYS, LEAST_TILES // 2),
    (LEAST_TILES // 2, ROWS + 1, KEYS, LEAST_TILES), (LEAST_TILES // 2, ROWS, KEYS + 1, LEAST_TILES),
])
def test_the_choice_of_the_kernel_counts_its_tiles(heads, sq, sk, tiles):
    config = hopper_dbias_config(problem_of(sq, sk, heads=(heads, heads)), entries=2)
    assert (config is not None) == (tiles >= LEAST_TILES)


@pytest.mark.parametrize("config", [HopperDbiasConfig(), HopperDbiasConfig(1, 3)], ids=str)
def test_shared_memory_is_planned_for_tiles_of_the_kernels_size(config):
    streamed = 2 * config.q_stages * ROWS + 2 * config.stages * 64  # rows of q and dout, of k and v
    planned = 2 * 128 * streamed + 4 * ROWS * KEYS
    assert config.shared_bytes(problem_of(dtype=torch.float32)) == planned + 1024
