"""double_backward=True: values and first gradients as ever, derivatives of every order, forward mode, edges, errors."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from tilewise import (
    InvalidInput,
    Mask,
    UnsupportedProblem,
    attention,
    attention_varlen,
    causal,
    chunk,
    documents,
    explain,
    prefix,
    sink_tokens,
    use_backend,
    window,
)
from tilewise.testing.cases import CASES, case_named
from tilewise.testing.inputs import call as call_case
from tilewise.testing.inputs import lay_out, make_inputs, make_operands
from tilewise.testing.oracle import Changes, attend

_BOTTOM = causal("bottom_right")
_MASKS = {
    "none": Mask(),
    "causal": _BOTTOM,
    "window": window(2, 1, "top_left"),
    "blind_rows": window(1, 0, "top_left"),  # with 6 queries and 4 keys the last query sees nothing
    "exceptions": window(0, 0, "top_left") & prefix(2) & sink_tokens(1) & chunk(3),
    "documents": documents(torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([1, 0, 1, 2])) & _BOTTOM,
}
_NAN = float("nan")
# Two sequences of 3 and 2 queries, 1 and 3 keys: by the bottom right corner, two queries see nothing.
_LENGTHS = torch.tensor([3, 2]), torch.tensor([1, 3])
_BORDERS = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 1, 4])}
# One of each kind of option, and the edges: rows that no key is left for by position, by data, by both; sinks there.
_VARIED = [case_named(name) for name in (
    "bias_window_moat", "alibi_window_blind_queries", "mask_tensor_causal_gqa", "softcap_near_its_bound_gqa",
    "sinks_blind_queries", "dropout_causal_gqa", "everything", "everything_moat_blind_queries",
    "documents_mask_tensor_sinks", "chunk_window_sink_tokens_prefix", "padded_everything", "padded_zero_lengths",
    "packed_everything", "packed_bias_of_all_sequences")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of queries in every call, the last one cut short."""
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", 4)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _draw(*shapes, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
            for shape in shapes]


def _tensors(sq=6, sk=4, *, requires_grad=True):
    """q with 4 heads, k and v with 2, head dims 3 and 2."""
    return _draw((1, 4, sq, 3), (1, 2, sk, 3), (1, 2, sk, 2), requires_grad=requires_grad)


def _finite(lse):
    """The lse of a row that sees nothing, a constant -inf, as 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _call(mask=_BOTTOM, **options):
    """The call as a function of q, k, v and, after them, bias, slopes and sinks."""
    def call(q, k, v, bias=None, slopes=None, sinks=None):
        out, lse = attention(q, k, v, mask=mask, bias=bias, alibi_slopes=slopes, sinks=sinks, return_aux=("lse",),
                             double_backward=True, **options)
        return out, _finite(lse)
    return call


def _everything():
    """A call with every option and its six leaves; the mask hides the second query of one head whole."""
    mask = torch.rand((1, 4, 6, 4), generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 1, 1] = False
    leaves = [*_tensors(), *_draw((4, 6, 4), (4,), (4,))]
    return _call(_BOTTOM & mask, scale=0.4, softcap=1.5, dropout_p=0.25, dropout_seed=-3 << 40), leaves


def _case_call(case, operands, names, **how):
    """A case's call as a function of q, k, v and the operands of these names."""
    def call(q, k, v, *others):
        own = operands._replace(**dict(zip(names, others, strict=True)))
        return call_case(case, (q, k, v), own, return_aux=("lse", "max_logit"), **how)
    return call


def _leaves_of(case):
    """Return a case's inputs and operands in float64 and its leaves: q, k, v and, by their names, operands."""
    inputs = make_inputs(case, torch.float64, "cpu")
    operands = make_operands(case, torch.float64, "cpu")
    names = [name for name in ("bias", "alibi_slopes", "sinks") if getattr(operands, name) is not None]
    leaves = [t.detach().requires_grad_() for t in (*inputs[:3], *(getattr(operands, name) for name in names))]
    return inputs, operands, names, leaves


def _hvp(loss, leaves):
    """Return the gradient of (the gradient of a loss, in a fixed direction)."""
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    assert all(gradient.isfinite().all() for gradient in first)
    return torch.autograd.grad(sum((gradient * gradient.detach().cos()).sum() for gradient in first), leaves)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_first_gradients_are_those_of_the_ordinary_reference(case, monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", 32)
    inputs, operands, names, leaves = _leaves_of(case)
    found = []
    for how in ({"double_backward": True}, {"backend": "reference"}):
        out, lse, max_logit = _case_call(case, operands, names, **how)(*leaves)
        assert not max_logit.requires_grad
        found.append((out, lse, max_logit, *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))))
    assert found[0][0].stride() == found[1][0].stride() or not case.sq
    for ours, ordinary in zip(*found, strict=True):
        torch.testing.assert_close(ours, ordinary, rtol=1e-10, atol=1e-12)


