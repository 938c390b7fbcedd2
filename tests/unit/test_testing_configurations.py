"""Random configurations: one seed is one configuration, and together they reach everything."""

import itertools
import random
from typing import get_args

import pytest
import torch

from conformance.option_levels import EXCEPTIONS, OPTIONS, contradict, levels
from tilewise.errors import InvalidInput
from tilewise.problem import TAIL_WIDTH, WIDEST
from tilewise.testing.cases import Layout
from tilewise.testing.configurations import SEEDS, Placement, draw, make_call
from tilewise.testing.oracle import Changes, attend

DRAWN = {size: [draw(seed, size) for seed in range(1000)] for size in ("small", "large")}


def test_a_seed_means_the_same_call_on_every_machine():
    """A command that reproduces a failure would otherwise reproduce another call elsewhere."""
    case = draw(1237, "large").case
    assert (case.b, case.hq, case.hk, case.sq, case.sk, case.d, case.dv) == (2, 1, 1, 65, 344, 169, 169)
    assert (str(case.mask), case.layout, case.bias) == ("window(11, 894, alignment='bottom_right')", "bshd", "")
    assert (case.lengths_q, case.lengths_k, case.packed, case.documents) == ((60, 65), (77, 344), "gaps", "")
    assert draw(1241, "large").case.bias == "1hq1"
    assert draw(1243, "large").case.documents == "interleaved"


def test_a_variation_has_its_seed_s_options_and_sizes_of_its_own():
    for seed in range(40):
        own = DRAWN["large"][seed]
        assert draw(seed, "large", 0) == own
        others = [draw(seed, "large", variation) for variation in range(1, 9)]
        assert len({(one.case.b, one.case.sq, one.case.sk) for one in others}) > 1
        assert len({one.case.name for one in (own, *others)}) == 9
        for other in others:
            assert (other.seed, other.dtype, other.lse_grad) == (seed, own.dtype, own.lse_grad)
            assert all(getattr(other.case, option) == getattr(own.case, option) for option in OPTIONS)
            assert (other.case.hq, other.case.hk, other.case.packed) == (own.case.hq, own.case.hk, own.case.packed)


def test_a_seed_depends_on_no_other_draw_and_disturbs_none():
    random.seed(3)
    state = random.getstate()
    assert draw(41) == DRAWN["small"][41]
    assert random.getstate() == state
    assert len({str(configuration) for configuration in DRAWN["small"]}) == 1000


@pytest.mark.parametrize(("arguments", "message"), [
    ((-1,), "seed is -1; allowed are 0 to 2147483647"),
    ((SEEDS,), "seed is 2147483648; allowed are"),
    ((0, "huge"), r"size is 'huge'; allowed are \('tiny', 'small', 'large'\)"),
    ((0, "small", -1), "variation is -1; allowed are integers from 0"),
])
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        draw(*arguments)


@pytest.mark.parametrize("size", DRAWN)
def test_every_two_levels_of_every_two_dimensions_meet_in_a_thousand_seeds(size):
    drawn = [levels(configuration) for configuration in DRAWN[size]]
    met = set().union(*(itertools.combinations(one.items(), 2) for one in drawn))
    values = {name: {one[name] for one in drawn} for name in drawn[0]}
    assert min(map(len, values.values())) >= 2
    missing = {(left, right) for one, other in itertools.combinations(values, 2)
               for left, right in itertools.product(((one, value) for value in values[one]),
                                                    ((other, value) for value in values[other]))} - met
    assert {pair for pair in missing if not contradict(*pair)} == set()


@pytest.mark.parametrize("size", DRAWN)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_there_in_about_a_third(size, option):
    share = sum(bool(getattr(configuration.case, option)) for configuration in DRAWN[size]) / len(DRAWN[size])
    assert 0.25 < share < 0.42


@pytest.mark.parametrize(("size", "longest", "least"), [("small", 150, 120), ("large", 2048, 1800)])
def test_sizes_reach_their_ends_and_stay_inside(size, longest, least):
    cases = [configuration.case for configuration in DRAWN[size]]
    lengths = {length for case in cases for length in (case.sq, case.sk)}
    assert {0, 1} <= lengths
    assert least < max(lengths) <= longest
    assert {(length + 1) % 16 for length in lengths} == set(range(16))
    dims = {dim for case in cases for dim in (case.d, case.dv)}
    assert {1, 256} <= dims
    assert WIDEST < max(dims) <= WIDEST + TAIL_WIDTH
    assert max(case.b * case.hq for case in cases) <= 9
    assert {0, 1, 2, 3} == {case.b for case in cases}


@pytest.mark.parametrize("size", DRAWN)
def test_every_dtype_placement_and_shift_is_drawn(size):
    assert {one.dtype for one in DRAWN[size]} == {torch.float32, torch.float16, torch.bfloat16}
    assert {one.placement for one in DRAWN[size]} == (
        set(get_args(Placement)) if size == "large" else {"as_laid_out", "meaningless_strides"})
    assert {-1000.0, -100.0, 0.0, 1000.0} <= {one.shift for one in DRAWN[size]}
    assert {one.lse_grad for one in DRAWN[size]} == {True, False}


