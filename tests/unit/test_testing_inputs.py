import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.testing.cases import CASES, case_named
from tilewise.testing.inputs import lay_out, make_inputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_and_dtypes_are_those_of_the_case(case):
    inputs = make_inputs(case, torch.float16, "cpu")
    assert inputs.q.shape == (case.b, case.hq, case.sq, case.d)
    assert inputs.k.shape == (case.b, case.hk, case.sk, case.d)
    assert inputs.v.shape == (case.b, case.hk, case.sk, case.dv)
    assert inputs.dout.shape == (case.b, case.hq, case.sq, case.dv)
    assert inputs.dlse.shape == (case.b, case.hq, case.sq)
    assert [t.dtype for t in inputs] == [torch.float16] * 4 + [torch.float32]
    assert all(t.isfinite().all() for t in inputs)


def test_seed_decides_the_values_and_global_state_is_left_alone():
    case = case_named("mha")
    before = torch.get_rng_state()
    first, again, other = (make_inputs(case, torch.float32, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_float64_inputs_have_a_float64_lse_gradient():
    assert make_inputs(case_named("gqa"), torch.float64, "cpu").dlse.dtype is torch.float64


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bhds", "moat"])
def test_lay_out_changes_strides_and_never_values(layout):
    values = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    laid = lay_out(values, layout)
    assert torch.equal(laid, values)
    assert laid.stride() == {"bhsd": (105, 35, 7, 1), "bshd": (105, 7, 21, 1), "bhds": (105, 35, 1, 5),
                             "moat": (315, 63, 9, 1)}[layout]


def test_lay_out_refuses_a_layout_that_ties_tensors_together():
    with pytest.raises(InvalidInput, match="packed_kv"):
        lay_out(torch.zeros(1, 1, 1, 1), "packed_kv")


def test_moat_surrounds_every_tensor_with_nan():
    for tensor in make_inputs(case_named("moat_window"), torch.float32, "cpu"):
        whole = torch.as_strided(tensor, (tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
        assert int(whole.isfinite().sum()) == tensor.numel()
        assert not whole[0].isfinite()
        assert not whole[-1].isfinite()


def test_packed_views_share_one_storage():
    inputs = make_inputs(case_named("packed_qkv_gqa"), torch.float32, "cpu", requires_grad=True)
    assert len({t.untyped_storage().data_ptr() for t in inputs[:3]}) == 1
    assert len({t.data_ptr() for t in inputs[:3]}) == 3
    kv = make_inputs(case_named("packed_kv"), torch.float32, "cpu")
    assert kv.k.untyped_storage().data_ptr() == kv.v.untyped_storage().data_ptr() != kv.q.untyped_storage().data_ptr()


def test_expanded_has_stride_zero_over_batch_and_heads():
    inputs = make_inputs(case_named("expanded_heads_and_batch"), torch.float32, "cpu")
    assert (inputs.q.stride(0), inputs.k.stride(1), inputs.v.stride(1), inputs.dout.stride(0)) == (0, 0, 0, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_requires_grad_makes_leaves_of_q_k_v_alone(case):
    inputs = make_inputs(case, torch.float32, "cpu", requires_grad=True)
    assert [t.requires_grad for t in inputs] == [True, True, True, False, False]
    assert all(t.is_leaf for t in inputs)