def _with_lengths(kind):
    """A call of two sequences with bias, slopes, sinks, dropout and documents, and its six leaves."""
    batch, sq, sk = (2, 4, 3) if kind == "padded" else (1, 6, 5)
    leaves = _draw((batch, 2, sq, 2), (batch, 1, sk, 2), (batch, 1, sk, 1), (2, 1, 4, 3), (2, 2), (2,))
    mask = _BOTTOM & documents(torch.arange(sq) % 2, torch.arange(sk) % 2)
    options = {"mask": mask, "softcap": 1.5, "dropout_p": 0.25, "dropout_seed": 5, "double_backward": True,
               "return_aux": ("lse",)}

    def call(q, k, v, bias, slopes, sinks):
        changes = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
        if kind == "padded":
            out, lse = attention(q, k, v, seqlens_q=_LENGTHS[0], seqlens_k=_LENGTHS[1], **changes, **options)
        else:
            out, lse = attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), **_BORDERS, max_seqlen_q=4,
                                        max_seqlen_k=3, **changes, **options)
        return out, _finite(lse)
    return call, leaves


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tiles_are_float32_for_half_types_and_under_autocast(dtype):
    q, k, v = (t.detach().to(dtype) for t in _tensors(40, 38))
    options = {"mask": _BOTTOM, "bias": k[0, 0, :1, :1], "sinks": v[0, 0, :4, 0], "return_aux": ("lse",)}
    ordinary = attention(q, k, v, **options, backend="reference")
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        ours = attention(q, k, v, **options, double_backward=True)
    assert (ours.out.dtype, ours.lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(ours.lse, ordinary.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.out, ordinary.out)
    padded = attention(q, k, v, **options, seqlens_q=torch.tensor([30]), double_backward=True)
    assert (padded.out.dtype, padded.lse.dtype) == (dtype, torch.float32)
    blind = attention(q, k[:, :, :0], v[:, :, :0], **options, double_backward=True)
    assert (blind.out.dtype, blind.lse.dtype) == (dtype, torch.float32)


def test_sink_far_above_the_scores_does_not_overflow():
    tensors, sinks = _tensors(), torch.full((4,), 1000.0, dtype=torch.float64)
    ours, ordinary = (attention(*tensors, sinks=sinks, return_aux=("lse",), **how)
                      for how in ({"double_backward": True}, {"backend": "reference"}))
    assert torch.equal(ours.lse, ordinary.lse)
    assert torch.equal(ours.out, ordinary.out)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "shbd", "hbsd", "hsbd"])
