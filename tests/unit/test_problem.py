"""The validated problem: every message of its checks, equality and hash, strides, the spans that are read."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given

from tilewise.errors import InvalidInput
from tilewise.masks import Mask, Span, causal, window
from tilewise.problem import AttentionProblem, dense_strides, padded_dim
from tilewise.problem.options import Operands, OperandSpec, ScoreSettings
from tilewise.problem.sequences import DENSE, Sequences
from tilewise.testing.strategies import LENGTHS, masks

_NO_MASK = Mask()


def _tensors(q=(2, 4, 6, 8), k=(2, 2, 5, 8), v=(2, 2, 5, 3), **options):
    return tuple(torch.zeros(shape, **options) for shape in (q, k, v))


def _problem(*, mask=_NO_MASK, **shapes):
    return AttentionProblem.from_tensors(*_tensors(**shapes), mask=mask)


def documents_operands():
    return Operands(documents_q=torch.zeros(1, 4, 6, dtype=torch.int32),
                    documents_k=torch.zeros(2, 4, 5, dtype=torch.int32))


def _replaced(index, tensor):
    tensors = list(_tensors())
    tensors[index] = tensor
    return tensors


def test_sizes_come_from_the_tensors():
    problem = _problem()
    sizes = problem.b, problem.hq, problem.hk, problem.sq, problem.sk, problem.d, problem.dv
    assert sizes == (2, 4, 2, 6, 5, 8, 3)
    assert problem.group == 2
    assert problem.scale == 1 / math.sqrt(8)
    assert problem.lse_dtype is torch.float32
    assert AttentionProblem.from_tensors(*_tensors(dtype=torch.float64)).lse_dtype is torch.float64


@pytest.mark.parametrize(("index", "tensor", "message"), [
    (0, [1.0], "q is a list; allowed is a torch.Tensor of shape (b, h, s, d)."),
    (2, None, "v is a NoneType; allowed is a torch.Tensor of shape (b, h, s, d)."),
    (0, torch.zeros(4, 6, 8), "q has shape (4, 6, 8); allowed are 4 dims (b, h, s, d)."),
    (1, torch.zeros(1, 2, 2, 5, 8), "k has shape (1, 2, 2, 5, 8); allowed are 4 dims (b, h, s, d)."),
    (2, torch.zeros(2, 2, 5, 3, dtype=torch.int32),
     "v has dtype torch.int32; allowed are torch.float16, torch.bfloat16, torch.float32, torch.float64."),
    (0, torch.zeros(2, 4, 6, 0), "q has head dim 0; allowed are 1 and more."),
    (2, torch.zeros(2, 2, 5, 0), "v has head dim 0; allowed are 1 and more."),
    (1, torch.zeros(2, 2, 5, 8, dtype=torch.float16),
     "k has dtype torch.float16 and q has torch.float32: cast them to one dtype."),
    (2, torch.zeros(2, 2, 5, 3, device="meta"), "v is on meta and q is on cpu: move them to one device."),
    (1, torch.zeros(3, 2, 5, 8), "k has batch size 3 and q has 2: they must be equal."),
    (2, torch.zeros(1, 2, 5, 3), "v has batch size 1 and q has 2: they must be equal."),
    (1, torch.zeros(2, 2, 5, 9), "k has head dim 9 and q has 8: they must be equal (v's may differ)."),
    (2, torch.zeros(2, 4, 5, 3), "v has 4 heads and k has 2: they must be equal."),
    (2, torch.zeros(2, 2, 6, 3), "v has 6 positions and k has 5: they must be equal."),
    (0, torch.zeros(2, 3, 6, 8),
     "k has 2 heads and q has 3: q heads must be a multiple of k heads. Did you transpose (b, h, s, d)?"),
])
def test_message_names_the_argument_and_what_is_allowed(index, tensor, message):
    with pytest.raises(InvalidInput) as caught:
        AttentionProblem.from_tensors(*_replaced(index, tensor))
    assert str(caught.value) == message


def test_no_key_heads_raise():
    with pytest.raises(InvalidInput, match="k has 0 heads and q has 4"):
        _problem(k=(2, 0, 5, 8), v=(2, 0, 5, 3))


@pytest.mark.parametrize("scale", [0.0, 1e-46, 2.0**-127, 1e39, -1.0, math.inf, math.nan, True, "0.5",
                                   torch.tensor(0.5)])
def test_scale_that_is_no_positive_number_raises(scale):
    with pytest.raises(InvalidInput) as caught:
        AttentionProblem.from_tensors(*_tensors(), scale=scale)
    assert str(caught.value) == f"scale is {scale!r}; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d)."


def test_scale_may_be_any_positive_number():
    assert AttentionProblem.from_tensors(*_tensors(), scale=2).scale == 2.0


def test_unequal_lengths_without_an_alignment_raise():
    with pytest.raises(InvalidInput, match="q has 6 positions and k has 5: the mask is ambiguous"):
        _problem(mask=causal())


def test_a_refused_call_is_refused_again():
    """The checks are cached by their arguments: an error must not become a result the second time."""
    for _ in range(2):
        with pytest.raises(InvalidInput, match="q has head dim 0"):
            _problem(q=(2, 4, 6, 0))


def test_equal_calls_are_one_value():
    a, b = _problem(mask=window(1, 2, "top_left")), _problem(mask=window(1, 2, "top_left"))
    assert a == b
    assert hash(a) == hash(b)
    assert {a: "plan"}[b] == "plan"


@pytest.mark.parametrize("other", [
    _problem(q=(2, 4, 7, 8)),
    _problem(mask=causal("top_left")),
    AttentionProblem.from_tensors(*_tensors(dtype=torch.float16)),
    AttentionProblem.from_tensors(*_tensors(), scale=0.5),
    AttentionProblem.from_tensors(*_tensors(), deterministic=True),
    AttentionProblem.from_tensors(_tensors()[0].transpose(1, 2).contiguous().transpose(1, 2), *_tensors()[1:]),
    _problem().backward(lse_grad=False),
    _problem().backward(lse_grad=True),
    AttentionProblem.from_tensors(*_tensors(), settings=ScoreSettings(max_logit=True)),
    AttentionProblem.from_tensors(*_tensors(), Operands(sinks=torch.zeros(4))),
    AttentionProblem.from_tensors(*_tensors(), Operands(seqlens_q=torch.tensor([3, 4]))),
    AttentionProblem.from_tensors(*_tensors(), documents_operands()),
], ids=["length", "mask", "dtype", "scale", "deterministic", "strides", "backward", "lse_grad", "max_logit", "sinks",
        "seqlens", "documents"])
def test_a_call_that_differs_in_one_thing_is_another_value(other):
    assert other != _problem()
    assert hash(other) != hash(_problem())


def test_backward_keeps_everything_but_the_direction():
    backward = _problem().backward(lse_grad=True)
    assert (backward.direction, backward.lse_grad) == ("backward", True)
    assert backward.q_strides == _problem().q_strides
    assert backward is _problem().backward(lse_grad=True), "looked up, not rebuilt, at every call"


def test_out_is_stored_in_the_order_of_q():
    q, k, v = _tensors()
    assert AttentionProblem.from_tensors(q, k, v).out_strides == (4 * 6 * 3, 6 * 3, 3, 1)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert AttentionProblem.from_tensors(transposed, k, v).out_strides == (6 * 4 * 3, 3, 4 * 3, 1)


ORDERS = list(permutations(range(3)))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_dense_strides_cover_every_element_once(order):
    for order_of in (_lying(order, (4, 2, 4, 3)).stride(), (0, 0, 0, 0)):
        strided = torch.empty_strided((4, 2, 4, 3), dense_strides((4, 2, 4, 3), order_of))
        offsets = torch.zeros(4 * 2 * 4 * 3).scatter_(0, _offsets(strided), 1.0)
        assert offsets.all()


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 4, 8), (3, 2, 5, 1), (1, 3, 4, 8), (2, 1, 4, 8), (2, 3, 1, 8), (0, 3, 4, 8),
                                   (2, 3, 0, 8)], ids=str)
def test_dense_strides_keep_every_order_of_b_h_and_s(sizes, order):
    """Other head dims, as v's, and slices of a wider projection lie in the same order."""
    lying, wider = _lying(order, sizes), _lying(order, (*sizes[:3], 3 * sizes[3]))[..., :sizes[3]]
    for tensor in (lying, wider):
        for d in (sizes[3], 6):
            made = torch.empty_strided((*sizes[:3], d), dense_strides((*sizes[:3], d), tensor.stride()))
            assert made.permute(*order, 3).is_contiguous()


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("expanded", [None, 0, 1, 2])
def test_dense_strides_are_those_of_torchs_own_empty_like(order, expanded):
    sizes = (2, 3, 4, 8)
    whole = _lying(order, (*sizes[:3], 16))[..., :8]
    if expanded is not None:
        whole = whole.narrow(expanded, 0, 1).expand(sizes)
        assert whole.stride(expanded) == 0
    assert dense_strides(sizes, whole.stride()) == torch.empty_like(whole).stride()


