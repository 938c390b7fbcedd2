"""Layouts, plans and sums of context parallel attention, without processes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.distributed import balanced
from tilewise.distributed.blocks import summed_of
from tilewise.distributed.cost_model import Links, Sizes, estimates, estimates_of_rows, groups_of, keeps_gathered
from tilewise.distributed.exchange import TensorForm, empty_message, pack, unpack
from tilewise.distributed.layouts import Layout, joined, layout_in_row, layout_of_rows, named_layout
from tilewise.distributed.plan import Problem, all_gather_plan, ring_plan
from tilewise.errors import InvalidInput
from tilewise.masks import Mask, Span
from tilewise.problem.options import DRAW_SPAN

LAYOUT = st.sampled_from(["contiguous", "zigzag"])


@given(LAYOUT, st.integers(0, 40), st.integers(1, 7))
def test_a_layout_holds_each_position_once(name, length, ranks):
    layout = named_layout(name, length, ranks)
    held = [position for pieces in layout.pieces for piece in pieces for position in range(piece.start, piece.stop)]
    assert sorted(held) == list(range(length))
    sizes = [layout.shard_length(rank) for rank in range(ranks)]
    assert max(sizes) - min(sizes) <= 2
    assert named_layout(layout, length, ranks) is layout


@given(LAYOUT, st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_rows_of_ranks_hold_what_their_ranks_do(name, length, rows, size):
    layout = named_layout(name, length, rows * size)
    of_rows = layout_of_rows(layout, size)
    assert layout_of_rows(layout, 1) == layout
    for row in range(rows):
        held = [position for piece in of_rows.pieces[row] for position in range(piece.start, piece.stop)]
        assert held == sorted(held)
        inside = layout_in_row(layout, row, size)
        assert inside.length == len(held)
        for rank in range(size):
            counted = [held[at] for piece in inside.pieces[rank] for at in range(piece.start, piece.stop)]
            own = layout.pieces[row * size + rank]
            assert counted == [position for piece in own for position in range(piece.start, piece.stop)]


def test_zigzag_ranks_are_zigzag_rows():
    assert layout_of_rows(named_layout("zigzag", 64, 8), 2).pieces == named_layout("zigzag", 64, 4).pieces


def test_a_layout_says_where_positions_are_in_a_shard():
    layout = Layout("mine", ((Span(0, 3), Span(7, 9)), (Span(3, 7),)))
    assert layout.local_spans(0, Span(2, 8)) == ((Span(2, 3), Span(2, 3)), (Span(7, 8), Span(3, 4)))
    assert layout.local_spans(1, Span(7, 9)) == ()
    assert joined((Span(0, 2), Span(2, 5), Span(6, 6), Span(7, 9))) == (Span(0, 5), Span(7, 9))


def plans(problem):
    return [[ring_plan(problem, rank) for rank in range(problem.ranks)],
            [all_gather_plan(problem, rank, lambda rows: 2).steps for rank in range(problem.ranks)]]


@given(LAYOUT, st.integers(1, 5), st.integers(0, 30), st.integers(0, 30), st.integers(0, 9), st.booleans(), st.data())
def test_a_plan_computes_each_visible_pair_once_and_sends_what_is_received(name, ranks, sq, sk, left, is_causal, data):
    mask = Mask(left if left < 8 else None, 0 if is_causal else None, data.draw(st.integers(-9, 9)),
                sink_tokens=data.draw(st.none() | st.integers(1, 4)))
    problem = Problem(named_layout(name, sq, ranks), named_layout(name, sk, ranks), mask, data.draw(st.booleans()), 2)
    visible = mask.visible(sq, sk)
    for of_ranks in plans(problem):
        assert len({len(steps) for steps in of_ranks}) == 1
        counted = torch.zeros(2, sq, sk, dtype=torch.int)
        for rank, steps in enumerate(of_ranks):
            rows = torch.tensor([position for piece in problem.queries.pieces[rank]
                                 for position in range(piece.start, piece.stop)], dtype=torch.int64)
            for number, step in enumerate(steps):
                buffer = torch.full((step.length,), -1)
                for part in step.parts:
                    held = torch.cat([torch.arange(0), *(torch.arange(piece.start, piece.stop)
                                                         for piece in problem.keys.pieces[part.rank])])
                    buffer[part.at.start:part.at.stop] = held[part.rows.start:part.rows.stop]
                    if part.rank != rank:
                        theirs = of_ranks[part.rank][number].sent[rank]
                        assert part.rows in [sent.rows for sent in theirs]
                for block in step.blocks:
                    seen = block.mask.visible(len(block.queries), len(block.keys)).int()
                    for head in range(step.heads.start, step.heads.stop):
                        own = rows[block.queries.start:block.queries.stop]
                        keys = buffer[block.keys.start:block.keys.stop]
                        counted[head].index_put_((own[:, None], keys), seen, accumulate=True)
        assert torch.equal(counted, visible.int().expand(2, -1, -1))


def test_a_causal_zigzag_ring_has_one_call_a_step():
    problem = Problem(named_layout("zigzag", 64, 4), named_layout("zigzag", 64, 4), tw.causal("top_left"), True, 2)
    assert [[len(step.blocks) for step in ring_plan(problem, rank)] for rank in range(4)] == [[1, 1, 1, 1]] * 4


def test_parts_of_sums_are_told_from_results_of_one_call():
    layout = named_layout("zigzag", 64, 4)

    def summed(make, mask, layout=layout, *more):
        problem = Problem(layout, layout, mask, True, 2)
        return {summed_of(make(problem, rank, *more), rank) for rank in range(4)}

    assert summed(ring_plan, Mask()) == {(True, True)}
    assert summed(lambda *own: all_gather_plan(*own).steps, tw.causal(), layout, lambda rows: 2) == {(False, True)}
    # Of keys that no other rank sees, each rank has one call.
    assert summed(ring_plan, tw.chunk(16), named_layout("contiguous", 64, 4)) == {(False, False)}


def test_packed_sequences_of_one_rank_are_one_call():
    layout = named_layout("contiguous", 40, 2)
    sequences = tuple([(start, start + 8, start, start + 8) for start in range(0, 40, 8)])
    problem = Problem(layout, layout, tw.causal("top_left"), True, 1, sequences=sequences)
    first, second = ring_plan(problem, 0)
    # Two whole sequences, and the first half of the third one, whose keys the other rank's queries see.
    assert [block.borders for block in first.blocks] == [((0, 8, 16, 20), (0, 8, 16, 20))]
    assert second.blocks == ()
    assert [part.rows for part in second.sends] == [Span(16, 20)]


def test_a_message_holds_its_tensors():
    tensors = [torch.randn(2, 3), torch.arange(5, dtype=torch.int64), torch.randn(0, 4), torch.randn(7).bfloat16()]
    forms = [TensorForm(tuple(own.shape), own.dtype) for own in tensors]
    message = pack(tensors)
    assert message[0].nbytes == empty_message(forms, torch.device("cpu"))[0].nbytes == 3 * 128
    for got, expected in zip(unpack(message, forms), tensors, strict=True):
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)


def test_two_tensors_are_sent_as_they_are_where_dense_and_of_the_dtype():
    dense, other = torch.randn(2, 3), torch.randn(3, 2).t()
    forms = [TensorForm((2, 3), torch.float32)] * 2
    assert [sent is own for sent, own in zip(pack([dense, dense]), [dense, dense], strict=True)] == [True, True]
    assert [form.shape for form in unpack(empty_message(forms, torch.device("cpu")), forms)] == [(2, 3)] * 2
    for tensors, dtype in (([dense, other], None), ([dense, dense], torch.float64)):
        for sent, own in zip(pack(tensors, dtype), tensors, strict=True):
            assert sent.is_contiguous()
            assert sent.dtype is (dtype or own.dtype)
            assert torch.equal(sent, own.to(sent.dtype))


def test_the_model_finds_zigzag_even_and_a_window_local():
    sizes, links = Sizes(1, 32, 8, 128, 128, 2), Links()

    def of(layout, mask, length=8192, ranks=8):
        own = named_layout(layout, length, ranks)
        return estimates(Problem(own, own, mask, True, 8), sizes, links)

    even, uneven = of("zigzag", tw.causal("top_left"))["ring"], of("contiguous", tw.causal("top_left"))["ring"]
    assert even.pairs < 0.6 * uneven.pairs
    assert abs(even.pairs - 8192 * 8193 // 16) < 0.01 * even.pairs
    window = of("contiguous", Mask(255, 0, "top_left"))["ring"]
    assert window.bytes_received == 255 * 8 * 256 * 2


@pytest.mark.parametrize(("layout", "mask", "merged", "alone", "waits"), [
    ("contiguous", tw.window(None, None), 3 * 256, 0, 3),
    # Rows whose window crosses a border, and one neighbour's keys.
    ("contiguous", Mask(31, 0, "top_left"), 31, 256 - 31, 1),
    ("zigzag", tw.causal("top_left"), 3 * 128 + 3 * 128, 0, 3)], ids=["full", "window", "causal"])
def test_a_ring_merges_what_other_ranks_keys_add_and_waits_for_those_that_send(layout, mask, merged, alone, waits):
    """A window was charged with a merge of all rows and a latency for each of the ranks.

    Rows that have one part are rounded from float32: read, and written in half of the bytes each of two.
    """
    own, sizes = named_layout(layout, 1024, 4), Sizes(1, 8, 2, 64, 64, 2)
    slow = Links(flops=1e30, bandwidth=1e30, memory=1e6, latency=0.0, call=0.0)
    problem = Problem(own, own, mask, True, 2)
    found, waited = (estimates(problem, sizes, links)["ring"] for links in (slow, Links(1e30, 1e30, 1e30, 1.0, 0.0)))
    assert found.seconds == pytest.approx((merged * 3 + alone * 2) * 8 * 64 * 4 / 1e6)
    assert (waited.seconds, waited.backward_seconds) == pytest.approx((waits, waits))


@pytest.mark.parametrize(("received", "pieces", "count"), [(190, 1, 1), (210, 1, 2), (590, 1, 2), (610, 1, 3),
                                                           (370, 2, 1), (390, 2, 2), (10**9, 2, 4)])
def test_an_all_gather_has_as_many_groups_of_heads_as_pay(received, pieces, count):
    """A byte takes a second, and a group 10 and 90 for each piece: of one piece, n groups pay from 100·n·(n - 1) on."""
    assert groups_of(received, 12, pieces, Links(bandwidth=1.0, latency=10.0, call=90.0)) == count


def test_groups_of_heads_divide_them():
    links = Links(bandwidth=1.0, latency=1e-9, call=0.0)
    assert [groups_of(1000, heads, 1, links) for heads in (1, 2, 3, 5, 6, 8, 10)] == [1, 2, 3, 1, 3, 4, 2]


def test_with_dropout_the_model_has_one_group_of_heads_as_the_plan_has():
    own, sizes = named_layout("zigzag", 2 ** 18, 2), Sizes(1, 32, 8, 128, 128, 2)
    problem = Problem(own, own, tw.causal("top_left"), True, 8)
    dropped = replace(problem, step=DRAW_SPAN)
    assert [estimates(one, sizes, Links())["all_gather"].groups for one in (problem, dropped)] == [2, 1]


def test_gathered_keys_are_kept_where_they_are_no_more_than_every_ranks_own():
    even, uneven = named_layout("contiguous", 32, 4), Layout("own", ((Span(0, 10),), (Span(10, 16),)))
    assert [keeps_gathered(1, rows, even) for rows in (0, 8, 9)] == [True, True, False]
    assert [keeps_gathered(1, rows, uneven) for rows in (6, 7)] == [True, False]
    assert not keeps_gathered(2, 8, even)


def test_the_most_that_a_rank_receives_is_alike_on_all_ranks():
    layout = named_layout("contiguous", 40, 4)
    for mask, most in ((tw.causal("top_left"), 30), (Mask(6, 0, "top_left"), 6), (tw.chunk(10), 0)):
        plans = [all_gather_plan(Problem(layout, layout, mask, True, 4), rank, lambda rows: 1) for rank in range(4)]
        assert {plan.most_received for plan in plans} == {most}
        received = [sum(len(part.rows) for parts in plan.steps[0].received(rank).values() for part in parts)
                    for rank, plan in enumerate(plans)]
        assert max(received) == most


def test_backward_a_kept_all_gather_waits_for_gradients_alone():
    """Keys of another rank in 16 bits, their gradients in float32: twice the bytes, behind the last call."""
    own, sizes = named_layout("contiguous", 64, 2), Sizes(1, 4, 1, 8, 8, 2)
    problem = Problem(own, own, tw.window(None, None), True, 1)
    found = estimates(problem, sizes, Links(1e30, 1.0, 1e30, 0.0, 0.0))
    keys = 32 * 16 * 2
    assert (found["all_gather"].seconds, found["ring"].seconds) == pytest.approx((2 * keys, keys))
    # Once beside what is computed, once behind it.
    assert (found["all_gather"].backward_seconds, found["ring"].backward_seconds) == pytest.approx(
        (2 * 2 * keys, 2 * keys))


def test_the_model_adds_the_exchange_of_heads_to_a_schedule_of_rows():
    sizes, links = Sizes(1, 32, 8, 128, 128, 2), Links()
    own = named_layout("zigzag", 8192, 8)
    rows = layout_of_rows(own, 2)
    found = estimates_of_rows(Problem(rows, rows, tw.causal("top_left"), True, 8), own, sizes, links)
    alone = estimates(Problem(rows, rows, tw.causal("top_left"), True, 4), Sizes(1, 16, 4, 128, 128, 2), links)
    exchanged = 1024 * (32 + 8) // 2 * 256 * 2
    assert set(found) == {"ring", "all_gather"}
    for name, one in found.items():
        assert one.pairs == alone[name].pairs
        assert one.bytes_received == exchanged + alone[name].bytes_received
        copied = 4 * 1024 * (32 + 8) * 256 * 2
        assert one.seconds == pytest.approx(alone[name].seconds + exchanged / links.bandwidth + 2 * links.latency
                                            + copied / links.memory + 4 * links.call)


def loads(layout, visible):
    """Return how many visible pairs each rank has, of a dense mask."""
    counts = visible.sum(-1)
    return [sum(int(counts[piece.start:piece.stop].sum()) for piece in own) for own in layout.pieces]


@pytest.mark.parametrize("mask", [tw.causal(), tw.causal() & tw.window(7, 0) & tw.sink_tokens(3), tw.prefix(20),
                                  tw.causal() & tw.chunk(24), tw.window(3, 9)], ids=str)
def test_a_balanced_layout_divides_the_pairs_evenly(mask):
    layout = balanced(mask, 128, 4, pieces=8)
    assert [layout.shard_length(rank) for rank in range(4)] == [32] * 4
    found = loads(layout, mask.visible(128, 128))
    assert max(found) <= 1.1 * sum(found) / 4
    assert sorted(position for own in layout.pieces for piece in own
                  for position in range(piece.start, piece.stop)) == list(range(128))


def test_a_balanced_layout_knows_documents():
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 12, 4, 12]))
    mask = tw.causal() & tw.documents(ids)
    found = {name: max(loads(layout, mask.visible(128, 128)[0, 0])) for name, layout in (
        ("zigzag", named_layout("zigzag", 128, 4)), ("balanced", balanced(mask, 128, 4, pieces=8)))}
    even = int(mask.visible(128, 128).sum()) / 4
    assert found["balanced"] < 1.15 * even < found["zigzag"]


@pytest.mark.parametrize(("mask", "ranks", "pieces", "message"), [
    (torch.ones(8, 8, dtype=torch.bool), 2, 4, "mask is a tensor of shape (8, 8); allowed for a balanced layout are"),
    (tw.causal() & torch.ones(8, 8, dtype=torch.bool), 2, 4, "a tensor of shape (8, 8); allowed for a balanced layout"),
    (tw.documents(torch.zeros(5, dtype=torch.int64)), 2, 4, "mask has documents of 5 tokens and length is 8"),
    (None, 0, 4, "ranks is 0; allowed is an integer of 1 and more."),
    (None, 2, 1.5, "pieces is 1.5; allowed is an integer of 1 and more.")])
def test_what_no_balanced_layout_is_made_of(mask, ranks, pieces, message):
    with pytest.raises(InvalidInput) as raised:
        balanced(mask, 8, ranks, pieces=pieces)
    assert message in str(raised.value)
