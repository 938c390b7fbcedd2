"""Trees, intervals, blocks and prefixes: what they see, by their definitions, and what each message says."""

import copy
import importlib.util
import pickle
import random

import pytest
import torch

import tilewise as tw
from tilewise import InvalidInput, attention, attention_varlen, causal
from tilewise.functions import MaskFunction
from tilewise.masks import TensorMask
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_SETTINGS, Operands

IDS = torch.tensor([0, 0, 1, 1])
ZEROS = torch.zeros(1, 1, 4, dtype=torch.int32)
BITMAP = torch.tensor([[True, False], [True, True]])
MADE = {"tree": tw.tree(IDS, [-1, 0]), "intervals": tw.intervals(ZEROS, ZEROS + 2), "blocks": tw.blocks(BITMAP, 2),
        "prefixes": tw.prefixes(torch.tensor([3]))}


def qkv(sq=4, sk=4, b=2, hq=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((b, hq, sq, 8), (b, 2, sk, 8), (b, 2, sk, 8))]


def problem_of(mask, b=2, hq=4, sq=4, sk=4):
    return AttentionProblem.from_tensors(*qkv(sq, sk, b, hq), Operands(mask_tensors=mask.tensors),
                                         settings=NO_SETTINGS._replace(mask_function=mask.code))


def message(call):
    with pytest.raises(InvalidInput) as caught:
        call()
    return str(caught.value)


def ancestors(segment, parents):
    while segment >= 0:
        yield segment
        segment = parents[segment]


def tree_of(segments, parents):
    """Who sees whom, by the words of the definition."""
    visible = torch.zeros(len(segments), len(segments), dtype=torch.bool)
    for i, own in enumerate(segments):
        for j, other in enumerate(segments):
            if 0 <= own < len(parents) and 0 <= other < len(parents):
                visible[i, j] = j <= i if own == other else other in ancestors(own, parents)
    return visible


@pytest.mark.parametrize("seed", range(20))
def test_a_query_sees_its_segment_up_to_itself_and_its_ancestors_in_any_order_of_tokens(seed):
    draw = random.Random(seed)
    parents = [[draw.randint(-1, segment - 1) for segment in range(draw.randint(1, 9))] for _ in range(2)]
    segments = [[draw.randint(-1, 9) for _ in range(24)] for _ in range(2)]
    mask = tw.tree(torch.tensor(segments, dtype=torch.int32), parents)
    pairs = torch.arange(2)[:, None, None], torch.arange(1), torch.arange(24)[:, None], torch.arange(24)
    assert torch.equal(mask.torch(*pairs, *mask.tensors), torch.stack([*map(tree_of, segments, parents)]))


def test_a_tree_that_lies_in_order_is_part_of_the_causal_mask():
    mask = tw.tree(torch.tensor([0, 0, 1, 1, 3, 2, 2]), torch.tensor([-1, 0, 0, 1]))
    assert torch.equal((causal() & mask).visible(7, 7)[0, 0], mask.visible(7, 7))


def test_one_list_of_parents_serves_all_batch_entries():
    segments = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]])
    for one, other in zip(tw.tree(segments, [-1, 0, 0]).tensors, tw.tree(segments, [[-1, 0, 0]] * 2).tensors,
                          strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [1, 2])
def test_intervals_hide_queries_from_start_to_stop(count):
    start, stop = (torch.randint(-3, most, (2, 3, 9, count), generator=torch.Generator().manual_seed(most))
                   for most in (12, 14))
    mask = tw.intervals(start, stop)
    queries = torch.arange(11)[:, None]
    hidden = ((queries >= start[:, :, None].movedim(4, 0)) & (queries < stop[:, :, None].movedim(4, 0))).any(0)
    pairs = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None], queries, torch.arange(9)
    assert torch.equal(mask.torch(*pairs, *mask.tensors), ~hidden)


def test_intervals_without_a_third_size_are_those_with_one():
    start, stop = torch.randint(0, 9, (2, 2, 1, 5))
    assert torch.equal(tw.intervals(start, stop).tensors[0],
                       tw.intervals(start[..., None], stop[..., None]).tensors[0])


def test_starts_and_stops_share_what_one_of_them_has_once():
    start, stop = torch.zeros(2, 1, 5, 2, dtype=torch.int64), torch.ones(1, 3, 5, 2, dtype=torch.uint8)
    assert tw.intervals(start, stop).tensors[0].shape == (2, 3, 5, 4)


