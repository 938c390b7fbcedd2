import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.masks import TensorMask, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS
from tilewise.testing.cases import CASES, Case, case_named
from tilewise.testing.inputs import (
    HOSTILE_NUMBERS,
    Numbers,
    call,
    call_options,
    lay_out,
    make_inputs,
    make_operands,
    padding_of,
    with_numbers,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_and_dtypes_are_those_of_the_case(case):
    inputs = make_inputs(case, torch.float16, "cpu")
    (b, sq), (_, sk) = case.stored("q"), case.stored("k")
    assert inputs.q.shape == (b, case.hq, sq, case.d)
    assert inputs.k.shape == (b, case.hk, sk, case.d)
    assert inputs.v.shape == (b, case.hk, sk, case.dv)
    assert inputs.dout.shape == (b, case.hq, sq, case.dv)
    assert inputs.dlse.shape == (b, case.hq, sq)
    assert [t.dtype for t in inputs] == [torch.float16] * 4 + [torch.float32]
    for tensor, side in zip(inputs, "qkkqq", strict=True):
        padding = padding_of(case, side, "cpu")
        assert tensor.transpose(1, 2)[~padding].isfinite().all()
        assert tensor.transpose(1, 2)[padding].isfinite().all() != (case.layout == "moat" and padding.any())
    assert padding_of(case, "q", "cpu").sum() == b * sq - sum(len(span) for span in case.spans("q"))


def test_seed_decides_the_values_and_global_state_is_left_alone():
    case = case_named("mha")
    before = torch.get_rng_state()
    first, again, other = (make_inputs(case, torch.float32, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_float64_inputs_have_a_float64_lse_gradient():
    assert make_inputs(case_named("gqa"), torch.float64, "cpu").dlse.dtype is torch.float64


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bhds", "moat", "sbhd", "shbd", "hbsd", "hsbd"])
def test_lay_out_changes_strides_and_never_values(layout):
    values = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    laid = lay_out(values, layout)
    assert torch.equal(laid, values)
    assert laid.stride() == {"bhsd": (105, 35, 7, 1), "bshd": (105, 7, 21, 1), "bhds": (105, 35, 1, 5),
                             "moat": (315, 63, 9, 1), "sbhd": (21, 7, 42, 1), "shbd": (7, 14, 42, 1),
                             "hbsd": (35, 70, 7, 1), "hsbd": (7, 70, 14, 1)}[layout]


def test_lay_out_refuses_a_layout_that_ties_tensors_together():
    with pytest.raises(InvalidInput, match=r"layout is 'packed_kv'; allowed are 'moat' and the orders of dims: 'bhsd'"):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operands_are_what_the_case_says_and_a_problem_takes_them(case, dtype):
    inputs, operands = (make(case, dtype, "cpu") for make in (make_inputs, make_operands))
    problem = AttentionProblem.from_tensors(*inputs[:3], operands, mask=case.mask, settings=case.settings)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    own = wide if case.operand_dtype == "float32" else dtype
    sizes = {"b": case.b, "h": case.hq, "q": case.sq, "k": case.sk, "1": 1}
    assert (operands.documents_q is not None) == (operands.documents_k is not None) == bool(case.documents)
    assert problem.sequences.are_data == case.has_lengths
    assert problem.sequences.packed == (case.b if case.packed else None)
    for operand, dims, kind in ((operands.bias, case.bias, own), (operands.mask, case.mask_tensor, torch.bool),
                                (operands.alibi_slopes, case.alibi.rjust(2, "1") if case.alibi else "", wide),
                                (operands.sinks, "h" if case.sinks else "", own),
                                (operands.seed, "1" if case.dropout_p else "", torch.int64)):
        assert (operand is not None) == bool(dims)
        if operand is not None:
            assert operand.shape == tuple(sizes[letter] for letter in dims)
            assert operand.dtype is kind
            assert operand.isfinite().all()
    assert (operands == NO_OPERANDS and problem.scores.softcap is None) == (not case.has_options)


def test_operands_follow_the_seed_and_masks_do_not_follow_the_dtype():
    case = case_named("everything")
    first, again, other, half = (make_operands(case, dtype, "cpu", seed) for dtype, seed in (
        (torch.float32, 1), (torch.float32, 1), (torch.float32, 2), (torch.float16, 1)))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first.alone, again.alone, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.alone, other.alone, strict=True) if a is not None)
    assert torch.equal(first.mask, half.mask)
    assert not torch.equal(first.bias.flatten()[:64], make_inputs(case, torch.float32, "cpu", 1).q.flatten()[:64])


@pytest.mark.parametrize("case", [case for case in CASES if case.has_options and case.layout != "expanded"], ids=str)
def test_operands_on_the_meta_device_are_those_of_the_case_without_storage(case):
    made, drawn = (make_operands(case, torch.float16, device) for device in ("meta", "cpu"))
    for meta, operand in zip(made.alone, drawn.alone, strict=True):
        assert (meta is None) == (operand is None)
        if operand is not None:
            assert meta.is_meta
            assert (meta.shape, meta.stride(), meta.dtype) == (operand.shape, operand.stride(), operand.dtype)


@pytest.mark.parametrize("case", [case for case in CASES if case.mask_tensor], ids=str)
def test_boolean_mask_hides_some_rows_wholly_and_leaves_pairs_of_others(case):
    mask = make_operands(case, torch.float32, "cpu").mask
    rows = mask.any(-1).flatten()
    assert mask.any()
    assert not mask.all()
    assert len(rows) < 4 or not rows.all()


def test_operands_lie_as_hostile_as_the_inputs():
    def made(layout):
        return make_operands(Case("hostile", b=2, hq=2, sq=3, sk=5, mask=window(None, None, "top_left"), bias="bhqk",
                                  mask_tensor="bhqk", alibi="bh", sinks=True, layout=layout), torch.float32, "cpu")

    assert made("bhds").bias.stride() == made("bhds").mask.stride() == (30, 15, 1, 3)
    assert made("expanded").bias.stride(0) == made("expanded").mask.stride(0) == 0
    for layout in ("bhds", "moat"):
        for operand in (made(layout).alibi_slopes, made(layout).sinks):
            assert operand.stride(-1) == 2
            assert torch.as_strided(operand, (2,), (2,), 1).isnan().all()
    moat = made("moat").bias
    assert torch.as_strided(moat, (moat.untyped_storage().size() // 4,), (1,), 0).isfinite().sum() == moat.numel()


def test_requires_grad_makes_leaves_of_bias_slopes_and_sinks_alone():
    operands = make_operands(case_named("everything_expanded"), torch.float32, "cpu", requires_grad=True)
    assert [t.requires_grad for t in operands[:5]] == [True, True, False, True, False]
    assert all(t.is_leaf for t in operands[:5])


def test_call_options_are_those_of_the_case():
    case = case_named("everything")
    operands = make_operands(case, torch.float32, "cpu")
    options = call_options(case, operands)
    assert isinstance(options["mask"], TensorMask)
    assert options["mask"].tensor is operands.mask
    assert options["bias"] is operands.bias
    assert (options["softcap"], options["dropout_p"]) == (case.softcap, case.dropout_p)
    assert options["dropout_seed"] is operands.seed
    plain = case_named("scale_given")
    given = {name: value for name, value in call_options(plain, NO_OPERANDS).items() if value is not None}
    assert given == {"mask": plain.mask, "scale": 0.3, "dropout_p": 0.0}


def _lengths_of(case):
    return [None if tensor is None else (tensor.tolist(), tensor.dtype)
            for tensor in make_operands(case, torch.float32, "cpu")[5:9]]


def test_lengths_are_those_of_the_case_in_both_integer_types():
    lengths = {"b": 2, "lengths_q": (3, 0), "lengths_k": (1, 4), "sq": 4, "sk": 6}
    assert _lengths_of(Case("padded", **lengths)) == [None, None, ([3, 0], torch.int32), ([1, 4], torch.int64)]
    assert _lengths_of(Case("tight", packed="tight", **lengths)) == [
        ([0, 3, 3], torch.int32), ([0, 1, 5], torch.int64), None, None]
    assert _lengths_of(Case("gaps", packed="gaps", **lengths)) == [
        ([0, 5, 8], torch.int32), ([0, 3, 10], torch.int64), ([3, 0], torch.int32), ([1, 4], torch.int64)]
    assert _lengths_of(Case("keys", b=2, lengths_k=(1, 4))) == [None, None, None, ([1, 4], torch.int64)]


def test_documents_lie_as_the_case_says():
    runs, interleaved = (make_operands(Case("documents", b=2, sq=30, sk=20, documents=documents), torch.float32, "cpu")
                         for documents in ("runs", "interleaved"))
    assert runs.documents_q.shape == (2, 4, 30)
    numbers = runs.documents_k[:, 0]
    assert torch.equal(numbers, numbers.sort(-1, descending=True)[0])
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(interleaved.documents_k[0, 0, :6] == interleaved.documents_k[0, 0, 0],
                       torch.tensor([True, False, False] * 2))


def test_mixed_documents_lie_where_the_case_says():
    case = Case("documents", b=2, sq=100, sk=60, documents="mixed")
    operands = make_operands(case, torch.float32, "cpu")
    together = operands.documents_q[:, 0, :, None] == operands.documents_k[:, 0, None, :]
    for entry, spans in enumerate(zip(case.document_spans("q"), case.document_spans("k"), strict=True)):
        expected = torch.zeros(100, 60, dtype=torch.bool)
        for queries, keys in zip(*spans, strict=True):
            expected[queries.start:queries.stop, keys.start:keys.stop] = True
        assert torch.equal(together[entry], expected)


@pytest.mark.parametrize("name", ["padded_everything", "packed_everything"])
def test_a_call_returns_what_is_asked_for_as_the_tensors_lie(name):
    case = case_named(name)
    inputs, operands = (make(case, torch.float32, "cpu") for make in (make_inputs, make_operands))
    out = call(case, inputs[:3], operands, backend="reference")
    results = call(case, inputs[:3], operands, return_aux=("lse", "max_logit"), backend="reference")
    assert torch.equal(out, results.out)
    assert out.shape == inputs.dout.shape
    assert results.lse.shape == results.max_logit.shape == inputs.dlse.shape


def test_numbers_are_changed_in_memory_of_their_own():
    inputs = make_inputs(case_named("gqa"), torch.float32, "cpu")
    before = [tensor.clone() for tensor in inputs]
    same, other = with_numbers(inputs, Numbers()), with_numbers(inputs, Numbers(factor=8.0, mean=3.0))
    for got, tensor in zip(same, inputs, strict=True):
        assert torch.equal(got, tensor)
    assert torch.equal(other.q, 8 * inputs.q)
    assert torch.equal(other.k, inputs.k + 3)
    assert torch.equal(other.v, inputs.v + 3)
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))


@pytest.mark.parametrize("kind", HOSTILE_NUMBERS)
def test_a_sink_raises_the_score_of_the_first_key_alone(kind):
    inputs, numbers = make_inputs(case_named("gqa"), torch.float64, "cpu"), HOSTILE_NUMBERS[kind]
    changed, without = (with_numbers(inputs, own) for own in (numbers, numbers._replace(sink=0.0)))
    scores, plain = (own.q[:, ::2] @ own.k.mT / own.q.shape[-1] ** 0.5 for own in (changed, without))
    first_columns = without.q[:, ::2, :, :1] * without.k[..., :1].mT / inputs.q.shape[-1] ** 0.5
    raised = torch.zeros_like(scores)
    raised[..., 0] = numbers.sink
    torch.testing.assert_close(scores, plain - (first_columns if numbers.sink else 0.0) + raised)
