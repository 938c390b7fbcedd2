"""Masks that are no band in the Hopper kernels: the kernels that build a plan, and those that read one, on the CPU.

The two are tested apart. What is built is taken to pieces, and must be the dense mask again; what is read is made of a
dense mask by plain torch (plan_on_cpu.py).
"""

import random
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from emulation.backward_calls import SCALE, alibi_of, compare, expected
from emulation.hopper_calls import scalars_of
from tilewise.functions import MaskFunction, pair_indices
from tilewise.integrations.flex import traced_mask
from tilewise.kernels.hopper.backward.config import (
    D128AugmentedKVariant,
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, Span, TensorMask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import NO_SETTINGS, Operands, OperandSpec, ScoreOptions
from tilewise.tuning import schedules_hopper

built = pytest.importorskip("tilewise.kernels.triton.mask_plan", reason="Triton is not installed")
forward_on_cpu, backward_on_cpu, plan_on_cpu = (
    pytest.importorskip(f"emulation.{name}") for name in ("forward_on_cpu", "backward_on_cpu", "plan_on_cpu"))
functions = pytest.importorskip("conformance.functions")
DOCUMENTS = torch.tensor([0] * 70 + [1] * 150 + [2] * 80)
EACH = torch.stack([DOCUMENTS, DOCUMENTS.roll(37)])
MIXED = DOCUMENTS[torch.randperm(300, generator=torch.Generator().manual_seed(0))]


def coins(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


def blocks_of(*shape):
    """Blocks of 64 x 64 pairs that are hidden, whole, or visible in part, a third each."""
    kinds = torch.randint(3, (*shape[:2], *(-(-side // 64) for side in shape[2:])),
                          generator=torch.Generator().manual_seed(2))
    wide = kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :shape[2], :shape[3]]
    return (wide == 2) | (wide == 1) & coins(*shape)


def without_rows(visible, *spans):
    visible = visible.clone()
    for start, stop in spans:
        visible[..., start:stop, :] = False
    return visible


def in_documents(b, h, q_idx, kv_idx):
    return (EACH[b, q_idx] == EACH[b, kv_idx]) & ((q_idx >= kv_idx) | (kv_idx < 130))


FUNCTIONS = functions.mask_functions("cpu") | {
    "near": MaskFunction(functions.near, functions.near_twin),
    "behind": MaskFunction(functions.behind, functions.behind_twin, (torch.tensor([70, 0]),))}
BUILT = {
    "documents": (causal() & tw.documents(DOCUMENTS), (300, 300)),
    "documents_alone": (tw.documents(DOCUMENTS[:192]), (192, 192)),
    "documents_in_mixed_order": (tw.documents(MIXED), (300, 300)),
    "documents_of_each_entry": (causal() & tw.documents(EACH), (300, 300)),
    "prefix": (prefix(100), (280, 280)),
    "sink_tokens": (causal("top_left") & window(100, 0) & sink_tokens(4), (200, 330)),
    "chunk": (causal("bottom_right") & chunk(150), (200, 330)),
    "heads": (causal() & blocks_of(1, 3, 200, 200), (200, 200)),
    "entries": (TensorMask(Mask(), blocks_of(2, 1, 130, 250)), (130, 250)),
    "entries_and_heads": (causal("bottom_right") & coins(2, 2, 129, 191), (129, 191)),
    "keys_alone": (TensorMask(Mask(), coins(2, 1, 1, 200)), (130, 200)),
    "boolean_of_documents": (tw.documents(EACH) & blocks_of(1, 2, 300, 300), (300, 300)),
    "rows_that_see_nothing": (TensorMask(Mask(), without_rows(blocks_of(1, 1, 320, 192), (0, 130), (200, 201))),
                              (320, 192)),
    "function": (FUNCTIONS["near"], (300, 260)),
    "function_of_keys": (causal("bottom_right") & FUNCTIONS["chosen"], (130, 200)),
    "function_of_heads": (causal() & FUNCTIONS["dilated"], (130, 130)),
    "function_of_entries": (FUNCTIONS["behind"], (150, 200)),
    "function_of_documents": (causal() & tw.documents(EACH) & FUNCTIONS["near"], (300, 300)),
    "function_of_keys_with_a_tensor": (blocks_of(1, 3, 130, 250) & FUNCTIONS["chosen"], (130, 250)),
    "tree": (tw.tree(torch.tensor([[0] * 90 + [1] * 80 + [2] * 70 + [1] * 20] * 2).sort(1).values, [-1, 0, 0]),
             (260, 260)),
    "intervals_of_heads": (causal("bottom_right") & tw.intervals(torch.randint(0, 200, (1, 3, 210)),
                                                                 torch.randint(0, 220, (1, 3, 210))), (190, 210)),
    "blocks": (causal() & tw.documents(EACH) & tw.blocks(coins(1, 1, 5, 3), (64, 128)), (300, 300)),
    "prefixes": (tw.prefixes(torch.tensor([90, 0]), 10), (180, 200)),
    "block_mask": (traced_mask(create_block_mask(in_documents, 2, None, 300, 300, device="cpu", BLOCK_SIZE=(64, 128))),
                   (300, 300)),
    "functions_joined": (FUNCTIONS["near"] & tw.prefixes(torch.tensor([90, 0])) & FUNCTIONS["behind"], (180, 180)),
    "few": (causal() & tw.documents(DOCUMENTS[65:75]), (10, 10)),
    "whole": (TensorMask(Mask(), torch.ones(1, 1, 256, 256, dtype=torch.bool)), (256, 256)),
}


@pytest.fixture
def interpreted():
    if not hasattr(built.mask_cells_kernel, "rewrite"):
        pytest.skip("Triton was imported to compile, not to interpret")


def call_with(mask, lengths, direction):
    """Return a call with such a mask, its operands, and the dense mask of each batch entry and head that differ."""
    operands, settings, function, (sq, sk) = Operands(), NO_SETTINGS, None, lengths
    if isinstance(mask, MaskFunction):
        mask = TensorMask(Mask(), function=mask)
    if isinstance(mask, TensorMask):
        function, mask = mask.function, replace(mask, function=None)
    visible = mask.visible(sq, sk)
    visible = visible.reshape(*(1,) * (4 - visible.dim()), *visible.shape)
    b, h = visible.shape[:2] if function is None else (2, 3)
    if isinstance(mask, TensorMask):
        pair = mask.documents or (None, None)
        operands, mask = Operands(mask=mask.tensor, documents_q=pair[0], documents_k=pair[1]), mask.band
    if function is not None:
        visible = visible & function.torch(*pair_indices((b, h, sq, sk), None), *function.tensors)
        operands = operands._replace(mask_tensors=function.tensors)
        settings = settings._replace(mask_function=function.code)
    q, k = (torch.zeros(b, h, side, 16, dtype=torch.float16) for side in lengths)
    problem = AttentionProblem.from_tensors(q, k, k, operands, mask=mask, settings=settings)
    batches, heads = problem.distinct_masks
    assert torch.equal(visible.expand(b, h, sq, sk), visible[:batches, :heads].expand(b, h, sq, sk)), "some differ"
    return (problem.backward(lse_grad=False) if direction == "backward" else problem, operands,
            visible[:batches, :heads])


def pairs_of(words):
    """Return [..., 64, columns] pairs of [..., cells, 128] words, in the order in which a warpgroup holds scores."""
    row, column = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    threads = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    places = row // 8 % 2 * 16 + column // 8 * 2 + column % 2
    return ((words[..., threads] >> places) & 1).bool().movedim(-3, -2).flatten(-2)


def shown_by(planner, lists, bits, rows, columns):
    """Return the dense mask that lists and bits show, (entries, own side, other side), and the full blocks' number."""
    entries, tiles, blocks = *planner.lists_shape[:2], planner.lists_shape[2] - 2
    words = bits.view(entries, tiles, rows, blocks, columns, 128)
    shown, fulls = torch.zeros(entries, tiles, rows, 64, blocks, columns * 64, dtype=torch.bool), 0
    for entry in range(entries):
        for tile in range(tiles):
            partial, count, *numbers = lists[entry, tile].tolist()
            listed = numbers[:count]
            assert count >= 1, "the kernels visit one block at least"
            assert partial <= count
            assert len(set(listed)) == count, "a block twice"
            assert set(listed) <= set(range(blocks))
            for place, block in enumerate(listed):
                shown[entry, tile, :, :, block] = (
                    pairs_of(words[entry, tile, :, place]) if place < partial else True)
            fulls += count - partial
    return shown.flatten(4).flatten(1, 3), fulls


@pytest.mark.parametrize(("direction", "rows", "columns", "keys_first"), [
    ("forward", 1, 1, False), ("forward", 2, 2, False), ("forward", 3, 2, False), ("backward", 2, 1, True),
    ("backward", 2, 1, False)], ids=str)
@pytest.mark.parametrize("case", BUILT)
def test_lists_and_bits_are_the_mask(case, direction, rows, columns, keys_first, interpreted):
    problem, operands, visible = call_with(*BUILT[case], direction)
    queries = problem.seeing_queries if direction == "backward" else Span(0, problem.sq)
    keys = problem.seen_keys
    planner = built.MaskPlanner(problem, queries, keys, rows=rows, columns=columns, keys_first=keys_first)
    lists, bits = planner(operands, lambda sizes, strides, dtype: torch.full(sizes, -7, dtype=dtype))
    shown, fulls = shown_by(planner, lists, bits, rows, columns)
    wanted = visible[:, :, queries.start:queries.stop, keys.start:keys.stop].flatten(0, 1)
    wanted = wanted.mT if keys_first else wanted
    own, other = wanted.shape[1:]
    assert torch.equal(shown[:, :own, :other], wanted)
    # Keys that do not exist are hidden. Queries that do not exist may be shown: they are zero, and nobody stores them.
    assert not (shown[:, own:] if keys_first else shown[:, :own, other:]).any()
    whole = sum(bool(block.all()) and block.shape[0 if keys_first else 1] == 64 * (rows if keys_first else columns)
                for one in wanted for tile in one.split(64 * rows) for block in tile.split(64 * columns, 1))
    assert fulls == whole


def dense_problem(visible, lengths, heads, d, direction, dtype=torch.float16):
    """A call with a boolean mask that is given as such: (b, 1 or hq, sq, sk)."""
    (sq, sk), (hq, hk), b = lengths, heads, visible.shape[0]
    facts = OperandSpec(tuple(visible.shape), visible.stride(), torch.bool)
    strides = {f"{name}_strides": dense_strides((b, number, length, d), (4, 3, 2, 1)) for name, number, length in (
        ("q", hq, sq), ("k", hk, sk), ("v", hk, sk))}
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=d, dtype=dtype, device=torch.device("cuda", 0),
                            scale=SCALE, direction=direction, scores=ScoreOptions(mask=facts), **strides)


def attend_densely(problem, tensors, visible):
    """Out and lse in float64."""
    q, k, v = (tensor.double() for tensor in tensors)
    k, v = (tensor.repeat_interleave(problem.group, 1) for tensor in (k, v))
    scores = (SCALE * q @ k.mT).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.clamp_min(-1e9)[..., None]) @ v, lse


def attend(visible, config, heads, d=64, dtype=torch.float16, plan=None):
    """Run the forward kernel on some call with this mask, and hold its results against dense ones.

    plan: lists, bits and strides; those of plan_on_cpu unless said otherwise.
    """
    random.seed(0)
    torch.manual_seed(0)
    b, _, sq, sk = visible.shape
    problem = dense_problem(visible, (sq, sk), heads, d, "forward", dtype)
    tensors = [torch.randn(b, number, length, d).to(dtype) for number, length in (
        (heads[0], sq), (heads[1], sk), (heads[1], sk))]
    plan = plan or plan_on_cpu.plan_of(visible, config.consumers, config.block_n // 64)
    out, lse, _ = forward_on_cpu.attend(problem, config, tensors, plan=plan)
    want, want_lse = attend_densely(problem, tensors, visible)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), want, rtol=4e-3, atol=4e-3)


ONE, TWO, THREE, WIDE = (HopperForwardConfig(128, 1), HopperForwardConfig(128, 2),
                         HopperForwardConfig(128, 3, ping_pong=True),
                         HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2))
