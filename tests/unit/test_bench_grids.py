"""Named grids of problems."""

import pytest
import torch

from tilewise.bench.grids import GRIDS, Cell, filtered, grid_cells, parse_dtype, shape_case
from tilewise.errors import InvalidInput
from tilewise.masks import causal
from tilewise.problem import AttentionProblem
from tilewise.testing.inputs import make_inputs


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


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_cell_describes_the_problem_that_its_tensors_make(layout):
    cell = Cell("flags", shape_case(2, (4, 2), (9, 17), (8, 6), causal("top_left"), layout), torch.float32)
    q, k, v, _, _ = make_inputs(cell.case, cell.dtype, "cpu")
    assert cell.problem(torch.device("cpu")) == AttentionProblem.from_tensors(q, k, v, mask=cell.case.mask)


def test_unknown_names_raise_and_list_what_is_allowed():
    with pytest.raises(InvalidInput, match=r"'nope'.*paper"):
        grid_cells(["nope"])
    with pytest.raises(InvalidInput, match=r"'half'.*float16"):
        parse_dtype("half")
