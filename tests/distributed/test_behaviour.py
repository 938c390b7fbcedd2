"""Beside equal results: shards, errors on all ranks, what is sent, and how a call stands in a model."""

import pytest
import torch

import tilewise as tw
from tilewise.masks import Mask

MODULE = "distributed.behaviour"


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(("layout", "length"), [("zigzag", 16), ("zigzag", 13), ("contiguous", 13), ("zigzag", 3),
                                                ("contiguous", 0)])
def test_shards_put_together_are_the_whole_and_hand_gradients_back(workers, layout, length, dim):
    found = workers.run(4, MODULE, "round_trip", layout, length, dim % 3)
    assert all(one["same"] and one["part"] and one["gradient"] == 0.0 for one in found)
    assert sorted(position for one in found for position in one["positions"]) == list(range(length))


@pytest.mark.parametrize(("layout", "length"), [("zigzag", 16), ("contiguous", 13), ("zigzag", 3)])
def test_shards_of_a_mesh_of_two_dims_lie_row_by_row(workers, layout, length):
    found = workers.run((2, 2), MODULE, "round_trip", layout, length, 2)
    assert all(one["same"] and one["part"] and one["gradient"] == 0.0 for one in found)
    assert [one["positions"] for one in found] == [
        one["positions"] for one in workers.run(4, MODULE, "round_trip", layout, length, 2)]


def test_zigzag_pairs_the_front_with_the_back(workers):
    found = workers.run(2, MODULE, "round_trip", "zigzag", 8, 1)
    assert [one["positions"] for one in found] == [[0, 1, 6, 7], [2, 3, 4, 5]]


MESSAGES = {
    "layout": "layout is 'striped'; allowed are 'contiguous', 'zigzag' and a Layout.",
    "schedule": "schedule is 'star'; allowed are 'ring', 'all_gather', 'ulysses', and None to choose.",
    "mesh": "mesh is a ProcessGroup; allowed is a torch.distributed.device_mesh.DeviceMesh of one dim or two.",
    "mesh_dims": "mesh has 3 dims ('pp', 'dp', 'cp'); allowed are one and two: pass those over which the sequence is "
                 "cut, as mesh['cp'].",
    "mesh_order": "mesh is of ranks [[3, 0], [1, 2]]; allowed with two dims are ascending ranks along each of them.",
    "lengths": "lengths is (16,); allowed is a pair of integers >= 0, the numbers of queries and of keys on all ranks "
               "together, or None.",
    "shard_length": "q has 6 positions on rank 0; layout 'zigzag' of 28 positions on 4 ranks gives it 7. Where ranks "
                    "hold different numbers, pass the length of the whole sequence.",
    "rank": "q has shape (4, 6, 8); allowed on each rank are 4 dims (b, h, s, d).",
    "documents": "mask has documents of 5 queries in 1 batch entries; allowed are the ids of the whole sequences, of "
                 "24 queries in 1 or 1.",
    "function": "a function cannot be cut to the positions of a rank; allowed are masks by position, documents and a "
                "boolean tensor of the rank's queries.",
    "tiled": "mask is tiled() for the whole sequences, and ranks compute parts of them; pass it untiled.",
    "bias": "bias has shape (1, 1, 24, 24); allowed is (b=1, hq=4, sq=6, sk=24), or 1 in place of a size.",
    "padding": "mask is causal(alignment='bottom_right') and lengths are data (seqlens_k); allowed with them "
               "is alignment='top_left' or an integer",
    "seqlens": "seqlens_k is a tensor of torch.int64 and shape (2,) on cpu; allowed is a tensor of integers of shape "
               "(1,) on q's device.",
    "seqlens_type": "seqlens_q is a list; allowed is a tensor of integers of shape (1,) on q's device.",
    "heads": "k has 2 heads and q has 3: q heads must be a multiple of k heads.",
    "alignment": "mask is causal() and names no alignment, but q has 24 positions and k has 8",
    "distances": "alibi_slopes are given with 24 queries and 8 keys and no alignment",
    "softcap": "softcap is -1.0; allowed is a number from 2^-126 to 2^127, or None for none.",
    "backend": "backend is 'fast'; allowed are",
    "layout_length": "layout 'mine' is of 0 positions on 2 ranks, and the call has 24 positions on 4: make one for "
                     "these.",
    "shard": "x is a list; allowed is a torch.Tensor.",
    "shard_dim": "dim is 4 and x has 4 dims; allowed are -4 to 3.",
    "unshard": "layout 'zigzag' of 25 positions on 4 ranks gives it 7. Where ranks hold different numbers, pass the "
               "length of the whole sequence.",
    "explain": "explain has no argument 'window'; allowed are mask, scale, bias, ",
}