def test_positions_past_32_bits_are_as_good_as_the_last_one():
    mask = tw.intervals(ZEROS[..., :2] + 1, torch.tensor([[[2**40, -(2**40)]]]))
    assert mask.visible(3, 2).tolist() == [[True, True], [False, True], [False, True]]


def test_blocks_may_be_no_squares_and_reach_past_the_ends():
    bitmap = torch.rand(2, 3, 4, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = tw.blocks(bitmap, (3, 4))
    entries, heads = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None]
    pairs = entries, heads, torch.arange(11)[:, None], torch.arange(9)
    wide = bitmap.repeat_interleave(3, 2).repeat_interleave(4, 3)[:, :, :11, :9]
    assert torch.equal(mask.torch(*pairs, *mask.tensors), wide)


@pytest.mark.parametrize(("alignment", "lengths"), [(None, (9, 9)), ("top_left", (5, 9)), (4, (5, 9)), (-2, (9, 6))])
def test_prefixes_are_prefix_with_a_length_for_each_entry(alignment, lengths):
    mask = tw.prefixes(torch.tensor([0, 4, 7]), alignment)
    pairs = torch.arange(3)[:, None, None], torch.arange(1), torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    wanted = [tw.prefix(n, alignment).visible(*lengths) for n in (0, 4, 7)]
    assert torch.equal(mask.torch(*pairs, *mask.tensors), torch.stack(wanted))


@pytest.mark.parametrize(("name", "text"), [("tree", "tree of 4 tokens"), ("intervals", "intervals of 4 keys"),
                                            ("blocks", "blocks of 2 x 2"), ("prefixes", "prefixes of 1 batch entries")])
def test_a_mask_prints_and_draws_as_what_it_is(name, text):
    assert str(MADE[name]) == text
    assert str(causal() & MADE[name]) == f"causal() & {text}"
    drawn = [[word == "■" for word in row.split()] for row in MADE[name].show(4, 4).split("\n")]
    assert torch.equal(torch.tensor(drawn), MADE[name].visible(4, 4))


@pytest.mark.parametrize("name", MADE)
def test_a_mask_joins_all_others_from_either_side(name):
    mask, seen = MADE[name], torch.tensor([True, False, True, True])
    expected = causal().visible(4, 4) & mask.visible(4, 4) & seen
    for joined in (causal() & mask & seen, mask & (seen & causal()), seen & mask & causal()):
        assert isinstance(joined, TensorMask)
        assert torch.equal(joined.visible(4, 4)[0, 0], expected)
    both = mask & tw.documents(IDS)
    assert torch.equal(both.visible(4, 4)[0, 0], mask.visible(4, 4) & (IDS[:, None] == IDS))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
                         ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", MADE)
def test_a_copy_is_the_same_mask_with_tensors_of_its_own(name, copied):
    other = copied(MADE[name])
    assert (str(other), other.code) == (str(MADE[name]), MADE[name].code)
    assert torch.equal(other.visible(4, 4), MADE[name].visible(4, 4))
    assert all(one is not own for one, own in zip(other.tensors, MADE[name].tensors, strict=True))


def test_masks_of_one_kind_have_one_code_and_blocks_one_for_each_size():
    assert tw.tree(torch.zeros(9, dtype=torch.int64), [-1]).code is MADE["tree"].code
    assert tw.blocks(~BITMAP, 2).code is MADE["blocks"].code is not tw.blocks(BITMAP, 3).code


def test_what_a_mask_was_made_of_may_be_written_later():
    """Whoever keeps something of a mask counts on it."""
    bitmap, lengths, start, stop = BITMAP.clone(), torch.tensor([3], dtype=torch.int32), ZEROS + 1, ZEROS + 3
    segments = torch.zeros(4, dtype=torch.int64)
    made = [tw.blocks(bitmap, 2), tw.prefixes(lengths), tw.intervals(start, stop), tw.tree(segments, [-1, 0])]
    before = [mask.visible(4, 4) for mask in made]
    for tensor in (bitmap, lengths, start, stop, segments):
        tensor.zero_() if tensor is not segments else tensor.fill_(1)
    assert all(torch.equal(mask.visible(4, 4), own) for mask, own in zip(made, before, strict=True))


@pytest.mark.parametrize(("mask", "distinct"), [
    (tw.tree(IDS, [-1, 0]), (1, 1)), (tw.tree(torch.stack([IDS, IDS]), [-1, 0]), (2, 1)),
    (tw.intervals(ZEROS, ZEROS), (1, 1)), (tw.intervals(ZEROS.expand(2, 4, 4), ZEROS), (2, 4)),
    (tw.blocks(BITMAP, 2), (1, 1)), (tw.blocks(BITMAP.expand(1, 4, 2, 2), 2), (1, 4)),
    (tw.prefixes(torch.tensor([1, 2])), (2, 1))], ids=str)
