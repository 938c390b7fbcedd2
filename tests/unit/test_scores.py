"""What changes a score: every message of its checks, how it prints, and what it makes of a problem."""

import math

import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import (
    NO_OPERANDS,
    NO_OPTIONS,
    NO_SETTINGS,
    Operands,
    OperandSpec,
    ScoreOptions,
    ScoreSettings,
)
from tilewise.validate.tensors import with_batch_dim, with_four_dims

_TOP_LEFT = window(None, None, "top_left")
_SEED = torch.tensor([1])


def _problem(operands=NO_OPERANDS, settings=NO_SETTINGS, *, mask=_TOP_LEFT, dtype=torch.float32):
    """The problem of a call with b=2, hq=4, hk=2, sq=6, sk=5."""
    q, k = torch.zeros(2, 4, 6, 8, dtype=dtype), torch.zeros(2, 2, 5, 8, dtype=dtype)
    return AttentionProblem.from_tensors(q, k, k, operands, mask=mask, settings=settings)


def _message(operands=NO_OPERANDS, settings=NO_SETTINGS, **options):
    with pytest.raises(InvalidInput) as caught:
        _problem(operands, settings, **options)
    return str(caught.value)


def _hides(*shape):
    return torch.zeros(shape, dtype=torch.bool)


@pytest.mark.parametrize(("name", "tensor", "allowed"), [
    ("bias", torch.zeros(3, 4, 6, 5), "(b=2, hq=4, sq=6, sk=5), or 1 in place of a size."),
    ("bias", torch.zeros(1, 1, 5, 6), "(b=2, hq=4, sq=6, sk=5), or 1 in place of a size."),
    ("bias", torch.zeros(6, 5), "(b=2, hq=4, sq=6, sk=5), or 1 in place of a size."),
    ("mask", _hides(1, 2, 6, 5), "(b=2, hq=4, sq=6, sk=5), or 1 in place of a size."),
    ("alibi_slopes", torch.zeros(1, 2), "(b=2, hq=4)"),
    ("alibi_slopes", torch.zeros(4), "(b=2, hq=4)"),
    ("sinks", torch.zeros(2), "(hq=4)"),
    ("sinks", torch.zeros(1, 4), "(hq=4)"),
], ids=str)
def test_shape_that_does_not_fit_is_named_beside_the_one_that_does(name, tensor, allowed):
    message = _message(Operands(**{name: tensor}))
    assert message.startswith(f"{name} has shape {tuple(tensor.shape)}; allowed is {allowed}")


def test_seed_has_one_element():
    message = _message(Operands(seed=torch.tensor([1, 2])), ScoreSettings(dropout_p=0.5))
    assert "dropout_seed has shape (2,); allowed is (1)." in message


@pytest.mark.parametrize(("name", "tensor", "dtype", "allowed"), [
    ("bias", torch.zeros(1, 1, 6, 5).double(), torch.float32, "torch.float32"),
    ("bias", torch.zeros(1, 1, 6, 5).half(), torch.bfloat16, "torch.bfloat16, torch.float32"),
    ("alibi_slopes", torch.zeros(1, 4).half(), torch.float16, "torch.float32"),
    ("alibi_slopes", torch.zeros(1, 4), torch.float64, "torch.float64"),
    ("sinks", torch.zeros(4).half(), torch.bfloat16, "torch.bfloat16, torch.float32"),
], ids=str)
def test_dtype_that_is_not_taken_is_named_beside_those_that_are(name, tensor, dtype, allowed):
    assert _message(Operands(**{name: tensor}), dtype=dtype) == (
        f"{name} has dtype {tensor.dtype}; allowed {'are' if ',' in allowed else 'is'} {allowed}.")


def test_seed_is_an_integer_of_64_bits():
    message = _message(Operands(seed=torch.tensor([1.0])), ScoreSettings(dropout_p=0.5))
    assert "seed has dtype torch.float32; allowed is torch.int64." in message