READ = {
    # Rows without a key among others, a tile of two or three warpgroups without one, and queries that are no 64.
    "shared": (without_rows(blocks_of(1, 1, 460, 330), (0, 5), (128, 384)), (2, 1)),
    "heads": (blocks_of(1, 2, 150, 300), (2, 1)),
    "entries": (blocks_of(2, 1, 130, 200), (1, 1)),
    "causal_documents": ((causal() & tw.documents(DOCUMENTS)).visible(300, 300), (2, 2)),
}


@pytest.mark.parametrize(("config", "is_frozen", "d"), [
    (ONE, False, 64), (TWO, False, 64), (TWO, True, 64), (THREE, False, 64), (THREE, True, 64), (WIDE, True, 200)],
    ids=["one", "two", "two-frozen", "three", "three-frozen", "wide"])
@pytest.mark.parametrize("case", READ)
def test_the_forward_kernel_reads_lists_and_bits(case, config, is_frozen, d, monkeypatch):
    monkeypatch.setattr(schedules_hopper, "LEAST_FROZEN", 1 if is_frozen else 10**9)
    visible, heads = READ[case]
    problem = dense_problem(visible, visible.shape[2:], heads, d, "forward")
    assert scalars_of(problem, config)[2].FROZEN_MAX is is_frozen
    attend(visible, config, heads, d)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_tile_is_recomputed_where_a_row_sees_keys_of_full_blocks_alone(dtype, monkeypatch):
    """Its maximum is frozen behind the partial blocks, of which it has seen no key."""
    monkeypatch.setattr(schedules_hopper, "LEAST_FROZEN", 1)
    visible = torch.ones(1, 1, 384, 384, dtype=torch.bool)
    visible[:, :, :256, 128:256] = coins(1, 1, 256, 128)
    visible[:, :, 135, 128:256] = False  # of the second tile
    loaded = forward_on_cpu.published_tiles(monkeypatch)
    attend(visible, TWO, (1, 1), dtype=dtype)
    assert sorted((tile[0], tile[-1]) for tile in loaded) == [(0, 0), (128, 0), (128, 1), (256, 0)]