def test_a_problem_tells_how_many_masks_differ(mask, distinct):
    problem = problem_of(mask)
    assert problem.distinct_masks == distinct
    assert not problem.scores.mask_function.may_change
    assert f"mask function {mask.kind.name}#" in str(problem)


@pytest.mark.parametrize(("make", "expected"), [
    (lambda: tw.tree([0, 1], [-1, 0]),
     "tree: segments is a list; allowed is a tensor of integers of shape (s,) or (b, s)."),
    (lambda: tw.tree(torch.zeros(3), [-1]), "tree: segments is a tensor of shape (3,) and torch.float32; allowed is a "
                                            "tensor of integers of shape (s,) or (b, s)."),
    (lambda: tw.tree(IDS, "12"), "tree: parents is '12'; allowed is a list of integers, one a segment, or a list of "
                                 "those, one a batch entry, or such a tensor of integers on the CPU."),
    (lambda: tw.tree(IDS, [-1, [0]]),
     "tree: parents is [-1, [0]]; allowed is a list of integers, one a segment, or a list of those, one a batch entry, "
     "or such a tensor of integers on the CPU."),
    (lambda: tw.tree(IDS, torch.zeros(2, device="meta", dtype=torch.int64)),
     "tree: parents is a tensor of shape (2,) and torch.int64 on meta; allowed is a list of integers, one a segment, "
     "or a list of those, one a batch entry, or such a tensor of integers on the CPU."),
    (lambda: tw.tree(IDS, [[-1], [-1]]),
     "tree: parents has 2 lists and segments 1 batch entries; allowed is a list for each, or one for all."),
    (lambda: tw.tree(IDS, [-1, 1]),
     "tree: the parent of segment 1 is 1; allowed are -1, for none, and the segments before it."),
    (lambda: tw.tree(IDS, [-1, -2]),
     "tree: the parent of segment 1 is -2; allowed are -1, for none, and the segments before it."),
    (lambda: tw.intervals(ZEROS, 3),
     "intervals: stop is a int; allowed is a tensor of integers of shape (b or 1, hq or 1, sk), or (b or 1, hq or 1, "
     "sk, 1 or 2)."),
    (lambda: tw.intervals(ZEROS[..., None].expand(1, 1, 4, 3), ZEROS),
     "intervals: start is a tensor of shape (1, 1, 4, 3) and torch.int32; allowed is a tensor of integers of shape (b "
     "or 1, hq or 1, sk), or (b or 1, hq or 1, sk, 1 or 2)."),
    (lambda: tw.intervals(ZEROS, ZEROS[..., :3]), "intervals: start has shape (1, 1, 4, 1) and stop (1, 1, 3, 1); "
                                                  "allowed are equal ones, or 1 in place of b or hq."),
    (lambda: tw.intervals(ZEROS.expand(2, 1, 4), ZEROS.expand(3, 1, 4)),
     "intervals: start has shape (2, 1, 4, 1) and stop (3, 1, 4, 1); allowed are equal ones, or 1 in place of b or "
     "hq."),
    (lambda: tw.intervals(ZEROS, ZEROS.to("meta")),
     "intervals: start is on cpu and stop on meta: move them to one device."),
    (lambda: tw.blocks(ZEROS), "blocks: bitmap is a tensor of shape (1, 1, 4) and torch.int32; allowed is a boolean "
                               "tensor of shape (blocks of queries, blocks of keys), or (b or 1, hq or 1, blocks of "
                               "queries, blocks of keys)."),
    (lambda: tw.blocks(BITMAP, 0), "blocks: size is 0; allowed is an integer of 1 and more, or a pair of them: queries "
                                   "and keys of a block."),
    (lambda: tw.blocks(BITMAP, (2, 2, 2)), "blocks: size is (2, 2, 2); allowed is an integer of 1 and more, or a pair "
                                           "of them: queries and keys of a block."),
    (lambda: tw.prefixes(3),
     "prefixes: lengths is a int; allowed is a tensor of integers of shape (b,). prefix(length) takes an integer."),
    (lambda: tw.prefixes(IDS, "bottom_right"),
     "prefixes: alignment is 'bottom_right'; allowed are 'top_left' and an integer, the key that query 0 stands on: "
     "with the lengths of the call, pass alignment=sk - sq."),
    (lambda: tw.prefixes(IDS, "middle"),
     "alignment is 'middle'; allowed are 'top_left', 'bottom_right' and an integer, the key that query 0 stands on."),
    (lambda: MADE["tree"].with_tensors(ZEROS, ZEROS),
     "cannot give tree of 4 tokens other tensors, which the library makes; call tilewise.tree() again."),
])
def test_message_names_the_argument_and_what_is_allowed(make, expected):
    assert message(make) == expected


