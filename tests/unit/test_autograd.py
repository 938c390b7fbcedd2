"""The op boundary: opcheck, gradients by finite differences, compilation, checkpointing, autocast, FLOP counts."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilewise import InvalidInput, Mask, UnsupportedProblem, attention, causal, chunk, prefix, sink_tokens, window
from tilewise.autograd.op import backward_op, backward_plain_op, forward_op, forward_plain_op
from tilewise.backends.base import Needs
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions

_MASKS = {
    "none": Mask(),
    "causal": causal("bottom_right"),
    "window": window(2, 1, "top_left"),
    "blind_rows": window(1, 0, "top_left"),  # with 6 queries and 4 keys the last query sees nothing
    "prefix": prefix(2, "top_left") & window(2, 0),
    "sink_tokens": window(1, 0, "top_left") & sink_tokens(1),
    "chunk": chunk(3, "bottom_right"),
}


def _tensors(dtype=torch.float64, *, sq=6, sk=4, requires_grad=False):
    """q with 4 heads, k and v with 2, head dims 3 and 2."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)
            for shape in ((1, 4, sq, 3), (1, 2, sk, 3), (1, 2, sk, 2))]


def _arguments(mask, operands=NO_OPERANDS, **options):
    """What stands behind the tensors in a schema."""
    return (*operands, *OperatorOptions(None, mask.left, mask.right, mask.alignment, mask.prefix, mask.sink_tokens,
                                        mask.chunk, backend="reference", **options))


def _operands(dtype=torch.float64, *, bias=(1, 4, 6, 4), slopes=(1, 4), requires_grad=False):
    """Every operand of a call of :func:`_tensors`; the mask hides the second query of one head whole."""
    generator = torch.Generator().manual_seed(1)
    bias, slopes, sinks = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)
                           for shape in (bias, slopes, (4,)))
    mask = torch.rand((1, 4, 6, 4), generator=generator) > 0.3
    mask[0, 1, 1] = False
    return Operands(bias, slopes, mask, sinks, torch.tensor([-3 << 40]))


def _all_arguments(mask=_MASKS["causal"]):
    """Every operand and every option of the op."""
    return _arguments(mask, _operands(torch.float32), softcap=2.0, dropout_p=0.25, max_logit=True)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_forward_op_passes_opcheck(mask):
    results = opcheck(forward_op, (*_tensors(torch.float32), *_arguments(mask)))
    assert set(results.values()) == {"SUCCESS"}


def test_forward_op_with_every_operand_passes_opcheck():
    results = opcheck(forward_op, (*_tensors(torch.float32), *_all_arguments()))
    assert set(results.values()) == {"SUCCESS"}


def _assert_backward_op_passes_opcheck(arguments, needs, *, with_dlse):
    tensors = _tensors(torch.float32)
    out, lse, *_ = forward_op(*tensors, *arguments)
    lse = lse.masked_fill(lse.isinf(), 0.0)  # opcheck compares values, and -inf - -inf is NaN
    dlse = torch.randn_like(lse) if with_dlse else None
    results = opcheck(backward_op, (*tensors, out, lse, torch.randn_like(out), dlse, *arguments, list(needs)))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout_and_dlse"])
@pytest.mark.parametrize("needs", [Needs(), Needs(dkv=False), Needs(dq=False)], ids=["all", "dq", "dkv"])
def test_backward_op_passes_opcheck(with_dlse, needs):
    _assert_backward_op_passes_opcheck(_arguments(_MASKS["causal"]), needs, with_dlse=with_dlse)


@pytest.mark.parametrize("needs", [Needs(True, True, True, True, True), *(
    Needs(False, False, **{name: True}) for name in ("dbias", "dalibi_slopes", "dsinks"))],
    ids=["all", "dbias", "dalibi_slopes", "dsinks"])
def test_backward_op_with_every_operand_passes_opcheck(needs):
    _assert_backward_op_passes_opcheck(_all_arguments(), needs, with_dlse=True)