@pytest.mark.parametrize("length", [384, 300])
def test_no_tile_is_recomputed_of_causal_documents(length, interpreted, monkeypatch):
    """Every query sees a key of the diagonal's block, which is partial; rows without a query do not count."""
    monkeypatch.setattr(schedules_hopper, "LEAST_FROZEN", 1)
    loaded = forward_on_cpu.published_tiles(monkeypatch)
    mask = causal() & tw.documents(torch.zeros(length, dtype=torch.int64))
    problem, operands, visible = call_with(mask, (length, length), "forward")
    planner = built.MaskPlanner(problem, Span(0, length), problem.seen_keys, rows=2, columns=2, keys_first=False)
    plan = planner(operands, lambda sizes, strides, dtype: torch.full(sizes, -7, dtype=dtype))
    attend(visible, TWO, (1, 1), plan=(*plan, planner.strides))
    assert sorted((tile[0], tile[-1]) for tile in loaded) == [(0, 0), (128, 0), (256, 0)]


D64 = HopperD64Config()
AUGMENTED = HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.DYNAMIC_TILES)
STAGED, FROM_REGISTERS = (HopperD128Config(variant=variant) for variant in (
    D128Variant.DQ_STAGED, D128Variant.DQ_FROM_REGISTERS))
S_AHEAD = HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
DIFFERENTIATED = {
    # Queries that see nothing, a tile of keys that none sees, and keys that are no 64; heads that share keys.
    "shared": (without_rows(blocks_of(1, 1, 330, 400), (0, 5), (200, 330)), (2, 1)),
    "heads": (blocks_of(1, 2, 200, 150), (2, 2)),
    "entries": (blocks_of(2, 1, 130, 200), (2, 1)),
    "causal_documents": ((causal() & tw.documents(DOCUMENTS)).visible(300, 300), (1, 1)),
}
DIFFERENTIATED["shared"][0][:, :, :, 128:256] = False


