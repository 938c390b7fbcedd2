"""ring_flash_attn's names compute on every rank what flash-attn's functions compute on one."""

import pytest

MODULE = "distributed.ring_flash_attn"
OPTIONS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window_size": (5, -1)},
           "two_sides": {"window_size": (3, 2), "softmax_scale": 0.3, "deterministic": True}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", ["ring", "zigzag"])
@pytest.mark.parametrize("function", ["batches", "packed"])
def test_a_part_has_the_results_and_gradients_of_flash_attn(workers, function, layout, options):
    for ranks in (2, 4):
        for found in workers.run(ranks, MODULE, function, layout, options):
            assert max(found) < 1e-12, ranks


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_that_are_cut_have_the_results_and_gradients_of_flash_attn(workers, options):
    for ranks in (2, 4):
        for found in workers.run(ranks, MODULE, "llama3", options):
            assert max(found) < 1e-12, ranks


def test_prepared_lengths_mean_to_flash_attn_what_they_mean_here(workers):
    for found in workers.run(4, MODULE, "prepared_alone"):
        assert max(map(abs, found)) < 1e-12


def test_out_comes_alone_and_the_default_group_serves_and_batches_have_dropout(workers):
    assert workers.run(4, MODULE, "surroundings") == [((2, 8, 4, 8), True, True)] * 4


def test_layers_hand_on_one_tensor_of_lengths_by_which_their_plan_is_found(workers):
    assert workers.run(2, MODULE, "lengths_of_layers") == [(True, 1)] * 2


UNLIKE = ("InvalidInput", "cu_seqlens_q, cu_seqlens_k and local_k_slice are not of one call of tilewise.integrations."
                          "ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens; allowed are the very objects that it "
                          "returned.")
MESSAGES = {
    "causal": ("InvalidInput", "causal is (3, 0); allowed are True and False."),
    "window": ("InvalidInput", "window_size is 3; allowed are two integers (left, right), -1 for no bound."),
    "group": ("InvalidInput", "group is 'cp'; allowed is a process group that this process is in, or None for the "
                              "default one."),
    "dims": ("InvalidInput", "q has shape (8, 4, 8); allowed is a tensor of 4 dims (b, s, h, d)."),
    "packed_dims": ("InvalidInput", "q has shape (2, 8, 4, 8); allowed is a tensor of 3 dims (total, h, d)."),
    "scale": ("InvalidInput", "softmax_scale is '1'; allowed"),
    "disagreement": ("InvalidInput", "ranks of the mesh disagree about the call"),
    "odd": ("InvalidInput", "q has 7 tokens on this rank; allowed are even numbers: half of them are of the front of "
                            "the sequence, half of the back."),
    "odd_piece": ("InvalidInput", "cu_seqlens has a piece of 3 rows; allowed are even ones: half of them are of the "
                                  "front of a sequence, half of the back."),
    "rows": ("InvalidInput", "cu_seqlens ends at 7 and q has 8 rows: they must be equal."),
    "list": ("InvalidInput", "cu_seqlens is a list; allowed is a tensor of int32 or int64, (sequences + 1,)."),
    "floats": ("InvalidInput", "cu_seqlens is a tensor of torch.float64 and shape (3,); allowed is"),
    "descending": ("InvalidInput", "cu_seqlens is [0, 9, 8]; allowed are 0, then where each sequence ends, ascending."),
    "dropout": ("UnsupportedProblem", "dropout_p is 0.1; allowed is 0.0: packed sequences over ranks have no dropout."),
    "llama_dropout": ("UnsupportedProblem", "dropout_p is 0.5; allowed is 0.0"),
    "copied": UNLIKE, "slice": UNLIKE,
    "unlike": ("InvalidInput", "cu_seqlens_q was prepared with causal=False, and it is True here: they must be equal."),
    "stride": ("InvalidInput", "heads_k_stride is 3 and k has 2 heads; allowed is a divisor of their number."),
    "divided": ("InvalidInput", "cu_seqlens ends at 17; allowed is a number of rows that 2 ranks divide."),
    "rank": ("InvalidInput", "rank is -1; allowed is an integer >= 0."),
    "ranks": ("InvalidInput", "world_size is 0; allowed is an integer >= 1."),
    "other_rank": ("InvalidInput", "cu_seqlens_q was prepared with rank="),
}


def test_wrong_calls_are_told_in_the_words_of_ring_flash_attn(workers):
    for of_rank in workers.run(2, MODULE, "wrong_calls"):
        assert set(of_rank) == set(MESSAGES)
        unlike = {name: found for name, found in of_rank.items()
                  if found[0] != MESSAGES[name][0] or MESSAGES[name][1] not in (found[1] or "")}
        assert unlike == {}


def test_a_process_in_no_group_is_told(workers):
    assert workers.run(1, MODULE, "default_group") == [(
        "InvalidInput", "group is None and there is no default process group; allowed is a process group, or None "
                        "after torch.distributed.init_process_group().")]