def test_a_wrong_call_raises_on_every_rank_and_leaves_the_group_in_order(workers):
    found = workers.run(4, MODULE, "wrong_calls")
    assert set(found[0]) == set(MESSAGES)
    for of_rank in found:
        assert {name: kind for name, (kind, _) in of_rank.items() if kind != "InvalidInput"} == {}
    missing = {name: found[0][name][1] for name, text in MESSAGES.items() if text not in found[0][name][1]}
    assert missing == {}


PACKED_MESSAGES = {
    "counts": "cu_seqlens_q has 3 entries and cu_seqlens_k 2; allowed are equal numbers: one more than there are "
              "sequences.",
    "descending": "cu_seqlens_q has 9 at [1] and 3 at [2]: sequence 1 would end before it begins",
    "past_the_end": "cu_seqlens_q ends sequence 1 at 25 and q has 24 rows",
    "list": "cu_seqlens_q is a list; allowed is a tensor of integers on q's device.",
    "alignment": "mask is causal() and names no alignment, but lengths are data",
    "offset": "mask is causal(alignment=3) and lengths are data (cu_seqlens_q, cu_seqlens_k)",
    "documents": "mask has documents of 5 queries in 1 batch entries; allowed are the ids of the whole sequences",
    "bias": "bias has shape (2, 4, 15, 15) and sequences are packed: pass max_seqlen_q as an integer",
    "rows": "allowed is a tensor of 3 dims (total, h, d).",
    "function": "a function cannot be cut to the positions of a rank",
}


def test_a_wrong_packed_call_raises_on_every_rank(workers):
    found = workers.run(2, MODULE, "wrong_packed_calls")
    assert set(found[0]) == set(PACKED_MESSAGES)
    for of_rank in found:
        said = {name: text or "" for name, (_, text) in of_rank.items()}
        missing = {name: said[name] for name, text in PACKED_MESSAGES.items() if text not in said[name]}
        assert missing == {}
        assert {kind for kind, _ in of_rank.values()} == {"InvalidInput"}


def test_a_process_outside_of_the_mesh_is_told(workers):
    *_, last = workers.run(4, MODULE, "outside")
    assert last == ("InvalidInput", "mesh is of ranks [0, 1, 2], and this process is none of them: call it on these "
                                    "alone.")


@pytest.mark.parametrize(("what", "text"), [
    ("layout", "layout 'contiguous' of 24 queries and 24 keys"), ("shape", "b1 h4/2 d12/12 float64"),
    ("error", "rank 2 of the mesh refused the call: v has 8 positions on rank 2; layout 'zigzag' of 21 positions"),
    ("padding", "rank 2 of the mesh refused the call: layout is 'striped'")])
def test_ranks_that_disagree_raise_on_every_rank(workers, what, text):
    found = workers.run(3, MODULE, "disagreement", what)
    assert all(kind == "InvalidInput" for kind, _ in found)
    assert text in found[0][1]
    assert text in found[1][1]


@pytest.mark.parametrize(("what", "text"), [
    ("layout", "this one has mesh (2, 2), layout 'zigzag' of 24 queries and 24 keys"),
    ("error", "rank 3 of the mesh refused the call: v has 6 positions on rank 3; layout 'zigzag' of 20 positions")])
def test_ranks_of_two_dims_that_disagree_raise_on_every_rank(workers, what, text):
    found = workers.run((2, 2), MODULE, "disagreement", what)
    assert all(kind == "InvalidInput" for kind, _ in found)
    assert all(text in own for _, own in found[:3])


def test_a_mesh_of_two_dims_says_what_it_does_not_take(workers):
    for found, messages in workers.run((2, 2), MODULE, "refusals_of_two_dims"):
        assert messages == 0
        assert {kind for kind, _ in found} == {"UnsupportedProblem"}
        ulysses, odd, shared, dropout, backend = (text for _, text in found)
        assert ("schedule 'ulysses' refuses this call\n  ulysses: needs a mesh of one dim, got one of two: ranks of "
                "the second exchange heads with every schedule of the first") in ulysses
        assert ("schedule 'ring' refuses this call\n  ring: follows on an exchange of heads over the mesh's second "
                "dim, which needs a number of query heads that 2 ranks divide, got 3") in odd
        assert "no schedule takes this call" in shared
        assert "which needs ranks that share no part of a group of query heads, got 3 query heads a rank" in shared
        assert "which takes no dropout, whose draws belong to the heads of all ranks" in dropout
        assert "backend 'cuda' refuses" in backend