@pytest.mark.parametrize(("mask", "lengths", "expected"), [
    (MADE["tree"], (4, 5), "mask is tree of 4 tokens, made for 4 keys, and the call has 5."),
    (MADE["tree"], (3, 4), "mask is tree of 4 tokens, made for 4 queries, and the call has 3."),
    (tw.tree(IDS.expand(3, 4), [-1, 0]), (4, 4),
     "mask is tree of 4 tokens, made for 3 batch entries, and the call has 2."),
    (MADE["intervals"], (4, 3), "mask is intervals of 4 keys, made for 4 keys, and the call has 3."),
    (tw.intervals(ZEROS.expand(1, 2, 4), ZEROS), (4, 4),
     "mask is intervals of 4 keys, made for 2 heads, and the call has 4."),
    (MADE["blocks"], (5, 4), "mask is blocks of 2 x 2, made for 2 blocks of 2 queries, and the call has 3."),
    (MADE["blocks"], (3, 5), "mask is blocks of 2 x 2, made for 2 blocks of 2 keys, and the call has 3."),
    (MADE["prefixes"], (4, 6),
     "mask is prefixes of 1 batch entries and names no alignment, but q has 4 positions and k has 6; pass "
     "alignment='top_left', or the key that query 0 stands on: sk - sq where the last query stands on the last key."),
    (tw.prefixes(torch.tensor([1, 2, 3])), (4, 4),
     "mask is prefixes of 3 batch entries, made for 3 batch entries, and the call has 2."),
], ids=str)
def test_a_mask_for_other_sizes_is_refused_before_a_kernel_reads_it(mask, lengths, expected):
    for joined in (mask, causal("top_left") & mask):
        assert message(lambda joined=joined: attention(*qkv(*lengths), mask=joined)) == expected
    if "batch entries" not in expected.partition(",")[2] and "heads" not in expected:
        assert message(lambda: mask.visible(*lengths)) == expected
        assert message(lambda: mask.plot(*lengths)) == expected


@pytest.mark.parametrize("name", MADE)
def test_packed_sequences_are_refused_and_padded_ones_are_not(name):
    mask, (q, k, v) = MADE[name], (tensor[0].transpose(0, 1) for tensor in qkv())
    borders = torch.tensor([0, 2, 4], dtype=torch.int32)
    assert message(lambda: attention_varlen(q, k, v, cu_seqlens_q=borders, cu_seqlens_k=borders, mask=mask)) == (
        f"mask is {mask}, and sequences are packed; allowed are batch entries, as attention() has them: its seqlens_q "
        "and seqlens_k say how long each is.")
    used = torch.tensor([4, 2], dtype=torch.int32)
    out = attention(*qkv(), mask=mask, seqlens_k=used)
    padded = torch.arange(4) < used[:, None, None, None]
    torch.testing.assert_close(out, attention(*qkv(), mask=mask & padded))


@pytest.mark.parametrize("name", MADE)
def test_a_mask_is_a_mask_function_without_a_gradient(name):
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    mask = MADE[name]
    assert isinstance(mask, MaskFunction)
    dense = mask.visible(4, 4)
    out, wanted = (attention(q, k, v, mask=own) for own in (mask, dense))
    torch.testing.assert_close(out, wanted)
    for one, other in zip(*(torch.autograd.grad(each.sum(), (q, k, v)) for each in (out, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_without_triton_a_mask_has_its_torch_twin_alone(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    mask = tw.tree(IDS, [-1, 0])
    assert mask.triton is None
    torch.testing.assert_close(attention(*qkv(), mask=mask), attention(*qkv(), mask=MADE["tree"]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_takes_one_tree_after_another():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask=causal() & mask), fullgraph=True,
                             backend="aot_eager")
    for parents in ([-1, 0], [-1, -1]):
        mask = tw.tree(IDS, parents)
        torch.testing.assert_close(compiled(*qkv(), mask), attention(*qkv(), mask=causal() & mask))
    torch._dynamo.reset()