@pytest.mark.parametrize("with_options", [False, True], ids=["plain", "every_option"])
@pytest.mark.parametrize("storage", ["bhsd", "bshd"])
def test_fake_outputs_lie_in_memory_as_the_real_ones(storage, with_options):
    tensors = _tensors(torch.float32)
    if storage == "bshd":
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    arguments = _all_arguments() if with_options else _arguments(_MASKS["causal"])
    needs = [True, True] + 3 * [with_options]
    real = forward_op(*tensors, *arguments)
    real += backward_op(*tensors, *real[:2], torch.randn_like(real[0]), None, *arguments, needs)
    fakes = [t.to("meta") for t in tensors]
    arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    fake = forward_op(*fakes, *arguments)
    fake += backward_op(*fakes, *fake[:2], torch.randn_like(fake[0]), None, *arguments, needs)
    assert len(real) == (9 if with_options else 5)
    for ours, theirs in zip(real, fake, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def _finite(mask):
    """The call as a function of q, k, v alone; lse of blind rows, a constant -inf, as 0."""
    def call(q, k, v):
        out, lse = attention(q, k, v, mask=mask, return_aux=("lse",), backend="reference")
        return out, lse.masked_fill(lse == float("-inf"), 0.0)
    return call


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_gradients_through_out_and_lse_agree_with_finite_differences(mask):
    assert torch.autograd.gradcheck(_finite(mask), _tensors(requires_grad=True))


def test_gradient_through_lse_alone_agrees_with_finite_differences():
    call = _finite(_MASKS["causal"])
    assert torch.autograd.gradcheck(lambda *tensors: call(*tensors)[1], _tensors(requires_grad=True))


def test_gradients_cross_tiles(monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", 2)
    assert torch.autograd.gradcheck(_finite(_MASKS["window"]), _tensors(requires_grad=True))


def _finite_with_options(operands, mask=_MASKS["causal"], **options):
    """The call as a function of q, k, v, bias, slopes and sinks; an lse of -inf as 0."""
    def call(q, k, v, bias=None, slopes=None, sinks=None):
        whole = mask if operands.mask is None else mask & operands.mask
        out, lse = attention(q, k, v, mask=whole, bias=bias, alibi_slopes=slopes, sinks=sinks, return_aux=("lse",),
                             dropout_seed=operands.seed, backend="reference", **options)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)
    return call


@pytest.mark.parametrize("bias", [(1, 4, 6, 4), (6, 4), (4, 1, 1), (1, 1, 6, 1), (4, 1, 4)], ids=str)
def test_gradient_of_a_bias_of_any_broadcast_shape_agrees_with_finite_differences(bias):
    operands = _operands(bias=bias, requires_grad=True)
    call = _finite_with_options(NO_OPERANDS)
    assert torch.autograd.gradcheck(call, (*_tensors(requires_grad=True), operands.bias))


@pytest.mark.parametrize("slopes", [(4,), (1, 4)], ids=str)
@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_gradient_of_alibi_slopes_agrees_with_finite_differences(slopes, mask):
    operands = _operands(slopes=slopes, requires_grad=True)
    call = _finite_with_options(NO_OPERANDS, mask if mask.alignment else window(None, None, "top_left"))
    assert torch.autograd.gradcheck(call, (*_tensors(requires_grad=True), None, operands.alibi_slopes), fast_mode=True)


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_gradient_of_sinks_agrees_with_finite_differences(mask):
    call = _finite_with_options(NO_OPERANDS, mask)
    assert torch.autograd.gradcheck(
        call, (*_tensors(requires_grad=True), None, None, _operands(requires_grad=True).sinks))


@pytest.mark.parametrize("options", [{"softcap": 0.7}, {"dropout_p": 0.4}], ids=str)
def test_gradients_through_softcap_and_dropout_agree_with_finite_differences(options):
    call = _finite_with_options(Operands(seed=torch.tensor([5])), **options)
    assert torch.autograd.gradcheck(call, _tensors(requires_grad=True))


@pytest.mark.parametrize("mask", [m for m in _MASKS.values() if m.alignment], ids=str)
@pytest.mark.parametrize("tile", [3, 256])
def test_gradients_of_everything_together_agree_with_finite_differences(mask, tile, monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", tile)
    operands = _operands(requires_grad=True)
    call = _finite_with_options(operands, mask, softcap=1.5, dropout_p=0.25)
    leaves = (*_tensors(requires_grad=True), operands.bias, operands.alibi_slopes, operands.sinks)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_an_operand_alone_may_need_a_gradient(name):
    """As with a frozen model and a learned bias: q, k and v get none, and the operand the same as with all."""
    gradients = []
    for requires_grad in (False, True):
        operand = getattr(_operands(), name).clone().requires_grad_()
        out, lse = attention(*_tensors(requires_grad=requires_grad), mask=causal("bottom_right"), **{name: operand},
                             return_aux=("lse",), backend="reference")
        (out.square().sum() + lse.sum()).backward()
        gradients.append(operand.grad)
    assert gradients[0].count_nonzero()
    assert torch.equal(*gradients)


def test_rows_hidden_by_their_position_are_not_read_and_give_the_sink_their_dlse():
    q, k, v = _tensors(requires_grad=True)
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    hidden = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)[:, None] == 1.0
    out, lse = attention(q.masked_fill(hidden, float("nan")), k, v, mask=causal("bottom_right"), sinks=sinks,
                         return_aux=("lse",), backend="reference")
    dout = torch.zeros_like(out).masked_fill(hidden, float("nan"))
    dlse = torch.tensor([2.0, 3.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64).expand(1, 4, 6)
    *others, dsinks = torch.autograd.grad((out, lse), (k, v, sinks), (dout, dlse))
    assert torch.equal(dsinks, torch.full((4,), 5.0, dtype=torch.float64))
    assert not any(gradient.count_nonzero() for gradient in others)


def test_rows_hidden_by_data_pass_no_gradient_on_whatever_arrives():
    """lse is -inf there, and what a loss makes of it need not be finite: lse² sends back -inf."""
    q, k, v = _tensors(requires_grad=True)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[3] = False
    out, lse = attention(q, k, v, mask=mask, return_aux=("lse",), backend="reference")
    assert torch.equal(lse[..., 3], torch.full((1, 4), float("-inf"), dtype=torch.float64))
    for gradient in torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), 2 * lse)):
        assert gradient.isfinite().all()


