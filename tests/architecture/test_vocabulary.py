"""Names of our own that gave way to the field's do not come back (CONTRIBUTING.md, Style in brief)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for folder in ("src", "tests", "benchmarks") for ending in ("py", "cu")
         for path in sorted((ROOT / folder).rglob(f"*.{ending}")) if path != Path(__file__)]
# What was, and what is in its place: of FlashAttention, CUTLASS, CUDA, Triton, cuDNN or PyTorch.
RETIRED_NAMES = {
    # pipelines and the tile scheduler
    "wait_full": "consumer_wait", "wait_empty": "producer_acquire", "leave_products": "consumer_release_after_mma",
    "leave_tile": "release_tile", "take_turn": "order_barrier_wait", "pass_turn": "order_barrier_arrive",
    "draw_number": "fetch_next_tile", "hand_out": "publish_tile", "take_tile": "get_tile",
    "slots_for": "allocate_stages", "section_of": "heads_per_swizzle",
    # the forward kernel's softmax
    "comes_again": "is_recomputed", "are_bad": "overflowed", "verdict_on": "overflow_of", "take_back": "retake_tile",
    "load_judged": "load_with_recompute", "new_shift_of": "update_shift",
    "in_pairs": "pack_pairs", "in_parts": "split_halves_packed", "by_thread": "per_thread_partials",
    "JUDGED": "OVERFLOW_SLOTS", "RESTS": "SKIP_PADDING",
    "EARLY": "SINK_BLOCK_FIRST", "PACK": "PACK_GQA",
    # split-KV
    "CUT": "SPLIT_KV", "cut_steps": "blocks_of_split", "part_at": "split_of", "write_part": "write_partial",
    "write_whole": "write_tile", "record_of": "floats_per_partial", "parts_shape": "partial_shape",
    "first_line": "first_row", "combine_parts_kernel": "combine_splits_kernel", "layout_of": "grid_plan_of",
    "query_stages": "q_stages", "out_parts": "epilogue_passes",
    # the backward kernels
    "key_tile_at": "kv_tile_at", "queries_to_and_fro": "q_block_start_serpentine", "masked_queries_of":
    "masked_q_blocks_of", "owned_of": "sequence_rows_of", "issue_pairs": "issue_s_or_dp", "add_in_order":
    "accumulate_in_order", "add_directly": "add_from_registers", "wait_for_tiles_before": "semaphore_wait",
    "await_sums": "await_accum", "make_picks": "make_selectors", "hopper_tails_kernel": "hopper_augmented_k_kernel",
    "tails_shape": "columns_shape", "sums_shape": "accum_shape", "query_section": "kv_heads_per_swizzle",
    "pass_turn_on": "overlap_blocks", "sum_dv": "accumulate_dv", "sum_dk": "accumulate_dk",
    "add_up": "accumulate", "keys_seen": "visible_keys_of", "blank_tiles": "zero_hidden_tiles",
    # masks and modifiers of the portable kernels
    "queries_seeing": "visible_queries", "unseen_as_zero": "zero_invisible_rows", "sees_any": "sees_any_key",
    "within_documents": "narrow_to_documents", "padding_as_zero": "zero_padding_rows", "less_delta": "subtract_delta",
    "through_softcap": "score_grad_of_softcap", "through_function": "score_grad_of_function",
    "keep_pairs": "dropout_keeps", "asked_for": "function_arguments", "change_scores": "modify_scores",
    "blank_out_kernel": "zero_fill_out_kernel", "PairSums": "BiasGradientSums", "OperandSums": "OperandGradients",
    "load_turned": "load_rotated",
    # the host
    "forget_choices": "clear_caches", "short_way": "fast_path",
}
RETIRED_FILES = ("places.py", "blanks.py", "pair_sums.py", "sums.py", "parts.py",
                 "results.py", "cuts.py", "waves.py", "short_way.py", "hopper_tails.py", "hopper_dq_sums.py",
                 "key_shares.py", "pair_tiles.py", "hopper_backward_pieces.py")


def retired_in(text):
    """Return the retired names that a text has as whole words."""
    return [word for word in re.findall(r"\w+", text) if word in RETIRED_NAMES]


def test_it_finds_whole_words_alone():
    assert retired_in("x = wait_full(a)  # consumer_wait") == ["wait_full"]
    assert retired_in("await_fully, CUTS") == []


def test_no_file_has_a_retired_name():
    assert len(FILES) > 500
    found = {path.relative_to(ROOT).as_posix(): {word: RETIRED_NAMES[word] for word in words} for path in FILES
             if (words := retired_in(path.read_text("utf-8")))}
    assert found == {}, "the field has names for these"
    assert [path.name for path in FILES if path.name in RETIRED_FILES] == []