@pytest.mark.parametrize(("name", "tensor"), [
    ("bias", torch.zeros(1, 1, 6, 5)), ("mask", _hides(1, 1, 6, 5)), ("alibi_slopes", torch.zeros(1, 4)),
    ("sinks", torch.zeros(4)), ("seed", _SEED),
], ids=lambda value: value if isinstance(value, str) else "")
def test_operand_on_another_device_is_named(name, tensor):
    message = _message(Operands(**{name: tensor.to("meta")}), ScoreSettings(dropout_p=0.5 if name == "seed" else 0.0))
    assert message.endswith(f"{name} is on meta and q is on cpu: move them to one device.")


@pytest.mark.parametrize("softcap", [0.0, 1e-46, 2.0**-127, 1e39, -1.0, math.inf, math.nan, True, "30",
                                     torch.tensor(30.0)])
def test_softcap_that_is_no_positive_number_raises(softcap):
    assert _message(settings=ScoreSettings(softcap=softcap)) == (
        f"softcap is {softcap!r}; allowed is a number from 2^-126 to 2^127, or None for none.")


@pytest.mark.parametrize("dropout_p", [1.0, -0.1, math.nan, True, "0.5", None, torch.tensor(0.5)])
def test_dropout_p_that_is_no_probability_below_one_raises(dropout_p):
    assert _message(Operands(seed=_SEED), ScoreSettings(dropout_p=dropout_p)) == (
        f"dropout_p is {dropout_p!r}; allowed is a probability, 0 <= dropout_p < 1.")


def test_dropout_needs_a_seed_and_a_seed_needs_dropout():
    assert _message(settings=ScoreSettings(dropout_p=0.25)) == (
        "dropout_p is 0.25 and a seed is missing: dropout needs both.")
    assert _message(Operands(seed=_SEED)) == "dropout_p is 0.0 and a seed is given: dropout needs both."


def test_alibi_with_unequal_lengths_needs_an_alignment():
    message = _message(Operands(alibi_slopes=torch.zeros(1, 4)), mask=Mask())
    assert message == (
        "alibi_slopes are given with 6 queries and 5 keys and no alignment: the distance of a query and a key is "
        "ambiguous. Pass mask=window(None, None, alignment) or another mask with alignment='top_left' or "
        "'bottom_right'.")
    assert "q has 6 positions and k has 5" in _message(Operands(alibi_slopes=torch.zeros(1, 4)), mask=causal())
    assert _problem(mask=Mask()).scores == NO_OPTIONS, "without slopes such lengths need none"


@pytest.mark.parametrize(("tensor", "got"), [
    (torch.zeros(5), "a tensor of shape (5,)"), (torch.zeros(1, 1, 1, 6, 5), "a tensor of shape (1, 1, 1, 6, 5)"),
    ([0.0], "a list"), (0.5, "a float"),
], ids=str)
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_bias_and_mask_have_two_to_four_dims(name, tensor, got):
    with pytest.raises(InvalidInput) as caught:
        with_four_dims(name, tensor)
    assert str(caught.value) == (
        f"{name} is {got}; allowed is a tensor of 2 to 4 dims that broadcasts to (b, hq, sq, sk).")


@pytest.mark.parametrize(("slopes", "got"), [(torch.zeros(1, 1, 4), "a tensor of shape (1, 1, 4)"), (0.5, "a float"),
                                             (torch.tensor(0.5), "a tensor of shape ()")], ids=str)
def test_slopes_have_one_or_two_dims(slopes, got):
    with pytest.raises(InvalidInput) as caught:
        with_batch_dim(slopes)
    assert str(caught.value) == f"alibi_slopes is {got}; allowed is a tensor of shape (hq,) or (b, hq)."


def test_missing_dims_are_added_at_the_front_without_a_copy():
    for shape, whole in (((6, 5), (1, 1, 6, 5)), ((4, 6, 5), (1, 4, 6, 5)), ((2, 1, 1, 5), (2, 1, 1, 5))):
        bias = torch.zeros(shape)
        view = with_four_dims("bias", bias)
        assert (view.shape, view.data_ptr()) == (whole, bias.data_ptr())
    assert with_batch_dim(torch.zeros(4)).shape == (1, 4)
    assert with_batch_dim(torch.zeros(2, 4)).shape == (2, 4)