def test_nan_behind_a_mask_of_data_does_not_pass_the_softcap_back():
    q, k, v = _tensors(requires_grad=True)
    bias = torch.zeros(6, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[:, 1] = False
    poison = torch.zeros_like(k)
    poison[:, :, 1] = float("nan")
    out = attention(q, k + poison, v, mask=mask, bias=bias + poison[0, 0, :, 0], softcap=1.0, backend="reference")
    dk, dv, dbias = torch.autograd.grad(out.sum(), (k, v, bias))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in (dk, dv, dbias))


def test_max_logit_has_no_gradient():
    results = attention(*_tensors(requires_grad=True), return_aux=("max_logit",), backend="reference")
    assert not results.max_logit.requires_grad
    assert results.lse.requires_grad


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1)], ids=str)
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen):
    everything = _tensors(requires_grad=True)
    attention(*everything, mask=causal("bottom_right"), backend="reference").sum().backward()
    some = [t.requires_grad_(i not in frozen) for i, t in enumerate(_tensors())]
    attention(*some, mask=causal("bottom_right"), backend="reference").sum().backward()
    for i, (got, expected) in enumerate(zip(some, everything, strict=True)):
        if i in frozen:
            assert got.grad is None
        else:
            assert torch.equal(got.grad, expected.grad)


@pytest.mark.parametrize(("name", "op", "options"), [
    ("backward_plain_op", backward_plain_op, {}), ("backward_op", backward_op, {"softcap": 9.0})],
    ids=["plain", "softcap"])
def test_backward_passes_are_spared_where_nothing_needs_them(monkeypatch, name, op, options):
    asked = []
    monkeypatch.setattr(f"tilewise.autograd.function.{name}",
                        lambda *arguments: asked.append(Needs(*arguments[-1])) or op(*arguments))
    for frozen in ((0,), (1, 2), ()):
        tensors = [t.requires_grad_(i not in frozen) for i, t in enumerate(_tensors())]
        attention(*tensors, **options, backend="reference").sum().backward()
    assert asked == [Needs(False, True), Needs(True, False), Needs(True, True)]


def test_without_gradients_nothing_is_recorded():
    q, k, v = _tensors(requires_grad=True)
    with torch.no_grad():
        assert attention(q, k, v).grad_fn is None
    assert attention(*_tensors()).grad_fn is None


@pytest.mark.parametrize("dout_needs_gradient", [False, True])
def test_second_derivative_raises(dout_needs_gradient):
    """Where dout needs no gradient, torch's once_differentiable let a penalty on dq count as a constant."""
    q, k, v = _tensors(requires_grad=True)
    out = attention(q, k, v, backend="reference")
    dout = torch.ones_like(out, requires_grad=dout_needs_gradient)
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="a second derivative of attention was asked for"):
        (dq.square().sum() + q.sum()).backward()