@pytest.mark.parametrize(("config", "d"), [(D64, 64), (D64, 40), (AUGMENTED, 128), (AUGMENTED, 80), (STAGED, 128),
                                           (FROM_REGISTERS, 128), (S_AHEAD, 64)], ids=str)
@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_the_backward_kernels_read_lists_and_bits(case, config, d):
    random.seed(0)
    torch.manual_seed(0)
    visible, (hq, hk) = DIFFERENTIATED[case]
    b, _, sq, sk = visible.shape
    problem = dense_problem(visible, (sq, sk), (hq, hk), d, "backward")
    q, dout, k, v = (torch.randn(b, heads, length, d).half() for heads, length in (
        (hq, sq), (hq, sq), (hk, sk), (hk, sk)))
    lse, delta = torch.randn(b, hq, sq) + 4.0, torch.randn(b, hq, sq)
    plan = plan_on_cpu.plan_of(visible, config.block_n // 64, 1, keys_first=True)
    got = backward_on_cpu.differentiate(problem, (q, k, v, dout, lse, delta), config, 3, 3, plan)
    compare(got, expected(problem, (q, k, v, dout, lse, delta), visible))


@pytest.mark.parametrize(("config", "d"), [(D64, 64), (AUGMENTED, 128)], ids=str)
def test_slopes_times_the_distance_are_taken_off_in_lists_of_blocks(config, d):
    """Of documents under a causal mask, where no key that is seen is ahead."""
    random.seed(0)
    torch.manual_seed(0)
    visible, slopes = DIFFERENTIATED["causal_documents"][0], torch.tensor([[0.5, -0.01]])
    problem = dense_problem(visible, (300, 300), (2, 1), d, "backward")
    spec = OperandSpec((1, 2), (2, 1), torch.float32)
    sloped = replace(problem, mask=causal(), scores=problem.scores._replace(alibi_slopes=spec))
    q, dout, k, v = (torch.randn(1, heads, 300, d).half() for heads in (2, 2, 1, 1))
    tensors = q, k, v, dout, torch.randn(1, 2, 300) + 4.0, torch.randn(1, 2, 300)
    plan = plan_on_cpu.plan_of(visible, config.block_n // 64, 1, keys_first=True)
    got = backward_on_cpu.differentiate(sloped, tensors, config, 3, 3, plan, slopes=slopes)
    compare(got, expected(problem, tensors, visible, alibi_of(sloped, slopes)))