def test_every_layout_mask_and_broadcast_is_drawn():
    cases = [configuration.case for configuration in DRAWN["small"]]
    assert {case.layout for case in cases} == set(get_args(Layout))
    sides = {(case.mask.left is None, case.mask.right if case.mask.right in (None, 0) else "some") for case in cases}
    assert sides == set(itertools.product((True, False), (None, 0, "some")))
    assert len({case.bias for case in cases}) == len({case.mask_tensor for case in cases}) == 17
    for name in EXCEPTIONS:
        values = {getattr(case.mask, name) for case in cases}
        assert {None, 1 if name == "chunk" else 0} <= values
        assert len(values) > 30


@pytest.mark.parametrize("size", DRAWN)
def test_lengths_are_data_in_half_of_all_and_reach_their_ends(size):
    cases = [configuration.case for configuration in DRAWN[size]]
    with_lengths = [case for case in cases if case.has_lengths]
    assert 0.4 < len(with_lengths) / len(cases) < 0.6
    drawn = [(length, most) for case in with_lengths for lengths, most in (
        (case.lengths_q, case.sq), (case.lengths_k, case.sk)) for length in lengths or () if most > 1]
    for share in (sum(length == 0 for length, _ in drawn), sum(length == most for length, most in drawn)):
        assert 0.1 < share / len(drawn) < 0.25
    assert any(case.lengths_q == case.lengths_k and case.b > 1 and len(set(case.lengths_q)) > 1
               for case in with_lengths if case.lengths_q)


def first(fits, size="small"):
    return next(one for one in DRAWN[size] if one.case.b * one.case.sq * one.case.sk and fits(one))


def test_what_the_backend_gets_are_leaves_and_the_oracle_gets_the_same_numbers_without_nan():
    def fits(configuration):
        case = configuration.case
        hides = not case.mask.visible(case.sq, case.sk).any(0).all()
        return case.bias and case.sinks and case.alibi and hides and not case.has_lengths

    one = first(fits)
    call = make_call(one, "cpu")
    given, clean = (*call.inputs, *call.operands.alone), (*call.clean_inputs, *call.clean_operands.alone)
    assert any(tensor.isnan().any() for tensor in given if tensor is not None)
    for tensor, truth in zip(given, clean, strict=True):
        assert (tensor is None) == (truth is None)
        if tensor is not None:
            assert truth.dtype is tensor.dtype
            assert not truth.isnan().any()
            assert torch.equal(torch.where(tensor.isnan(), truth, tensor), truth)
    names = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    assert [name for part in (call.inputs, call.operands) for name, tensor in part._asdict().items()
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad] == list(names)
    again = make_call(one, "cpu")
    assert torch.equal(again.clean_inputs.v, call.clean_inputs.v)


@pytest.mark.parametrize("layout", ["moat", "expanded", "packed_qkv"])
def test_nan_is_planted_without_a_change_of_layout(layout):
    call = make_call(first(lambda c: c.case.layout == layout and c.placement == "as_laid_out"), "cpu")
    for tensor, laid_out in zip(call.inputs, call.clean_inputs, strict=True):
        assert tensor.stride() == laid_out.stride()


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 900), (torch.bfloat16, 900), (torch.float16, 300)])
@pytest.mark.parametrize("towards", [-1, 1])
def test_scores_are_moved_past_where_float32_exponentials_end(dtype, least, towards):
    def fits(configuration):
        case = configuration.case
        plain = not (case.softcap or case.alibi or case.bias or case.sinks or case.has_lengths)
        sees = case.mask.visible(case.sq, case.sk).any()
        return plain and sees and configuration.dtype is dtype and configuration.shift * towards > least

    one = first(fits)
    call = make_call(one, "cpu")
    case, changes = one.case, Changes(call.clean_operands, one.case.settings)
    lse = attend(*call.clean_inputs[:3], case.mask, case.scale, changes)[1]
    seeing = lse[lse.isfinite()]
    assert ((seeing * towards).min() > 88.8) if towards > 0 else (seeing.max() < -88.8)
    q, k = call.clean_inputs[:2]
    assert (q @ k.repeat_interleave(case.hq // case.hk, 1).mT).isfinite().all()


def test_scores_under_a_softcap_are_moved_to_where_it_bends():
    moved = {abs(one.shift) / one.case.softcap for one in DRAWN["small"]
             if one.shift and one.case.softcap and one.dtype is torch.float32}
    assert moved
    assert all(factor == pytest.approx(1.5) for factor in moved)


def test_placements_reach_the_tensors():
    one = first(lambda c: c.placement == "meaningless_strides" and c.case.hk == 1)
    assert make_call(one, "cpu").inputs.k.stride(1) == 1_000_003
    one = first(lambda c: c.placement == "far_batch" and c.case.b > 1 and c.dtype is not torch.float32, "large")
    call = make_call(one, "cpu")
    assert (one.case.b - 1) * call.inputs.q.stride(0) >= 2**31


def test_its_text_can_be_pasted_as_a_case():
    one = first(lambda c: c.shift and c.lse_grad and c.placement != "as_laid_out")
    assert str(one).startswith(f"Case(name='small_{one.seed}', b=")
    assert f"out and lse differentiated, every score moved by {one.shift:.4g}, {one.placement}" in str(one)