def test_gradient_in_a_graph_may_be_used_undifferentiated():
    q, k, v = _tensors(requires_grad=True)
    out = attention(q, k, v, backend="reference")
    (plain,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.equal(dq, plain)
    (dq.detach() * q).sum().backward()
    assert torch.equal(q.grad, plain)


def test_activation_checkpointing_gives_equal_gradients():
    def block(q, k, v):
        return attention(q.tanh(), k, v, mask=causal("bottom_right"), backend="reference").square()

    plain, checkpointed = _tensors(requires_grad=True), _tensors(requires_grad=True)
    block(*plain).sum().backward()
    checkpoint(block, *checkpointed, use_reentrant=False).sum().backward()
    for a, b in zip(plain, checkpointed, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_activation_checkpointing_drops_the_same_pairs_again_where_the_seed_is_given():
    def block(q, k, v):
        return attention(q.tanh(), k, v, dropout_p=0.5, dropout_seed=11, backend="reference").square()

    plain, checkpointed = _tensors(requires_grad=True), _tensors(requires_grad=True)
    block(*plain).sum().backward()
    checkpoint(block, *checkpointed, use_reentrant=False).sum().backward()
    for a, b in zip(plain, checkpointed, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast_casts_the_inputs_and_nothing_inside(dtype, backend):
    """Autocast also rounds bmm: it turned the reference's float32 tiles into half ones and broke its products."""
    tensors = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype):
        out, lse = attention(*tensors, return_aux=("lse",), backend=backend)
        dq, *_ = torch.autograd.grad(out.float().sum(), tensors)
    cast = [t.detach().to(dtype).requires_grad_() for t in tensors]
    expected, expected_lse = attention(*cast, return_aux=("lse",), backend=backend)
    expected_dq, *_ = torch.autograd.grad(expected.float().sum(), cast)
    assert (out.dtype, lse.dtype, dq.dtype) == (dtype, torch.float32, torch.float32)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(dq, expected_dq.float())


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*_tensors()).dtype is torch.float64


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_flop_count_is_that_of_the_visible_pairs(mask):
    q, k, v = _tensors(torch.float32, requires_grad=True)
    pairs = 4 * int(mask.visible(6, 4).sum())  # 4 heads
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, mask=mask, backend="reference")
    assert counter.get_total_flops() == 2 * pairs * (3 + 2)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 3 + 2 * 2)


def _compiled_step(compiler, mask, *, dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend=compiler)
    def step(q, k, v):
        out, lse = attention(q * 1.0, k, v, mask=mask, return_aux=("lse",), backend="reference")
        return out.square().sum() + lse.exp().sum()
    return step


@pytest.mark.usefixtures("fresh_compiler")
# torch.compile instantiates autograd.Function inside, and warns of that; see torch/_dynamo/side_effects.py.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
class TestCompiled:
    @pytest.mark.parametrize("mask", [Mask(), causal("top_left"), window(2, 3, "bottom_right")], ids=str)
    def test_whole_graph_equals_eager_and_compiles_once_for_all_lengths(self, mask):
        compiler = CompileCounterWithBackend("aot_eager")
        step = _compiled_step(compiler, mask, dynamic=True)
        for sq, sk in ((6, 9), (11, 13), (17, 40)):
            compiled = _tensors(sq=sq, sk=sk, requires_grad=True)
            eager = _tensors(sq=sq, sk=sk, requires_grad=True)
            step(*compiled).backward()
            out, lse = attention(*eager, mask=mask, return_aux=("lse",), backend="reference")
            (out.square().sum() + lse.exp().sum()).backward()
            for a, b in zip(compiled, eager, strict=True):
                torch.testing.assert_close(a.grad, b.grad)
        assert compiler.frame_count == 1

    def test_whole_graph_with_every_option_equals_eager(self):
        def step(q, k, v, mask, operands):
            out, lse, max_logit = attention(
                q * 1.0, k, v, mask=mask, bias=operands.bias, alibi_slopes=operands.alibi_slopes, sinks=operands.sinks,
                softcap=2.0, dropout_p=0.25, dropout_seed=operands.seed, return_aux=("lse", "max_logit"),
                backend="reference")
            return out.square().sum() + lse.exp().sum() + max_logit.exp().sum()

        found = []
        for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            tensors, operands = _tensors(requires_grad=True), _operands(requires_grad=True)
            loss = call(*tensors, causal("bottom_right") & operands.mask, operands)
            loss.backward()
            found.append([loss.detach(), *(t.grad for t in tensors),
                          *(t.grad for t in (operands.bias, operands.alibi_slopes, operands.sinks))])
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager)

    def test_a_seed_is_drawn_anew_at_every_call_of_a_compiled_graph(self):
        step = torch.compile(lambda *t: attention(*t, dropout_p=0.5, backend="reference"), fullgraph=True,
                             backend="aot_eager")
        assert not torch.equal(step(*_tensors()), step(*_tensors()))

    def test_automatic_shapes_compile_twice_at_most(self):
        """The second length makes the lengths symbols; from the third on nothing is compiled."""
        compiler = CompileCounterWithBackend("aot_eager")
        step = _compiled_step(compiler, causal(), dynamic=None)
        for s in (6, 11, 17, 40):
            step(*_tensors(sq=s, sk=s, requires_grad=True)).backward()
        assert compiler.frame_count == 2

    def test_only_the_stride_of_a_mask_may_vary(self):
        """Marks of a growing cache, cut to a length: their stride alone was a symbol, and the problem was hashed."""
        step = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager")
        tensors = _tensors(sq=5, sk=5)
        for width in (7, 8, 9):
            mask = (torch.arange(5 * width).view(5, width) % 3 != 1)[:, :5]
            torch.testing.assert_close(step(*tensors, mask), attention(*tensors, mask=mask))

    def test_a_wrong_shape_raises_our_error_in_a_compiled_call_too(self):
        step = torch.compile(lambda q, k, v: attention(q, k, v), backend="eager")
        q, k, v = _tensors()
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="v has 3 positions and k has 4"):
            step(q, k, v[:, :, :3])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_saved_tensors_may_come_back_in_another_layout(backend):
    """As hooks that compress them, or keep them elsewhere, may give them."""
    leaves = [tensor.float().requires_grad_() for tensor in _tensors()]
    dout = torch.randn(1, 4, 6, 2, generator=torch.Generator().manual_seed(1))
    found = []
    for unpack in (lambda tensor: tensor, lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2)):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            out = attention(*leaves, backend=backend)
            found.append(torch.autograd.grad(out, leaves, dout))
    for as_saved, otherwise in zip(*found, strict=True):
        torch.testing.assert_close(otherwise, as_saved)


