import pytest
import torch
from hypothesis import Phase, find, given, settings

from tilewise.masks import ALIGNMENTS
from tilewise.problem import AttentionProblem
from tilewise.testing.inputs import make_inputs, make_operands
from tilewise.testing.strategies import masks, small_cases, small_cases_with_options, spans

_FIRST = settings(phases=[Phase.generate])  # the first that is found, and not the least


@given(spans(17))
def test_spans_stay_inside(span):
    assert 0 <= span.start <= span.stop <= 17


@given(masks())
def test_masks_fit_any_lengths(mask):
    assert mask.visible(3, 5).shape == (3, 5)


def test_masks_reach_both_alignments_and_every_kind():
    for alignment in ALIGNMENTS:
        found = find(masks(), lambda m, wanted=alignment: m.alignment == wanted and m.left and m.right)
        assert found.alignment == alignment
        found = find(masks(), lambda m, wanted=alignment: m.alignment == wanted and m.right == 0 and m.left is None)
        assert found.alignment == alignment
    assert find(masks(), lambda m: not m.is_bounded).left is None
    for exception in ("prefix", "sink_tokens", "chunk"):
        found = find(masks(), lambda m, wanted=exception: getattr(m, wanted) is not None)
        assert found.has_exceptions


@given(small_cases() | small_cases_with_options())
def test_small_cases_make_inputs(case):
    inputs, operands = (make(case, torch.float32, "cpu") for make in (make_inputs, make_operands))
    AttentionProblem.from_tensors(*inputs[:3], operands, mask=case.mask, settings=case.settings)
    assert max(case.sq, case.sk) <= 40
    assert inputs.q.shape[1] % inputs.k.shape[1] == 0


@pytest.mark.parametrize("option", ["bias", "mask_tensor", "alibi", "sinks", "softcap", "dropout_p",
                                    "documents", "packed", "lengths_q"])
def test_small_cases_reach_every_option_and_its_absence(option):
    for wanted in (True, False):
        case = find(small_cases_with_options(), lambda case, wanted=wanted: bool(getattr(case, option)) is wanted,
                    settings=_FIRST)
        assert bool(getattr(case, option)) is wanted