def _lying(order, sizes):
    """Return a tensor of these sizes whose dims b, h and s lie in memory in that order, d innermost."""
    order = (*order, 3)
    stored = torch.empty([sizes[dim] for dim in order], device="meta")
    return stored.permute([order.index(dim) for dim in range(4)])


def _offsets(tensor):
    steps = [torch.arange(size) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(torch.meshgrid(*steps, indexing="ij")).flatten()


@pytest.mark.parametrize(("d", "width"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (192, 256), (256, 256)])
def test_padded_dim_is_the_next_power_of_two_from_16_up(d, width):
    assert padded_dim(d) == width


@pytest.mark.parametrize(("d", "dv", "width", "tail", "tail_width"), [
    (40, 24, 64, 0, 0), (24, 40, 64, 0, 0), (257, 8, 512, 0, 0), (512, 512, 512, 0, 0), (513, 8, 512, 1, 64),
    (576, 512, 512, 64, 64), (8, 300, 512, 0, 0),
])
def test_head_dims_past_the_widest_tile_are_a_tail(d, dv, width, tail, tail_width):
    problem = _problem(q=(1, 1, 2, d), k=(1, 1, 2, d), v=(1, 1, 2, dv))
    assert (problem.width, problem.tail, problem.tail_width) == (width, tail, tail_width)


@given(masks(), LENGTHS, LENGTHS)
def test_spans_that_are_read_are_those_of_the_dense_mask(mask, query_length, key_length):
    problem = _problem(q=(1, 1, query_length, 4), k=(1, 1, key_length, 4), v=(1, 1, key_length, 4), mask=mask)
    visible = mask.visible(query_length, key_length)
    for span, seen in ((problem.seen_keys, visible.any(0)), (problem.seeing_queries, visible.any(1))):
        places = seen.nonzero().flatten().tolist()
        # From the first to the last: sink tokens leave a hole.
        assert list(range(span.start, span.stop)) == (list(range(places[0], places[-1] + 1)) if places else [])
    assert problem.is_empty == (not visible.any())


@pytest.mark.parametrize("shapes", [
    {"q": (0, 4, 6, 8), "k": (0, 2, 5, 8), "v": (0, 2, 5, 3)},
    {"q": (2, 0, 6, 8)},
    {"q": (2, 4, 0, 8)},
    {"k": (2, 2, 0, 8), "v": (2, 2, 0, 3)},
], ids=["no_batch", "no_heads", "no_queries", "no_keys"])
def test_a_problem_without_pairs_is_empty(shapes):
    assert _problem(**shapes).is_empty
    assert not _problem().is_empty


def test_first_and_last_rows_are_cut_from_a_problem_with_blind_queries_and_unseen_keys():
    blind = _problem(q=(1, 1, 9, 4), k=(1, 1, 4, 4), v=(1, 1, 4, 4), mask=causal("bottom_right"))
    assert (blind.seeing_queries, blind.seen_keys) == (Span(5, 9), Span(0, 4))
    unseen = _problem(q=(1, 1, 4, 4), k=(1, 1, 9, 4), v=(1, 1, 9, 4), mask=window(1, 0, "bottom_right"))
    assert (unseen.seeing_queries, unseen.seen_keys) == (Span(0, 4), Span(4, 9))


@pytest.mark.parametrize(("problem", "text"), [
    (_problem(), "forward b2 h4/2 s6x5 d8/3 float32 no mask on cpu"),
    (_problem(mask=causal("top_left")).backward(lse_grad=False),
     "backward b2 h4/2 s6x5 d8/3 float32 causal(alignment='top_left') on cpu"),
    (_problem(q=(1, 2, 5, 8), k=(1, 2, 5, 8), v=(1, 2, 5, 8)), "forward b1 h2 s5x5 d8 float32 no mask on cpu"),
    (AttentionProblem.from_tensors(*_tensors(), Operands(seqlens_q=torch.tensor([3, 4]))),
     "forward b2 h4/2 s6x5 d8/3 float32 no mask, padded sequences on cpu"),
    (AttentionProblem.from_tensors(*_tensors(), documents_operands()),
     "forward b2 h4/2 s6x5 d8/3 float32 no mask, documents on cpu"),
])
def test_problem_prints_in_one_line(problem, text):
    assert str(problem) == text


_PACKED_SHAPES = {"q": (1, 4, 6, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 3)}
_BORDERS = {"cu_seqlens_q": torch.tensor([0, 2, 2, 6], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 1, 3, 5])}