@pytest.mark.parametrize("options", [{}, {"seqlens_k": torch.tensor([3, 0])}], ids=["dense", "lengths"])
def test_out_has_the_memory_order_of_q(options, layout):
    q, k, v = (lay_out(torch.randn(2, 3, 9, 5), layout) for _ in range(3))
    out = attention(q, k, v, double_backward=True, **options)
    assert out.permute(["bhsd".index(dim) for dim in layout]).is_contiguous()
    torch.testing.assert_close(out, attention(q, k, v, **options))


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_derivatives_of_both_orders_and_modes_agree_with_finite_differences(mask):
    assert torch.autograd.gradcheck(_call(mask), _tensors(), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(_call(mask), _tensors(), check_fwd_over_rev=True, fast_mode=True)


def test_derivatives_with_every_option_agree_with_finite_differences():
    call, leaves = _everything()
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_derivatives_with_lengths_that_are_data_agree_with_finite_differences(kind):
    call, leaves = _with_lengths(kind)
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_third_derivative_agrees_with_finite_differences():
    k, v = _tensors(2, 2, requires_grad=False)[1:]
    (q,) = _draw((1, 2, 2, 3))

    def gradient(q):
        return torch.autograd.grad(_call(causal(), softcap=1.0)(q, k, v)[0].square().sum(), q, create_graph=True)
    assert torch.autograd.gradgradcheck(gradient, (q,))


@pytest.mark.parametrize("through", ["out", "lse"])
@pytest.mark.parametrize("case", _VARIED, ids=str)
def test_hessian_vector_product_is_that_of_the_dense_definition(case, through, monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", 32)
    inputs, operands, names, leaves = _leaves_of(case)
    wanted = leaves if through == "out" else [*leaves[:2], *leaves[3:]]  # v takes no part in lse
    products = []
    for results in (_case_call(case, operands, names, double_backward=True)(*leaves),
                    attend(*leaves[:3], case.mask, case.scale, Changes(
                        operands._replace(**dict(zip(names, leaves[3:], strict=True))), case.settings))):
        loss = (results[0] ** 2 * inputs.dout if through == "out" else _finite(results[1]) ** 2 * inputs.dlse).sum()
        products.append(_hvp(loss, wanted))
    for ours, dense in zip(*products, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make", [_everything, lambda: _with_lengths("padded"), lambda: _with_lengths("packed")],
                         ids=["everything", "padded", "packed"])
def test_jvp_is_the_slope_along_the_tangent(make):
    call, leaves = make()
    point, tangents = tuple(t.detach() for t in leaves), tuple(torch.cos(3 * t.detach()) for t in leaves)
    _, slopes = torch.func.jvp(call, point, tangents)
    step = 1e-6
    ahead, behind = (call(*(t + sign * step * tangent for t, tangent in zip(point, tangents, strict=True)))
                     for sign in (1, -1))
    for slope, after, before in zip(slopes, ahead, behind, strict=True):
        assert slope.count_nonzero()
        torch.testing.assert_close(slope, (after - before) / (2 * step), rtol=1e-7, atol=1e-7)


def test_transforms_compose_and_agree_with_reverse_mode():
    """The Hessian as reverse over reverse, forward over reverse, reverse over forward, and by torch.func's own."""
    q, k, v = _tensors(requires_grad=False)
    mask = window(1, 0, "top_left")  # its last query is blind

    def loss(q):
        out, lse = _call(mask, softcap=2.0)(q, k, v)
        return out.pow(3).sum() + lse.square().sum()
    expected = torch.autograd.functional.hessian(loss, q)
    assert expected.count_nonzero()
    for outer, inner in ((torch.func.jacrev, torch.func.jacrev), (torch.func.jacfwd, torch.func.jacrev),
                         (torch.func.jacrev, torch.func.jacfwd), (torch.func.jacfwd, torch.func.jacfwd)):
        torch.testing.assert_close(outer(inner(loss))(q), expected)


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_transforms_compose_over_lengths_that_are_data(kind):
    call, (q, *others) = _with_lengths(kind)

    def loss(q):
        out, lse = call(q, *others)
        return out.pow(3).sum() + lse.square().sum()
    expected = torch.autograd.functional.hessian(loss, q.detach())
    assert expected.count_nonzero()
    for outer, inner in ((torch.func.jacrev, torch.func.jacrev), (torch.func.jacfwd, torch.func.jacrev),
                         (torch.func.jacrev, torch.func.jacfwd)):
        torch.testing.assert_close(outer(inner(loss))(q.detach()), expected)


def test_forward_mode_over_a_graph_in_reverse_mode_gives_the_hessian_vector_product():
    (q, *others), (tangent,) = _tensors(), _draw((1, 4, 6, 3), requires_grad=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        (dq,) = torch.autograd.grad(_call()(dual, *others)[0].square().sum(), dual, create_graph=True)
        ours = forward_ad.unpack_dual(dq).tangent
    _, expected = torch.autograd.functional.hvp(
        lambda q: _call()(q, *others)[0].square().sum(), q.detach(), tangent)
    torch.testing.assert_close(ours, expected)


def test_max_logit_has_no_tangent():
    q, k, v = _tensors(requires_grad=False)
    with forward_ad.dual_level():
        results = attention(forward_ad.make_dual(q, q), k, v, return_aux=("lse", "max_logit"), double_backward=True)
        assert forward_ad.unpack_dual(results.lse).tangent is not None
        assert forward_ad.unpack_dual(results.max_logit).tangent is None


def test_graph_of_a_first_gradient_keeps_the_inputs_alone():
    """Every tile is computed again on the way back: what is saved grows with the length, not with its square."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    tensors = _tensors(64, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(*tensors, mask=causal(), softcap=2.0, double_backward=True)
    assert sum(saved.values()) <= sum(t.untyped_storage().nbytes() for t in tensors)


def test_tiles_are_computed_again_in_plain_reverse_mode_alone(monkeypatch):
    """torch 2.11's checkpoint refuses tangents, any version's refuses transforms; without a graph it is for nothing."""
    def refuse(*_, **__):
        raise AssertionError("checkpoint")
    monkeypatch.setattr("tilewise.kernels.reference.differentiable.checkpoint", refuse)
    tensors = _tensors()
    with pytest.raises(AssertionError, match="checkpoint"):
        _call()(*tensors)
    with torch.no_grad():
        _call()(*tensors)
    with forward_ad.dual_level():
        _call()(forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0])), *tensors[1:])
        (bias,) = _draw((6, 4))
        _call()(*tensors, forward_ad.make_dual(bias, torch.ones_like(bias)))
    torch.func.grad(lambda q: _call()(q, *tensors[1:])[0].sum())(tensors[0])


@pytest.mark.parametrize("hides", ["by_position", "by_data"])
def test_rows_without_a_key_give_zero_or_the_sink_and_derivatives_of_zero(hides):
    q, k, v = _tensors()
    if hides == "by_position":
        blind, mask = slice(0, 2), _BOTTOM
    else:
        blind, seeing = slice(2, 3), torch.ones(6, 4, dtype=torch.bool)
        seeing[blind] = False
        mask = window(None, None, "top_left") & seeing
    plain = attention(q, k, v, mask=mask, return_aux=("lse", "max_logit"), double_backward=True)
    assert not plain.out[:, :, blind].any()
    assert (plain.lse[:, :, blind] == float("-inf")).all()
    assert (plain.max_logit[:, :, blind] == float("-inf")).all()
    (sinks,) = _draw((4,))
    out, lse = attention(q, k, v, mask=mask, sinks=sinks, return_aux=("lse",), double_backward=True)
    assert torch.equal(lse[:, :, blind], sinks[:, None].expand(1, 4, blind.stop - blind.start))
    # lse² of the plain rows sends back -inf.
    loss = plain.out.square().sum() + plain.lse.square().masked_fill(plain.lse.isinf(), 0.0).sum() + plain.lse[
        :, :, blind].square().sum() + out.square().sum()
    first = torch.autograd.grad(loss, (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), (q, k, v))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in (*first, *second))
    assert not first[0][:, :, blind].any()
    assert not second[0][:, :, blind].any()


def test_rows_hidden_by_data_pass_nothing_on_whatever_arrives():
    q, k, v = _tensors()
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[3] = False
    out, lse = attention(q, k, v, mask=mask, return_aux=("lse",), double_backward=True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dout[:, :, 3] = dlse[:, :, 3] = _NAN
    first = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in (*first, *second))


@pytest.mark.parametrize(("sq", "sk"), [(0, 4), (6, 0), (0, 0)])
def test_call_without_a_pair_has_gradients_of_zero(sq, sk):
    leaves = [*_tensors(sq, sk), *_draw((4, sq, sk), (4,), (4,))]
    out, lse = attention(*leaves[:3], mask=window(None, None, "top_left"), bias=leaves[3], alibi_slopes=leaves[4],
                         sinks=leaves[5], return_aux=("lse",), double_backward=True)
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(gradient.sum() for gradient in first) + lse.sum(), leaves)
    assert not any(gradient.any() for gradient in (*first, *second[:5]))
    assert torch.equal(second[5], torch.full((4,), float(sq), dtype=torch.float64))  # lse is the sink there


def test_nan_hidden_by_position_reaches_no_derivative():
    """Queries without a key and keys without a query are not read, whatever the order."""
    mask = window(1, 0, "bottom_right")  # 7 queries and 5 keys: the first two see none
    wide = window(0, 0, "top_left")  # 4 queries and 6 keys: no one sees the last two
    for (sq, sk), seen_by, rows, keys in (((7, 5), mask, 2, 0), ((4, 6), wide, 0, 2)):
        found = []
        for value in (0.0, _NAN):
            q, k, v = _tensors(sq, sk)
            with torch.no_grad():
                q[:, :, :rows] = value
                k[:, :, sk - keys:] = v[:, :, sk - keys:] = value
            (dout,) = _draw((1, 4, sq, 2), requires_grad=False)
            dout[:, :, :rows] = value
            out, lse = _call(seen_by, softcap=1.5)(q, k, v)
            first = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)), create_graph=True)
            second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), (q, k, v))
            found.append((out, lse, *first, *second))
        for clean, planted in zip(*found, strict=True):
            assert clean.isfinite().all()
            assert torch.equal(clean, planted)


def test_nan_between_sink_tokens_and_window_reaches_no_derivative():
    mask = window(1, 0, "bottom_right") & sink_tokens(1)  # 2 queries and 7 keys: no one sees the keys 1 to 3
    found = []
    for value in (0.0, _NAN):
        q, k, v = _tensors(2, 7)
        with torch.no_grad():
            k[:, :, 1:4] = v[:, :, 1:4] = value
        out, lse = _call(mask, softcap=1.5)(q, k, v)
        first = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), (q, k, v))
        found.append((out, lse, *first, *second))
    for clean, planted in zip(*found, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, planted)


def test_nan_behind_a_mask_of_data_does_not_pass_the_softcap_back():
    q, k, v = _tensors()
    (bias,) = _draw((6, 4))
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[:, 1] = False
    poison = torch.zeros_like(k)
    poison[:, :, 1] = _NAN
    out = attention(q, k + poison, v, mask=mask, bias=bias + poison[0, 0, :, 0], softcap=1.0, double_backward=True)
    first = torch.autograd.grad(out.square().sum(), (k, v, bias), create_graph=True)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in first)
    assert torch.autograd.grad(first[1].square().sum(), v)[0].isfinite().all()


def test_activation_checkpointing_around_the_call_gives_equal_second_derivatives():
    call, leaves = _everything()

    def loss(*leaves):
        out, lse = call(*leaves)
        return out.square().sum() + lse.sin().sum()
    outside = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    for ours, plain in zip(_hvp(outside, leaves), _hvp(loss(*leaves), leaves), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_other_backends_refuse(name):
    tensors = _tensors()
    message = f"backend '{name}' refuses double_backward=True\n.*fused kernels, which torch cannot differentiate"
    with pytest.raises(UnsupportedProblem, match=message):
        attention(*tensors, backend=name, double_backward=True)
    with use_backend(name), pytest.raises(UnsupportedProblem, match=message):
        attention(*tensors, double_backward=True)
    with use_backend(name):
        assert attention(*tensors, backend="reference", double_backward=True).requires_grad


def test_explain_tells_that_the_reference_alone_serves_it():
    explanation = explain(*_tensors(), double_backward=True)
    assert (explanation.forward, explanation.backward) == ("reference", "reference")
    for (_, name), reason in explanation.reasons.items():
        assert (reason is None) == (name == "reference")
        assert reason is None or "fused kernels, which torch cannot differentiate" in reason
    assert explain(*_tensors(), double_backward=True, backend="torch").forward is None


def test_wrong_input_raises_as_in_any_call():
    q, k, v = _tensors()
    with pytest.raises(InvalidInput, match="backend is 'tpu'; allowed are"):
        attention(q, k, v, backend="tpu", double_backward=True)
    with pytest.raises(InvalidInput, match="v has 3 positions and k has 4"):
        attention(q, k, v[:, :, :3], double_backward=True)


def test_second_derivative_without_the_argument_names_it():
    q, k, v = _tensors()
    (dq,) = torch.autograd.grad(attention(q, k, v, backend="reference").sum(), q, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="Pass double_backward=True to the call"):
        dq.square().sum().backward()


@pytest.mark.usefixtures("fresh_compiler")
# Dynamo looks for a gradient at the call's results, which are no leaves; torch hides its own remark on that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
class TestCompiled:
    def test_call_runs_outside_the_graph_and_is_still_differentiated_twice(self):
        compiler = CompileCounterWithBackend("aot_eager")
        tensors = _tensors()

        def call(q, k, v):
            return attention(q, k, v, mask=_BOTTOM, double_backward=True)
        found = [_hvp(function(*tensors).square().sum(), tensors)
                 for function in (call, torch.compile(call, backend=compiler))]
        assert compiler.frame_count == 0
        for eager, ours in zip(*found, strict=True):
            assert torch.equal(ours, eager)

    def test_first_gradient_passes_the_graphs_before_and_behind_the_call(self):
        def step(q, k, v):
            return attention(q.tanh(), k, v, mask=_BOTTOM, double_backward=True).square().sum()
        found = []
        for function in (step, torch.compile(step, backend="aot_eager")):
            tensors = _tensors()
            function(*tensors).backward()
            found.append([t.grad for t in tensors])
        for eager, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager)

    def test_whole_graph_is_refused_with_the_reason(self):
        step = torch.compile(lambda *tensors: attention(*tensors, double_backward=True), fullgraph=True,
                             backend="aot_eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="double_backward=True stays out of a compiled graph"):
            step(*_tensors())
