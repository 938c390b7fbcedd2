import pytest
from hypothesis import Phase, find, given, settings

from conformance.option_levels import OPTIONS
from tilewise.masks import ALIGNMENTS, Mask
from tilewise.problem import AttentionProblem
from tilewise.testing.configurations import make_call
from tilewise.testing.strategies import configurations, masks, plain_configurations, spans

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


@given(configurations() | plain_configurations())
def test_configurations_are_tiny_and_make_calls(configuration):
    case, call = configuration.case, make_call(configuration, "cpu")
    AttentionProblem.from_tensors(*call.inputs[:3], call.operands, mask=case.mask, settings=case.settings)
    assert max(case.sq, case.sk) <= 40
    assert max(case.d, case.dv) <= 24
    assert case.hq % case.hk == 0


@given(plain_configurations())
def test_plain_configurations_have_no_options(configuration):
    assert not configuration.case.has_options
    assert not configuration.case.max_logit


@pytest.mark.parametrize("option", ["bias", "mask_tensor", "alibi", "sinks", "softcap", "dropout_p", "max_logit",
                                    "documents", "packed", "lengths_q"])
def test_configurations_reach_every_option_and_its_absence(option):
    for wanted in (True, False):
        found = find(configurations(), lambda one, wanted=wanted: bool(getattr(one.case, option)) is wanted,
                     settings=_FIRST)
        assert bool(getattr(found.case, option)) is wanted


def test_what_is_found_is_shrunk_to_a_call_without_what_it_does_not_need():
    """The draws put what is plain first, which is where hypothesis shrinks a choice to."""
    found = find(configurations(), lambda one: one.case.sinks and one.case.sk > 2)
    case = found.case
    assert case.sinks
    assert case.sk == 3
    assert (case.b, case.hq, case.hk, case.layout) == (1, 1, 1, "bhsd")
    others = [option for option in OPTIONS if option != "sinks" and getattr(case, option)]
    assert others == []
    assert not case.has_lengths
    assert str(case.mask) == str(Mask())
    assert (found.placement, found.shift, found.lse_grad) == ("as_laid_out", 0.0, False)