def _packed(*, mask=_NO_MASK, longest=(None, None), shapes=_PACKED_SHAPES, **operands):
    """The problem of three packed sequences; operands as given replace the borders."""
    return AttentionProblem.from_tensors(*_tensors(**shapes), Operands(**_BORDERS | operands), mask=mask,
                                         settings=ScoreSettings(longest=longest))


def test_lengths_are_described_without_their_values():
    problem = _packed(seqlens_k=torch.tensor([1, 1, 1]), longest=(4, 2), bias=torch.zeros(3, 1, 4, 2))
    assert problem.sequences == Sequences(
        3, OperandSpec((4,), (1,), torch.int32), OperandSpec((4,), (1,), torch.int64), None,
        OperandSpec((3,), (1,), torch.int64), 4, 2)
    assert problem.sequences.are_data
    assert problem.pairs == (3, 4, 4, 2)
    assert str(problem) == ("forward b1 h4/2 s6x5 d8/3 float32 no mask, bias 3x1x4x2, 3 packed sequences on cpu")
    assert _packed(cu_seqlens_q=torch.tensor([0, 1, 1, 6], dtype=torch.int32)) == _packed()
    assert _packed().pairs == (3, 4, 6, 5)
    assert _problem().sequences is DENSE
    assert (_problem().pairs, str(DENSE)) == ((2, 4, 6, 5), "")