def test_explain_tells_of_the_exchange_in_a_mesh_of_two_dims(workers):
    for chosen, text, costs, reasons in workers.run((2, 2), MODULE, "explained"):
        assert chosen in ("ring", "all_gather")
        assert text.startswith("mesh (2, 2): 2 ranks exchange heads, a schedule goes over 2; layout 'zigzag'")
        assert "\n  ulysses    no: needs a mesh of one dim, got one of two" in text
        assert {name: one.pairs for name, one in costs.items()} == {"ring": 150, "all_gather": 150}
        # Six rows of q, k, v and out: half of the heads of the other rank of the row. Half of the heads of the keys of
        # the other row.
        exchanged, keys = 6 * (4 + 2) * 2 * 8 * 8 // 2, 12 * 1 * 2 * 8 * 8
        assert {one.bytes_received for one in costs.values()} == {exchanged + keys}
        assert (reasons["ring"], reasons["all_gather"]) == (None, None)


def test_two_dims_of_a_larger_mesh_serve(workers):
    assert max(workers.run((2, 2), MODULE, "part_of_a_larger_mesh")) < 1e-12


def test_ulysses_says_what_it_does_not_take(workers):
    odd, divided, dropout = workers.run(4, MODULE, "ulysses_refusals")[0]
    assert "ulysses: needs a number of query heads that 4 ranks divide, got 3" in odd
    assert "needs a number of query heads that 4 ranks divide, got 6" in divided
    assert "takes no dropout, whose draws belong to the heads of all ranks" in dropout
    shared = workers.run(2, MODULE, "ulysses_refusals")[0][1]
    assert ("needs ranks that share no part of a group of query heads, got 3 query heads a rank and 2 for each head of "
            "keys") in shared


def test_one_rank_is_the_plain_call(workers):
    ((same, function, packed, error),) = workers.run(1, MODULE, "one_rank")
    assert same
    assert packed
    assert function == "OutFunctionBackward"
    assert error == MESSAGES["layout"]


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
@pytest.mark.parametrize(("mask", "layout", "documents", "rows"), [
    (None, "contiguous", 0, (48, 48, 48, 48)), (tw.causal(), "contiguous", 0, (0, 16, 32, 48)),
    (tw.causal() & tw.window(4, 0), "contiguous", 0, (0, 4, 4, 4)), (None, "contiguous", 16, (0, 0, 0, 0)),
    (None, "contiguous", 24, (8, 32, 8, 0))], ids=str)
def test_a_rank_receives_the_keys_that_its_queries_see_and_no_others(workers, schedule, mask, layout, documents, rows):
    found = workers.run(4, MODULE, "bytes_received", mask, layout, schedule, documents)
    of_row = 2 * 2 * 8 * 8  # k and v, two heads, 8 columns of float64
    assert found == [row * of_row for row in rows]


def test_ulysses_computes_documents_as_packed_sequences_where_they_stand_together(workers):
    ids = torch.arange(24) // 9  # the last one is shorter
    for given in workers.run(2, MODULE, "borders_by_ulysses", ids):
        assert given == [([0, 9, 18, 24], [0, 9, 18, 24], None, None, Mask(left, right, "top_left"))
                         for left, right in ((None, 0), (3, 2))]
    assert workers.run(2, MODULE, "borders_by_ulysses", ids % 2) == [[], []]  # documents of two parts


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "ulysses"])
def test_errors_in_16_bits_are_those_of_one_device(workers, schedule):
    """Local calls rounded their parts to 16 bits, and a result had up to 1.6 times the error of one device."""
    errors = workers.run(4, MODULE, "errors_in_16_bits", schedule)[0]
    assert [many / one for many, one in errors if many > 1.1 * one] == []


