"""Named grids of problems."""

import pytest
import torch

from tilewise.bench.grids import GRIDS, Cell, filtered, grid_cells, parse_dtype
from tilewise.bench.shapes import FULL, packed_case, packed_kv_cases, priced, shape_case
from tilewise.errors import InvalidInput
from tilewise.masks import causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem
from tilewise.testing.inputs import make_inputs, make_operands


def test_every_cell_of_the_paper_grid_holds_16k_tokens_of_width_2048():
    cells = grid_cells(["paper"])
    assert len(cells) == 36
    assert {cell.case.b * cell.case.sq for cell in cells} == {16384}
    assert {cell.case.hq * cell.case.d for cell in cells} == {2048}


def test_case_names_are_unique_within_a_grid_and_dtype():
    for name in GRIDS:
        cells = [str(cell) for cell in grid_cells([name])]
        assert len(set(cells)) == len(cells)


def test_filters_keep_what_they_list():
    kept = filtered(grid_cells(["paper"]), lengths=[512, 1024], dims=[128])
    assert {(cell.case.sq, cell.case.d) for cell in kept} == {(512, 128), (1024, 128)}
    assert filtered(grid_cells(["packed"]), lengths=[32768]) == grid_cells(["packed"])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_cell_describes_the_problem_that_its_tensors_make(layout):
    cell = Cell("flags", shape_case(2, (4, 2), (9, 17), (8, 6), causal("top_left"), layout), torch.float32)
    q, k, v, _, _ = make_inputs(cell.case, cell.dtype, "cpu")
    assert cell.problem(torch.device("cpu")) == AttentionProblem.from_tensors(q, k, v, mask=cell.case.mask)


@pytest.mark.parametrize("case", [case for case, _ in priced(shape_case(2, (4, 2), (9, 9), (8, 8), causal()))], ids=str)
def test_a_cell_with_an_option_describes_the_problem_that_its_tensors_make(case):
    q, k, v, _, _ = make_inputs(case, torch.bfloat16, "cpu")
    operands = make_operands(case, torch.bfloat16, "cpu")
    assert Cell("options", case, torch.bfloat16).problem(torch.device("cpu")) == AttentionProblem.from_tensors(
        q, k, v, operands, mask=case.mask, settings=case.settings)


def test_the_options_grid_has_the_plain_call_and_each_option_alone_at_both_lengths():
    cells = grid_cells(["options"])
    assert {(cell.case.b, cell.case.hq, cell.case.hk, cell.case.sq, cell.case.sk, cell.case.d, cell.dtype)
            for cell in cells} == {(b, 16, 16, s, s, 128, torch.bfloat16) for b, s in ((4, 4096), (2, 8192))}
    assert {cell.case.mask for cell in cells} == {causal()}
    found = [(cell.case.bias, cell.case.alibi, cell.case.softcap, cell.case.sinks, cell.case.dropout_p,
              cell.case.mask_tensor, cell.case.documents, cell.learned) for cell in cells if cell.case.sq == 4096]
    assert found == [
        ("", "", None, False, 0.0, "", "", ()), ("1hqk", "", None, False, 0.0, "", "", ()),
        ("1hqk", "", None, False, 0.0, "", "", ("bias",)), ("", "h", None, False, 0.0, "", "", ()),
        ("", "", 30.0, False, 0.0, "", "", ()), ("", "", None, True, 0.0, "", "", ("sinks",)),
        ("", "", None, False, 0.1, "", "", ()), ("", "", None, False, 0.0, "11qk", "", ()),
        ("", "", None, False, 0.0, "", "mixed", ())]


def test_the_masks_grid_has_the_causal_call_and_each_kind_of_mask_at_both_lengths():
    cells = [cell.case for cell in grid_cells(["masks"])]
    assert {(case.hq, case.hk, case.sk, case.d, case.layout) for case in cells} == {
        (16, 16, s, 128, "bshd") for s in (4096, 8192)}
    for b, s, own in ((4, 4096, cells[:5]), (2, 8192, cells[5:])):
        near = causal() & window(s // 4 - 1, 0) & sink_tokens(4)
        assert [(case.b, case.sq, case.mask, case.mask_tensor) for case in own] == [
            (b, s, mask, "") for mask in (causal(), prefix(s // 4), causal() & chunk(s // 4), near)] + [
            (b, s, causal(), "11qk")]


def test_the_packed_grid_holds_32k_tokens_in_16_documents_of_mixed_lengths():
    cells = grid_cells(["packed"])
    assert [(cell.case.hq, cell.case.hk, cell.case.d, cell.case.mask) for cell in cells] == [
        (hq, hk, d, mask) for hq, hk, d in ((16, 16, 128), (32, 8, 128), (32, 32, 64))
        for mask in (FULL, causal("top_left"))]
    assert {(cell.case.b, cell.case.stored("q"), cell.case.stored("k"), cell.case.packed, cell.case.layout, cell.dtype)
            for cell in cells} == {(16, (1, 32768), (1, 32768), "tight", "bshd", torch.bfloat16)}
    (lengths,) = {cell.case.lengths_q for cell in cells}
    assert (len(set(lengths)), min(lengths), max(lengths)) == (16, 166, 7348)
    assert all(cell.case.lengths_k == lengths and cell.case.sq == cell.case.sk == 7348 for cell in cells)


def test_a_packed_cell_describes_the_problem_that_its_tensors_make():
    case = packed_case((4, 2), (9, 0, 5), 8, causal("top_left"))
    q, k, v, _, _ = make_inputs(case, torch.bfloat16, "cpu")
    operands = make_operands(case, torch.bfloat16, "cpu")
    assert q.shape == (1, 4, 14, 8)
    assert Cell("packed", case, torch.bfloat16).problem(torch.device("cpu")) == AttentionProblem.from_tensors(
        q, k, v, operands, mask=case.mask, settings=case.settings)


@pytest.mark.parametrize("case", packed_kv_cases(3, 4, 12, 8), ids=str)
def test_a_cell_of_packed_kv_describes_the_problem_that_its_views_make(case):
    q, k, v, _, _ = make_inputs(case, torch.bfloat16, "cpu")
    operands = make_operands(case, torch.bfloat16, "cpu")
    assert k.stride() == v.stride()
    assert case.packed or v.data_ptr() - k.data_ptr() == 4 * 8 * 2
    assert Cell("packed-kv", case, torch.bfloat16).problem(torch.device("cpu")) == AttentionProblem.from_tensors(
        q, k, v, operands, mask=case.mask, settings=case.settings)


def test_the_packed_kv_grid_has_each_shape_with_all_keys_with_lengths_and_packed():
    cells = [cell.case for cell in grid_cells(["packed-kv"])]
    assert [(case.b, case.sq, case.d) for case in cells[::3]] == [
        (b, s, d) for d in (64, 128) for s in (512, 1024, 2048, 4096) for b in (1, 2, 4, 6)]
    for plain, padded, packed in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        assert [case.layout for case in (plain, padded, packed)] == ["packed_kv", "packed_kv", "bshd"]
        assert (plain.has_lengths, padded.is_padded, packed.packed) == (False, True, "tight")
        assert padded.lengths_k == packed.lengths_k
        assert packed.lengths_q == (plain.sq,) * plain.b
        assert padded.lengths_k[0] == plain.sk
        assert min(padded.lengths_k) > plain.sk // 2


def test_unknown_names_raise_and_list_what_is_allowed():
    with pytest.raises(InvalidInput, match=r"'nope'.*paper"):
        grid_cells(["nope"])
    with pytest.raises(InvalidInput, match=r"'half'.*float16"):
        parse_dtype("half")