@pytest.mark.parametrize("lengths", [{"seqlens_q": torch.tensor([3, 4])}, {"seqlens_k": torch.tensor([3, 4])}], ids=str)
def test_where_lengths_are_data_everything_may_be_read(lengths):
    mask = window(0, 0, "bottom_right")
    problem = AttentionProblem.from_tensors(*_tensors(), Operands(**lengths), mask=mask)
    assert (problem.seen_keys, problem.seeing_queries) == (Span(0, 5), Span(0, 6))
    assert not problem.is_empty
    assert AttentionProblem.from_tensors(*_tensors(q=(2, 4, 0, 8)), Operands(**lengths), mask=mask).is_empty


@pytest.mark.parametrize(("make", "message"), [
    (lambda: _packed(cu_seqlens_k=None), "cu_seqlens_q is given and cu_seqlens_k is missing: packed sequences need "
                                         "both."),
    (lambda: _packed(cu_seqlens_q=None), "cu_seqlens_q is missing and cu_seqlens_k is given: packed sequences need "
                                         "both."),
    (lambda: _packed(cu_seqlens_k=torch.tensor([0, 1, 5])),
     "cu_seqlens_k has shape (3,); allowed is (sequences + 1=4)."),
    (lambda: _packed(cu_seqlens_q=torch.tensor([[0, 1]])),
     "cu_seqlens_q has shape (1, 2); allowed is (sequences + 1=2)."),
    (lambda: _packed(cu_seqlens_q=torch.tensor([0.0, 1.0, 2.0, 3.0])),
     "cu_seqlens_q has dtype torch.float32; allowed are torch.int32, torch.int64."),
    (lambda: _packed(seqlens_q=torch.tensor([1, 2])), "seqused_q has shape (2,); allowed is (sequences=3)."),
    (lambda: _packed(seqlens_k=torch.tensor([1, 2, 3], device="meta")),
     "seqused_k is on meta and q is on cpu: move them to one device."),
    (lambda: _packed(seqlens_k=torch.arange(6)[::2]),
     "seqused_k has stride 2; allowed is 1: call contiguous() on it."),
    (lambda: _packed(**dict.fromkeys(_BORDERS, torch.zeros(0, dtype=torch.int32))),
     "cu_seqlens_q has shape (0,) and q a batch size of 1; allowed are (sequences + 1,) and 1: packed sequences have "
     "no other batch dim."),
    (lambda: _packed(shapes={"q": (2, 4, 6, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 3)}),
     "cu_seqlens_q has shape (4,) and q a batch size of 2; allowed are (sequences + 1,) and 1: packed sequences have "
     "no other batch dim."),
    (lambda: _packed(mask=causal()),
     "mask is causal() and names no alignment, but lengths are data (cu_seqlens_q, cu_seqlens_k): whether those of "
     "queries and keys are equal, the device alone knows. Pass alignment='top_left' or 'bottom_right'."),
    (lambda: _packed(alibi_slopes=torch.zeros(1, 4)),
     "alibi_slopes are given with lengths that are data and no alignment: the distance of a query and a key is "
     "ambiguous. Pass mask=window(None, None, alignment) or another mask with alignment='top_left' or 'bottom_right'."),
    (lambda: _packed(bias=torch.zeros(1, 1, 4, 1)),
     "bias has shape (1, 1, 4, 1) and sequences are packed: pass max_seqlen_q as an integer, the size of its dim 2."),
    (lambda: _packed(mask=_NO_MASK, longest=(4, None), bias=torch.zeros(1, 1, 4, 3)),
     "bias has shape (1, 1, 4, 3) and sequences are packed: pass max_seqlen_k as an integer, the size of its dim 3."),
    (lambda: _packed(longest=(4, 2), bias=torch.zeros(3, 1, 4, 5)),
     "bias has shape (3, 1, 4, 5); allowed is (b=3, hq=4, sq=4, sk=2), or 1 in place of a size."),
    (lambda: AttentionProblem.from_tensors(*_tensors(), Operands(seqlens_q=torch.tensor([1, 2, 3]))),
     "seqlens_q has shape (3,); allowed is (b=2)."),
    (lambda: AttentionProblem.from_tensors(*_tensors(), documents_operands()._replace(documents_k=None)),
     "documents_q and documents_k: one is given without the other; allowed are both, or none."),
    (lambda: AttentionProblem.from_tensors(*_tensors(), documents_operands()._replace(documents_q=torch.zeros(
        1, 4, 7, dtype=torch.int32))),
     "documents: ids has shape (1, 7); allowed is (b=2, sq=6), or 1 in place of b."),
])
def test_message_about_lengths_names_what_was_got_and_what_is_allowed(make, message):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value) == message


def test_lengths_that_are_data_need_no_alignment_where_nothing_is_hidden_by_position():
    assert _packed(mask=Mask(sink_tokens=4)).sequences.are_data