@pytest.mark.parametrize(("mask", "layout", "schedule", "out", "gradients"), [
    (None, "zigzag", "ring", torch.float32, torch.float32),
    (tw.causal(), "zigzag", "all_gather", torch.bfloat16, torch.float32),
    (tw.causal(), "zigzag", "ulysses", torch.bfloat16, torch.float32),
    (tw.documents(torch.arange(64) // 16), "contiguous", "ring", torch.bfloat16, torch.bfloat16)],
    ids=["several_parts", "parts_of_gradients", "shared_heads", "one_call"])
def test_parts_of_a_sum_are_float32_and_results_of_one_call_are_not(workers, mask, layout, schedule, out, gradients):
    for found in workers.run(4, MODULE, "dtypes_of_parts", mask, layout, schedule):
        assert found == ({out}, {gradients})


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_a_backend_without_float32_results_is_refused_for_parts_of_a_sum_by_name(workers, schedule):
    for kind, text in workers.run(4, MODULE, "refused_parts", schedule):
        assert kind == "UnsupportedProblem"
        assert "torch: writes results in the inputs' dtype, got torch.bfloat16 with results in float32" in text


def test_without_a_gradient_ranks_that_share_heads_have_no_parts(workers):
    for found, error in workers.run(4, MODULE, "shared_heads_without_a_gradient"):
        assert found == [0.0, 0.0]
        assert error == "UnsupportedProblem"


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
def test_errors_in_16_bits_of_two_dims_are_those_of_one_device(workers, schedule):
    """With and without heads of keys that the ranks of a row share."""
    for mesh, hk in (((2, 2), 2), ((2, 2), 1), ((1, 4), 2)):
        errors = workers.run(mesh, MODULE, "errors_in_16_bits", schedule, hk)[0]
        assert [many / one for many, one in errors if many > 1.1 * one] == []


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "ulysses"])
def test_backends_that_are_chosen_agree_in_float32(workers, schedule):
    for differences in workers.run(2, MODULE, "float32_difference", schedule):
        assert max(differences) < 1e-5


def test_it_stands_in_a_checkpoint_a_compiled_function_and_autocast(workers):
    for kept, compiled, dtype in workers.run(2, MODULE, "surroundings"):
        assert max(*kept, *compiled) == 0.0
        assert dtype == "torch.bfloat16"


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_kept_for_the_backward_pass_serves_again_and_elsewhere(workers, ranks, schedule):
    for differences, changed in workers.run(ranks, MODULE, "kept_messages", schedule):
        assert max(differences) == 0.0
        assert changed == 0.0


@pytest.mark.parametrize(("ranks", "layout", "mask", "groups", "counts"), [
    (2, "zigzag", tw.causal(), 1, [[1, 1], [1, 1]]),  # keys forward, their gradients backward
    (2, "zigzag", tw.causal(), 2, [[2, 4], [2, 4]]),  # keys of each group of heads backward too
    (3, "zigzag", tw.causal(), 1, [[2, 4]] * 3),  # more keys of others than own ones
    # Keys go to the rank behind, but for the last one's, and gradients back.
    (3, "contiguous", tw.causal("top_left") & tw.window(3, 0), 1, [[1, 0], [1, 1], [0, 1]])],
    ids=["one_group", "two_groups", "more_than_own", "window"])
def test_an_all_gather_sends_keys_once_where_they_are_kept(workers, ranks, layout, mask, groups, counts):
    assert workers.run(ranks, MODULE, "messages_of_passes", layout, mask, groups) == counts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sinks_enter_with_the_first_part_of_a_row_but_in_float32(workers, dtype):
    assert workers.run(2, MODULE, "sinks_behind", dtype) == [dtype == "float32"] * 2


def test_without_a_seed_all_ranks_drop_by_the_same_draw(workers):
    found = workers.run(4, MODULE, "drawn_seed")
    for first, again in found:
        assert first.equal(found[0][0])
        assert not first.equal(again)
        kept = (first != 0).double().mean()
        assert 0.4 < kept < 0.6


def test_explain_names_the_schedule_and_the_reasons(workers):
    for chosen, text, pairs, reasons in workers.run(2, MODULE, "explained"):
        assert chosen in ("ring", "all_gather", "ulysses")
        assert f"{chosen:<10} modelled forward" in text
        assert text.count("chosen") == 1
        assert pairs == {"ring": 150, "all_gather": 150, "ulysses": 150}
        assert reasons == {"ring": None, "all_gather": None,
                           "ulysses": "needs a number of query heads that 2 ranks divide, got 3"}


@pytest.mark.parametrize(("how", "times"), [("0", 1), ("1", 3)])
def test_ranks_compare_a_kind_of_call_once_or_always(workers, how, times):
    assert workers.run(3, MODULE, "repeated_call", how) == [times] * 3
