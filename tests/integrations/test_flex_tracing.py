"""FlexAttention's Python functions, traced: results and gradients of both backends, and what is refused."""

import threading

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tilewise import InvalidInput, UnsupportedProblem, attention
from tilewise.integrations.flex import flex_attention, traced_score
from tilewise.integrations.flex_symbols import OPERATIONS
from tilewise.support.caches import clear_caches

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
GENERATOR = torch.Generator().manual_seed(0)
TABLE, PAIRS, SLOPES, FACTOR = (torch.randn(shape, generator=GENERATOR) for shape in (
    (4, 90), (2, 4, 40, 40), (4,), ()))
HALF, MARKED = TABLE.half(), TABLE > 0


def maximum(score, b, h, q, k):
    return torch.maximum(score, 0.3 * SLOPES[h]) - torch.minimum(score, SLOPES[b] * score)


def of_integers(score, b, h, q, k):
    of_pair = ((q - k) // 7 + (k - q) % 5) / 10 + abs(q - 3 * k) * 0.01
    return score + of_pair + (h == 2).float() - (q // (h + 1) % 3 != 1).int() + b.to(score.dtype)


MODS = {
    "table": lambda score, b, h, q, k: score + TABLE[h, q - k],
    "table_of_16_bits": lambda score, b, h, q, k: HALF[h, q - k + 40] * 2 + score,
    "pairs": lambda score, b, h, q, k: score * PAIRS[b, h, q, k],
    "alibi": lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(),
    "softcap": lambda score, b, h, q, k: 3 * torch.tanh(score / 3),
    "hides": lambda score, b, h, q, k: torch.where((q >= k) & ~(q - k > 20), score * FACTOR, -float("inf")),
    "marked": lambda score, b, h, q, k: torch.where(MARKED[h, k] | (q < 9) ^ (k > 30), score, -score),
    "rational": lambda score, b, h, q, k: (1 - score) + 2 / (3 + score * score) - (-score).square() / SLOPES[h].abs(),
    "curves": lambda score, b, h, q, k: torch.sigmoid(score) * score.clamp(-1, max=1) + torch.relu(score) ** 2,
    "exponentials": lambda score, b, h, q, k: score / (1 + torch.exp(-score.abs())) + torch.log(1 + score ** 2),
    "roots": lambda score, b, h, q, k: (score.square() + 1).sqrt() + (score ** 2 + 2) ** 0.5,
    "waves": lambda score, b, h, q, k: torch.sin(score) * torch.cos(2 * score),
    "rounded": lambda score, b, h, q, k: score.half().float() + (score * 4).int() * 0.1 + torch.exp(score.half()),
    "integers": of_integers, "maximum": maximum,
    "filled": lambda score, b, h, q, k: score * (q.new_ones(()) + h) / 2 + torch.zeros_like(score) + torch.where(
        k.new_ones((), dtype=torch.bool), k % 3, 0),
    "narrow": lambda score, b, h, q, k: score + ((k * 9).to(torch.int8).int() // 7 + (k - 20) % 3) * 0.01,
    "first": lambda score, b, h, q, k: torch.add(score, TABLE[-1, q]) + torch.logical_and(q > k, h < 2) * FACTOR,
    "no_score": lambda score, b, h, q, k: SLOPES[h],
    "nothing": lambda score, b, h, q, k: score,
}
ADDING = ("table", "table_of_16_bits", "alibi", "integers", "narrow", "first", "nothing")


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 40, 16, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def dense(mod, q, k, v):
    """The definition, by torch, which differentiates it."""
    indices = [torch.arange(size, dtype=torch.int32).view([-1 if dim == i else 1 for dim in range(4)])
               for i, size in enumerate((2, 4, 40, 40))]
    scores = mod(q @ k.mT * 0.25, *indices).expand(2, 4, 40, 40)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", MODS)
def test_a_traced_function_has_the_results_and_gradients_of_the_definition(name, backend):
    leaves = inputs()
    out = attention(*leaves, score_function=traced_score(MODS[name]), backend=backend)
    expected = dense(MODS[name], *leaves)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    made = [torch.autograd.grad(own.square().sum(), leaves, allow_unused=True) for own in (out, expected)]
    near = 1e-2 if name == "rounded" else 1e-4  # torch rounds that one's gradient to 16 bits, kernels do not
    for gradient, wanted in zip(*made, strict=True):
        torch.testing.assert_close(gradient, torch.zeros(2, 4, 40, 16) if wanted is None else wanted, rtol=10 * near,
                                   atol=near)


@pytest.mark.parametrize("name", MODS)
def test_flex_attention_computes_what_torchs_does(name):
    given = [tensor.detach() for tensor in inputs()]
    if name in ("maximum", "no_score", "rounded"):  # which torch's own does not map over pairs, or computes in pieces
        expected = dense(MODS[name], *given)
    else:
        expected = torch_flex.flex_attention(*given, score_mod=MODS[name])
    torch.testing.assert_close(flex_attention(*given, score_mod=MODS[name]), expected, rtol=1e-4, atol=1e-5)


def test_rows_of_a_tensor_are_read_by_one_bracket_after_another():
    given = [tensor.detach() for tensor in inputs()]
    torch.testing.assert_close(
        flex_attention(*given, score_mod=lambda score, b, h, q, k: score + PAIRS[b, h][q][k]),
        torch_flex.flex_attention(*given, score_mod=lambda score, b, h, q, k: score + PAIRS[b, h][q][k]),
        rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODS)
def test_what_adds_a_term_needs_no_derivative(name):
    assert (traced_score(MODS[name]).derivative is None) == (name in ADDING)


def test_double_precision_stays_double():
    leaves = inputs(torch.float64)
    out = flex_attention(*leaves, score_mod=MODS["exponentials"])
    torch.testing.assert_close(out, dense(MODS["exponentials"], *leaves), rtol=1e-9, atol=1e-9)


def test_what_does_the_same_has_one_code_and_its_tensors_are_read_as_they_are():
    """A call traces anew, so that nothing of an earlier call stays but kernels."""
    def by(table, factor):
        return lambda score, b, h, q, k: score * factor + table[h]

    slopes = SLOPES.clone()
    first, same = traced_score(by(slopes, 2.0)), traced_score(by(torch.ones(4), 2.0))
    assert first.code is same.code
    assert first.tensors[0] is slopes
    assert first.code is not traced_score(by(slopes, 3.0)).code
    assert first.code is not traced_score(by(torch.ones(5), 2.0)).code, "its ends are in the text"
    given = [tensor.detach() for tensor in inputs()]
    before = flex_attention(*given, score_mod=by(slopes, 2.0))
    torch.testing.assert_close(before, dense(by(slopes, 2.0), *given), rtol=1e-4, atol=1e-5)
    clear_caches()
    torch.testing.assert_close(attention(*given, score_function=first), before)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_an_index_past_the_ends_reads_the_last_element(backend):
    """Of pairs that a mask hides it may be any; where torch would refuse, nothing outside of the tensor is read."""
    given, short = [tensor.detach() for tensor in inputs()], TABLE[:, :10].contiguous()
    out = attention(*given, score_function=traced_score(lambda score, b, h, q, k: score + short[h, q - k]),
                    backend=backend)
    expected = dense(lambda score, b, h, q, k: score + short[h, torch.where(q < k, q - k + 10, q - k).clamp(0, 9)],
                     *given)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mod", "reason"), [
    (lambda s, b, h, q, k: s if q > k else 0.0,
     "a decision by a value (if, and, or, not, int, float, range); use torch.where, &, | and ~"),
    (lambda s, b, h, q, k: s * float(h),
     "a decision by a value (if, and, or, not, int, float, range); use torch.where, &, | and ~"),
    (lambda s, b, h, q, k: torch.erf(s), "erf(Symbol)"),
    (lambda s, b, h, q, k: s.erf(), ".erf"),
    (lambda s, b, h, q, k: s.shape, ".shape"),
    (lambda s, b, h, q, k: s ** 5, "pow(Symbol, int)"),
    (lambda s, b, h, q, k: torch.add(s, q, alpha=2), "add(Symbol, Symbol, alpha)"),
    (lambda s, b, h, q, k: s + TABLE[h], "a tensor of shape (4, 90) and torch.float32, read by 1 indices"),
    (lambda s, b, h, q, k: s + TABLE[h, :], "an index slice(None, None, None)"),
    (lambda s, b, h, q, k: s + TABLE[h, s], "an index torch.float32"),
    (lambda s, b, h, q, k: s + TABLE[h, k].to(torch.complex64), "to(torch.complex64)"),
    (lambda s, b, h, q, k: s % 2, "mod of torch.float32"),
    (lambda s, b, h, q, k: s * ((q > k) + (h > 2)), "add of torch.bool"),
    (lambda s, b, h, q, k: s * ~q, "not_ of what is no comparison"),
    (lambda s, b, h, q, k: s * torch.logical_or(q, k), "logical_or of what is no comparison"),
    (lambda s, b, h, q, k: torch.where(q, s, 0.0), "where of a condition that is no comparison"),
    (lambda s, b, h, q, k: s + "1", "a str"),
    (lambda s, b, h, q, k: 0.0, "a result 0.0 that is the same for all pairs"),
])
def test_what_has_no_text_is_refused_by_its_name(mod, reason):
    with pytest.raises(UnsupportedProblem) as caught:
        traced_score(mod)
    assert str(caught.value).startswith(
        f"score_mod <lambda> has what no Triton is made of: {reason}. Allowed are arithmetic, comparisons, "
        "torch.where, functions of one number, and tensors read at positions; a tilewise.functions.ScoreFunction has "
        "any formula.")


def test_a_tensor_that_wants_a_gradient_or_is_not_contiguous_is_refused_as_any_functions_is():
    for table, message in ((TABLE.clone().requires_grad_(), "requires a gradient"), (TABLE.mT, "contiguous")):
        with pytest.raises(InvalidInput, match=rf"score_function: tensors\[0\].*{message}"):
            flex_attention(*inputs(), score_mod=lambda score, b, h, q, k, table=table: score + table[h, 0])
    with pytest.raises(IndexError, match="of a tensor of shape"):
        traced_score(lambda score, b, h, q, k: score + TABLE[h, 90])


def test_a_symbol_does_not_outlive_its_call():
    kept = []
    traced_score(lambda score, b, h, q, k: kept.append(score) or score)
    with pytest.raises(Exception, match="a symbol that was kept beyond its call"):
        kept[0] + 1


def test_threads_trace_by_themselves():
    started, failures = threading.Barrier(2), []

    def trace(table):
        def mod(score, b, h, q, k):
            started.wait(10)
            return score + table[h]

        function = traced_score(mod)
        if len(function.tensors) != 1 or function.tensors[0] is not table:
            failures.append(function)

    threads = [threading.Thread(target=trace, args=(torch.zeros(4),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_takes_what_was_traced_outside():
    torch._dynamo.reset()
    given, score = [tensor.detach() for tensor in inputs()], traced_score(MODS["softcap"])
    compiled = torch.compile(lambda *qkv: flex_attention(*qkv, score_mod=score), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), flex_attention(*given, score_mod=score))
    torch._dynamo.reset()
    with pytest.raises(UnsupportedProblem, match=r"of Python's own inside torch\.compile; allowed there are None"):
        torch.compile(lambda *qkv: flex_attention(*qkv, score_mod=MODS["table"]), backend="aot_eager")(*given)
    torch._dynamo.reset()


def test_every_operation_is_traced_by_a_test():
    """Beside the results above: each one has as many slopes as arguments that may be a score, or none."""
    for name, operation in OPERATIONS.items():
        count = sum(f"{{{i}}}" in operation.triton for i in range(3))
        assert len(operation.slopes) in (0, count), name