def test_a_problem_without_options_is_the_plain_one():
    assert _problem().scores is NO_OPTIONS
    assert not NO_OPTIONS.changes_scores
    assert str(NO_OPTIONS) == ""


def test_options_hold_the_specs_of_their_operands():
    bias = torch.zeros(2, 1, 5, 6).transpose(2, 3)
    problem = _problem(Operands(bias=bias, sinks=torch.zeros(4)), ScoreSettings(2, 0.0, True))
    assert problem.scores == ScoreOptions(
        softcap=2.0, max_logit=True, bias=OperandSpec((2, 1, 6, 5), (30, 30, 1, 6), torch.float32),
        sinks=OperandSpec((4,), (1,), torch.float32))
    assert problem != _problem(Operands(bias=bias.contiguous(), sinks=torch.zeros(4)), ScoreSettings(2, 0.0, True))
    assert problem.backward(lse_grad=False).scores == problem.scores


@pytest.mark.parametrize(("shape", "strides", "dtype", "vector"), [
    ((2, 4, 6, 8), (192, 48, 8, 1), torch.bfloat16, 8), ((2, 4, 6, 4), (96, 24, 4, 1), torch.float32, 4),
    ((2, 4, 6, 4), (96, 24, 4, 1), torch.bfloat16, 1), ((2, 4, 6, 8), (192, 48, 9, 1), torch.bfloat16, 1),
    ((1, 1, 6, 8), (3, 5, 8, 1), torch.bfloat16, 8), ((2, 4, 6, 8), (0, 48, 8, 1), torch.bfloat16, 8),
    ((2, 4, 8, 8), (256, 64, 1, 8), torch.bfloat16, 1), ((1, 1, 1, 6), (6, 6, 6, 1), torch.float32, 1),
])
def test_rows_may_be_cut_into_16_bytes_where_all_begin_and_end_at_such(shape, strides, dtype, vector):
    assert OperandSpec(shape, strides, dtype).vector == vector


def test_expanded_strides_are_zero_along_what_is_broadcast():
    facts = OperandSpec((2, 1, 6, 1), (6, 6, 1, 1), torch.float32)
    assert facts.expanded((2, 4, 6, 5)) == (6, 0, 1, 0)
    assert facts.expanded((2, 1, 6, 1)) == (6, 6, 1, 1)


@pytest.mark.parametrize(("operands", "settings", "changes"), [
    (Operands(bias=torch.zeros(1, 1, 6, 5)), NO_SETTINGS, True),
    (Operands(alibi_slopes=torch.zeros(1, 4)), NO_SETTINGS, True),
    (NO_OPERANDS, ScoreSettings(softcap=1.0), True),
    (Operands(mask=_hides(1, 1, 6, 5)), NO_SETTINGS, False),
    (Operands(sinks=torch.zeros(4)), NO_SETTINGS, False),
    (Operands(seed=_SEED), ScoreSettings(dropout_p=0.5), False),
    (NO_OPERANDS, ScoreSettings(max_logit=True), False),
])
def test_only_softcap_bias_and_slopes_change_a_score(operands, settings, changes):
    assert _problem(operands, settings).scores.changes_scores == changes


def test_options_print_in_the_order_in_which_they_act_on_a_score():
    operands = Operands(torch.zeros(1, 4, 6, 5), torch.zeros(1, 4), _hides(2, 1, 1, 5), torch.zeros(4), _SEED)
    problem = _problem(operands, ScoreSettings(30, 0.1), mask=causal("top_left"))
    assert str(problem.scores) == "softcap 30, bias 1x4x6x5, mask 2x1x1x5, alibi, sinks, dropout 0.1"
    assert str(problem) == (
        "forward b2 h4/2 s6x5 d8 float32 causal(alignment='top_left'), softcap 30, bias 1x4x6x5, mask 2x1x1x5, alibi, "
        "sinks, dropout 0.1 on cpu")
