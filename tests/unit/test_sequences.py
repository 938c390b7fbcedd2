"""Sequences whose lengths are data, through the operators: opcheck, finite differences, compilation, FLOP counts."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from tilewise import attention, attention_varlen, causal, documents, sink_tokens, window
from tilewise.autograd.op import backward_op, forward_op
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions

_CAUSAL = causal("bottom_right")


def _tensors(dtype=torch.float64, *, requires_grad=False):
    """q with 4 heads and 6 positions, k and v with 2 and 4, head dims 3 and 2."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)
            for shape in ((1, 4, 6, 3), (1, 2, 4, 3), (1, 2, 4, 2))]


def _operands(dtype=torch.float64, *, bias, slopes, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    bias, slopes, sinks = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)
                           for shape in (bias, slopes, (4,)))
    return Operands(bias, slopes, None, sinks, torch.tensor([-3 << 40]))


# Two packed sequences of 2 and 3 queries, 3 and 1 keys; the last query of the storage is in none.
_PACKED = {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 3, 4])}


def _packed_arguments():
    """What stands behind the tensors in a schema: every operand and option; one sequence uses two of its queries."""
    operands = _operands(torch.float32, bias=(2, 4, 3, 3), slopes=(2, 4))
    generator = torch.Generator().manual_seed(3)
    together = documents(torch.tensor([0, 0, 1, 1, 1, 1]), torch.tensor([0, 0, 1, 1])).documents
    operands = operands._replace(
        mask=torch.rand((2, 1, 3, 3), generator=generator) > 0.2, **_PACKED, seqlens_q=torch.tensor([2, 2]),
        documents_q=together.q, documents_k=together.k)
    return (*operands, *OperatorOptions(None, None, 0, "bottom_right", None, None, 3, 2.0, 0.25, True, max_seqlen_q=3,
                                max_seqlen_k=3, backend="reference"))


def test_forward_op_of_packed_sequences_passes_opcheck():
    assert set(opcheck(forward_op, (*_tensors(torch.float32), *_packed_arguments())).values()) == {"SUCCESS"}


def test_backward_op_of_packed_sequences_passes_opcheck():
    tensors, arguments = _tensors(torch.float32), _packed_arguments()
    out, lse, _ = forward_op(*tensors, *arguments)
    lse = lse.masked_fill(lse.isinf(), 0.0)  # opcheck compares values, and -inf - -inf is NaN
    results = opcheck(backward_op, (*tensors, out, lse, torch.randn_like(out), torch.randn_like(lse), *arguments,
                                    [True] * 5))
    assert set(results.values()) == {"SUCCESS"}


def _packed_call(operands, **options):
    """A packed call as a function of q, k, v, bias, slopes and sinks; an lse of -inf as 0."""
    def call(q, k, v, bias=None, slopes=None, sinks=None):
        out, lse = attention_varlen(
            *(tensor[0].transpose(0, 1) for tensor in (q, k, v)), bias=bias, alibi_slopes=slopes, sinks=sinks,
            dropout_seed=operands.seed, return_aux=("lse",), backend="reference", **_PACKED, **options)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)
    return call


@pytest.mark.parametrize("mask", [_CAUSAL, window(1, 0, "top_left"), window(0, 0, "top_left") & sink_tokens(1)],
                         ids=str)
def test_gradients_of_packed_sequences_agree_with_finite_differences(mask):
    assert torch.autograd.gradcheck(_packed_call(NO_OPERANDS, mask=mask), _tensors(requires_grad=True))
    through_lse = _packed_call(NO_OPERANDS, mask=mask, seqused_k=torch.tensor([2, 1]))
    assert torch.autograd.gradcheck(lambda *tensors: through_lse(*tensors)[1], _tensors(requires_grad=True))


@pytest.mark.parametrize("bias", [(2, 4, 3, 3), (1, 1, 3, 3), (2, 1, 1, 3), (1, 4, 3, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("slopes", [(4,), (2, 4)], ids=str)
def test_gradients_of_what_packed_sequences_share_agree_with_finite_differences(bias, slopes):
    operands = _operands(bias=bias, slopes=slopes, requires_grad=True)
    call = _packed_call(operands, mask=_CAUSAL, max_seqlen_q=3, max_seqlen_k=3, softcap=1.5, dropout_p=0.25)
    leaves = (*_tensors(requires_grad=True), operands.bias, operands.alibi_slopes, operands.sinks)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_gradients_of_padded_sequences_agree_with_finite_differences():
    tensors = [torch.cat([tensor, tensor.flip(2)]).detach().requires_grad_() for tensor in _tensors()]
    operands = _operands(bias=(1, 4, 6, 4), slopes=(2, 4), requires_grad=True)

    def call(q, k, v, bias, slopes, sinks):
        out, lse = attention(q, k, v, mask=_CAUSAL, bias=bias, alibi_slopes=slopes, sinks=sinks,
                             seqlens_q=torch.tensor([6, 3]), seqlens_k=torch.tensor([2, 4]), return_aux=("lse",),
                             backend="reference")
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    leaves = (*tensors, operands.bias, operands.alibi_slopes, operands.sinks)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_a_gradient_that_sequences_share_is_rounded_once():
    """Rounded to bfloat16 after each of 512 sequences, a sum of ones would stay at 256."""
    q, k, v = (torch.zeros(512, 1, 1, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    _, lse = attention_varlen(q, k, v, cu_seqlens_q=torch.arange(513), sinks=sinks, return_aux=("lse",),
                              backend="reference")
    (2 * lse).sum().backward()  # the sink has half of each probability
    assert sinks.grad.item() == 512.0


def test_flop_count_of_packed_sequences_takes_them_for_equally_long():
    q, k, v = (torch.zeros(12, heads, 3) for heads in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        attention_varlen(q, k, v, cu_seqlens_q=torch.tensor([0, 1, 12]), mask=causal(), backend="reference")
    assert counter.get_total_flops() == 2 * 2 * 4 * (6 * 7 // 2) * (3 + 3)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch.compile instantiates autograd.Function inside, and warns of that; see torch/_dynamo/side_effects.py.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("ends", ["shared", "apart"])
def test_packed_sequences_compile_once_for_all_lengths_and_totals(ends):
    compiler = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, cu, used, ids):
        others = {"cu_seqlens_k": cu.clone()} if ends == "apart" else {}
        out, lse = attention_varlen(
            q * 1.0, k, v, cu_seqlens_q=cu, seqused_q=used, seqused_k=used, return_aux=("lse",),
            mask=causal("top_left") & documents(ids), backend="reference", **others)
        return out.square().sum() + lse.exp().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    for total, cu, used in ((20, (0, 3, 12, 12, 20), (3, 4, 0, 8)), (20, (0, 9, 12, 15, 16), (5, 0, 3, 1)),
                            (41, (0, 30, 35, 36, 37), (30, 5, 1, 1)), (30, (0, 1, 2, 3, 30), (1, 1, 1, 26))):
        generator = torch.Generator().manual_seed(total)
        inputs = [torch.randn(total, heads, 8, generator=generator) for heads in (6, 2, 2)]
        rest = (torch.tensor(cu), torch.tensor(used), torch.arange(total) // 4)
        found = []
        for call in (step, compiled):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            call(*leaves, *rest).backward()
            found.append([leaf.grad for leaf in leaves])
        for eager, got in zip(*found, strict=True):
            torch.testing.assert_close(got, eager)
    assert compiler.frame_count == 1