def test_op_reports_wrong_input_by_our_error():
    q, k, v = _tensors()
    with pytest.raises(InvalidInput, match="k has head dim 3 and q has 2"):
        forward_op(q[..., :2], k, v, *_arguments(Mask()))


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_plain_forward_op_passes_opcheck_and_gives_what_the_other_gives(mask):
    tensors, plain = _tensors(torch.float32), (0.5, mask.left, mask.right, mask.alignment, False, "reference")
    assert set(opcheck(forward_plain_op, (*tensors, *plain)).values()) == {"SUCCESS"}
    options = OperatorOptions(*plain[:4], backend="reference")
    for ours, theirs in zip(forward_plain_op(*tensors, *plain), forward_op(*tensors, *NO_OPERANDS, *options),
                            strict=True):
        assert torch.equal(ours, theirs)
    counts = []
    for op, arguments in ((forward_plain_op, plain), (forward_op, (*NO_OPERANDS, *options))):
        with FlopCounterMode(display=False) as counter:
            op(*tensors, *arguments)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout_and_dlse"])
@pytest.mark.parametrize("needs", [[True, True], [True, False], [False, True]], ids=["all", "dq", "dkv"])
def test_plain_backward_op_passes_opcheck_and_gives_what_the_other_gives(needs, with_dlse):
    tensors, plain = _tensors(torch.float32), (0.5, None, 0, "bottom_right", False, "reference")
    out, lse = forward_plain_op(*tensors, *plain)
    lse = lse.masked_fill(lse.isinf(), 0.0)  # opcheck compares values, and -inf - -inf is NaN
    tensors += [out, lse, torch.randn_like(out), torch.randn_like(lse) if with_dlse else None]
    assert set(opcheck(backward_plain_op, (*tensors, *plain, needs)).values()) == {"SUCCESS"}
    results, counts = [], []
    options = OperatorOptions(*plain[:4], backend="reference")
    for op, arguments in ((backward_plain_op, plain), (backward_op, (*NO_OPERANDS, *options))):
        with FlopCounterMode(display=False) as counter:
            results.append(op(*tensors, *arguments, needs))
        counts.append(counter.get_total_flops())
    assert len(results[0]) == needs[0] + 2 * needs[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("requires_grad", [False, True])
def test_only_a_call_with_operands_or_rarer_options_pays_for_the_arguments_of_the_whole_operators(requires_grad):
    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "tilewise":
                self.names.append(op.__name__)
            return op(*args, **(kwargs or {}))

    passes = ["forward", "backward"] if requires_grad else ["forward"]
    for options, end in (({"mask": causal("top_left"), "scale": 0.5, "deterministic": True}, "_plain.default"),
                         ({"softcap": 9.0}, ".default"), ({"sinks": torch.zeros(4)}, ".default")):
        with Calls() as calls:
            out = attention(*_tensors(torch.float32, requires_grad=requires_grad), **options, backend="reference")
            if requires_grad:
                out.sum().backward()
        assert calls.names == [f"attention_{name}{end}" for name in passes]
