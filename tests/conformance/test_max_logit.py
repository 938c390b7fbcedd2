"""max_logit: the largest visible score of a row, as it enters the softmax, the sink not counted."""

import pytest
import torch

from conformance.calls import operands_of, problem_of, skip_if_refused, stored, visible_of
from tilewise.testing.cases import case_named
from tilewise.testing.inputs import call, make_inputs
from tilewise.testing.oracle import Changes, max_logit, yardsticks
from tilewise.testing.tolerance import OUTPUT_FACTOR, assert_within_budget

NAMES = ("gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "window_both_sides", "no_keys", "no_queries",
         "softcap_near_its_bound_gqa", "alibi_of_batches_gqa", "sinks_blind_queries", "mask_tensor",
         "everything", "everything_moat_blind_queries", "documents", "sink_tokens_top_left_more_queries",
         "padded_sinks_blind_queries_gqa", "packed_causal_bottom_right_gaps", "packed_everything", "packed_nothing")


def _call(backend, case, inputs, operands, *names):
    skip_if_refused(backend, problem_of(case, inputs, operands, max_logit=True))
    return call(case, inputs[:3], operands, backend=backend.name, return_aux=names)


@pytest.mark.parametrize("name", NAMES)
def test_max_logit_is_the_largest_visible_score(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    got = _call(backend, case, inputs, operands, "lse", "max_logit").max_logit
    changes = Changes(operands, case.settings._replace(max_logit=True))
    samples = yardsticks(*inputs, case.mask, case.scale, changes)
    assert_within_budget("max_logit", got, max_logit(*inputs[:2], case.mask, case.scale, changes),
                         [sample.max_logit for sample in samples], OUTPUT_FACTOR)
    assert got.dtype is torch.float32
    assert got.is_contiguous()
    assert torch.equal(got.isneginf(), ~stored(case, visible_of(case, device).any(-1), "q"))


@pytest.mark.parametrize("name", ["everything", "gqa_causal_odd_lengths"])
def test_max_logit_changes_no_bit_of_the_rest_and_has_no_gradient(backend, name, device, main_dtype):
    """Of calls below 512 keys, with which gluon freezes no maximum."""
    case = case_named(name)
    assert case.sk < 512
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    skip_if_refused(backend, problem_of(case, inputs, operands, max_logit=True).backward(lse_grad=False))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    plain = _call(backend, case, leaves, operands, "lse")
    more = _call(backend, case, leaves, operands, "max_logit")
    assert more._fields == ("out", "lse", "max_logit")
    assert torch.equal(plain.out, more.out)
    assert torch.equal(plain.lse, more.lse)
    assert not more.max_logit.requires_grad
    for first, second in zip(torch.autograd.grad(plain.out, leaves, inputs.dout),
                             torch.autograd.grad(more.out, leaves, inputs.dout), strict=True):
        assert torch.equal(first, second)
