"""Masks that are no band in the Hopper kernels: the kernels that build a plan, and those that read one, on the CPU.

The two are tested apart. What is built is taken to pieces, and must be the dense mask again; what is read is made of a
dense mask by plain torch (plan_on_cpu.py).
"""

import random

import pytest
import torch

import tilewise as tw
from conformance.calls import operands_of, problem_of, visible_of
from emulation import backward_calls
from emulation.backward_calls import SCALE, compare
from tilewise.masks import Mask, Span, TensorMask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands, OperandSpec, ScoreOptions
from tilewise.tuning import schedules_hopper

built = pytest.importorskip("tilewise.kernels.triton.mask_plan", reason="Triton is not installed")
forward_on_cpu, backward_on_cpu, plan_on_cpu = (
    pytest.importorskip(f"emulation.{name}") for name in ("forward_on_cpu", "backward_on_cpu", "plan_on_cpu"))
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
    "few": (causal() & tw.documents(DOCUMENTS[65:75]), (10, 10)),
    "whole": (TensorMask(Mask(), torch.ones(1, 1, 256, 256, dtype=torch.bool)), (256, 256)),
}


@pytest.fixture
def interpreted():
    if not hasattr(built.mask_cells_kernel, "rewrite"):
        pytest.skip("Triton was imported to compile, not to interpret")


def call_with(mask, lengths, direction):
    """Return a call with such a mask, its operands, and the dense mask of each batch entry and head that differ."""
    operands, (sq, sk) = Operands(), lengths
    visible = mask.visible(sq, sk)
    visible = visible.reshape(*(1,) * (4 - visible.dim()), *visible.shape)
    b, h = visible.shape[:2]
    if isinstance(mask, TensorMask):
        pair = mask.documents or (None, None)
        operands, mask = Operands(mask=mask.tensor, documents_q=pair[0], documents_k=pair[1]), mask.band
    q, k = (torch.zeros(b, h, side, 16, dtype=torch.float16) for side in lengths)
    problem = AttentionProblem.from_tensors(q, k, k, operands, mask=mask)
    return problem.backward(lse_grad=False) if direction == "backward" else problem, operands, visible


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
            assert 1 <= count, "the kernels visit one block at least"
            assert partial <= count
            assert len(set(listed)) == count, "a block twice"
            assert set(listed) <= set(range(blocks))
            for place, block in enumerate(listed):
                shown[entry, tile, :, :, block] = (
                    pairs_of(words[entry, tile, :, place]) if place < partial else True)
            fulls += count - partial
    return shown.flatten(4).flatten(1, 3), fulls


@pytest.mark.parametrize(("direction", "rows", "columns"), [
    ("forward", 1, 1), ("forward", 2, 2), ("forward", 3, 2), ("backward", 2, 1)], ids=str)
@pytest.mark.parametrize("case", BUILT)
def test_lists_and_bits_are_the_mask(case, direction, rows, columns, interpreted):
    problem, operands, visible = call_with(*BUILT[case], direction)
    keys_first = direction == "backward"
    queries = problem.seeing_queries if keys_first else Span(0, problem.sq)
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
