"""The fast path of a plain call: who takes it, who must not, and that nobody can tell the two apart by results."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilewise import Mask, attention, attention_varlen, causal, documents, prefix, window
from tilewise.autograd import fast_path
from tilewise.backends.base import BindingBackend
from tilewise.errors import TilewiseError
from tilewise.settings import BackendScope
from tilewise.support.caches import clear_caches
from unit.binding_double import Bound, binding, by_operators, paths_of, tensors_of


@pytest.fixture(autouse=True)
def bound(monkeypatch):
    yield from binding(monkeypatch)


def test_the_fake_is_what_a_backend_that_binds_is(bound):
    assert isinstance(bound, BindingBackend)


@pytest.mark.parametrize("options", [
    {}, {"mask": causal()}, {"mask": window(2, 1)}, {"scale": 0.25}, {"deterministic": True}, {"deterministic": False},
    {"backend": "reference"}, {"mask": Mask(), "dropout_seed": 3}], ids=str)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_plain_call_takes_it_and_gives_the_same_bits(bound, monkeypatch, options, recorded):
    tensors = tensors_of(requires_grad=recorded)
    for _ in range(2):
        paths, out = paths_of(bound, lambda: attention(*tensors, **options))
        assert paths == ["fast"]
    assert bound.binds == 1
    assert out.requires_grad == recorded
    assert torch.equal(out, by_operators(monkeypatch, lambda: attention(*tensors, **options)))


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False),
                                    (False, True, True)])
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients_are_the_same(bound, monkeypatch, wanted, through):
    def gradients():
        tensors = [tensor.requires_grad_(want) for tensor, want in zip(tensors_of(), wanted, strict=True)]
        out, lse = attention(*tensors, return_aux=("lse",))
        total = {"out": out.sum(), "lse": lse.sum(), "both": (out**2).sum() + lse.sum()}[through]
        total.backward()
        return [tensor.grad for tensor in tensors]

    expected = by_operators(monkeypatch, gradients)
    paths, made = paths_of(bound, gradients)
    assert paths == ["fast", "operator backward" if through == "lse" else "fast backward"]
    for gradient, other in zip(made, expected, strict=True):
        assert (gradient is None and other is None) or torch.equal(gradient, other)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.names.append(str(operator))
        return operator(*arguments, **(named or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, arguments=(), named=None):
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_mode_sees_the_operator_of_each_pass(bound, mode, recorded):
    attention(*tensors_of())
    tensors = tensors_of(requires_grad=recorded)
    with mode() as seen:
        out = attention(*tensors)
        if recorded:
            out.backward(torch.ones_like(out))
    passes = ("forward", "backward") if recorded and mode is Seen else ("forward",)
    for side in passes:
        assert any(f"tilewise.attention_{side}_plain" in name for name in seen.names)
    assert "fast" not in bound.paths[1:]


def test_a_mode_that_is_entered_for_the_backward_pass_sees_it(bound):
    tensors = tensors_of(requires_grad=True)
    out = attention(*tensors)
    with Seen() as seen:
        out.backward(torch.ones_like(out))
    assert bound.paths == ["fast", "operator backward"]
    assert "tilewise.attention_backward_plain.default" in seen.names


def test_flops_are_counted(bound):
    attention(*tensors_of())
    with FlopCounterMode(display=False) as counter:
        attention(*tensors_of())
    assert counter.get_total_flops() == 4 * 4 * 8 * 8 * 16


def test_a_profiler_shows_the_operators(bound):
    tensors = tensors_of(requires_grad=True)
    attention(*tensors)
    with profile() as profiled:
        out = attention(*tensors)
        out.backward(torch.ones_like(out))
    names = {event.key for event in profiled.key_averages()}
    assert {"tilewise::attention_forward_plain", "tilewise::attention_backward_plain"} <= names
    assert bound.paths == ["fast", "operator", "operator backward"]


def test_a_profiler_of_every_thread_shows_them_too(bound):
    attention(*tensors_of())
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(experimental_config=every_thread), ThreadPoolExecutor(1) as pool:
        attention(*tensors_of())
        pool.submit(attention, *tensors_of()).result()
    assert bound.paths == ["fast", "operator", "operator"]


def test_a_tracer_records_the_operator():
    tensors = tensors_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q, k, v: attention(q, k, v), tensors, check_trace=False)
    assert "tilewise::attention_forward_plain" in str(traced.graph)


def test_a_level_of_forward_mode_goes_the_operators(bound):
    tensors = tensors_of()
    with forward_ad.dual_level():
        attention(*tensors)
    assert bound.paths == ["operator"]


def outcome(call):
    try:
        return call()
    except Exception as error:  # any: that it is the same is the claim
        return type(error), str(error)


def is_same(made, expected):
    if isinstance(expected, torch.Tensor):
        return isinstance(made, torch.Tensor) and torch.equal(made, expected)
    if isinstance(expected, tuple):
        return len(made) == len(expected) and all(map(is_same, made, expected))
    return made == expected


class Subclass(torch.Tensor):
    """Its operators are seen by ``__torch_function__``."""


def misaligned(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def turned(tensor):
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


@pytest.mark.parametrize("other", [
    lambda tensor: tensor.as_subclass(Subclass), misaligned, turned, lambda tensor: torch.nn.Parameter(tensor),
    lambda tensor: tensor.to("meta"), lambda tensor: tensor.to_sparse(), lambda tensor: tensor.double(),
    lambda tensor: torch._efficientzerotensor(tensor.shape), lambda tensor: tensor[:, :3], lambda tensor: tensor[0],
    lambda tensor: tensor.int(), lambda tensor: tensor.tolist(),
], ids=["subclass", "misaligned", "negative", "parameter", "meta", "sparse", "dtype", "zeros", "heads", "rank",
        "integers", "list"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_of_other_kinds_mean_what_they_mean_on_the_operators(bound, monkeypatch, other, place):
    def call():
        tensors = tensors_of(sq=8, hk=4)
        tensors[place] = other(tensors[place])
        with torch.no_grad():
            return attention(*tensors)

    expected = outcome(lambda: by_operators(monkeypatch, call))
    for _ in range(2):
        assert is_same(outcome(call), expected)
    assert "fast" not in bound.paths


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (1, 4, 0, 16)])
def test_tensors_without_an_element_go_the_operators(bound, shape):
    _, k, v = tensors_of()
    q = torch.zeros(shape)
    assert attention(q, k[:shape[0]], v[:shape[0]], mask=Mask()).shape == shape
    assert bound.paths == ["operator"]


@pytest.mark.parametrize("offset", [0, 1])
def test_a_tensor_whose_storage_was_emptied_goes_the_operators(offset):
    """What FSDP leaves of a parameter: the address is 0, or its offset in the storage."""
    attention(*tensors_of())
    q = torch.zeros(1 + offset, 4, 8, 16)[offset:]
    q.untyped_storage().resize_(0)
    assert q.data_ptr() in (0, q.nbytes)
    assert fast_path.attend(q, *tensors_of()[1:], None, (None, None, None), with_lse=True) is None


def test_transforms_of_functorch_are_as_on_the_operators(bound, monkeypatch):
    q, k, v = tensors_of()
    kept = []
    calls = [lambda: torch.func.grad(lambda q: attention(q, k, v).sum())(q),
             lambda: torch.func.vmap(lambda q: attention(q, k, v))(q[None]),
             lambda: torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,)),
             lambda: torch.func.grad(lambda q: (kept.append(q), q.sum())[1])(q) * 0 + attention(kept[-1], k, v)]
    for call in calls:
        expected = outcome(lambda call=call: by_operators(monkeypatch, call))
        assert is_same(outcome(call), expected)
    assert "fast" not in bound.paths


OPERANDS = [
    {"mask": prefix(2)}, {"softcap": 2.0}, {"sinks": torch.zeros(4)}, {"bias": torch.zeros(8, 8)},
    {"alibi_slopes": torch.zeros(4)}, {"dropout_p": 0.5, "dropout_seed": 3}, {"return_aux": ("max_logit",)},
    {"scale": 1}, {"seqlens_k": torch.tensor([3])}, {"mask": torch.ones(8, 8, dtype=torch.bool)},
    {"mask": documents(torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])), "softcap": 2.0, "return_aux": ("lse",)}]


@pytest.mark.parametrize("options", OPERANDS, ids=str)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_call_with_options_takes_it_and_gives_the_same_bits(bound, monkeypatch, options, recorded):
    tensors = tensors_of(requires_grad=recorded)
    expected = by_operators(monkeypatch, lambda: attention(*tensors, **options))
    for _ in range(2):
        paths, made = paths_of(bound, lambda: attention(*tensors, **options))
        assert paths == ["fast"]
        assert is_same(made, expected)
    assert (made[0] if isinstance(made, tuple) else made).requires_grad == recorded
    assert bound.binds == 1


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("wanted", [(True,) * 6, (False, False, False, True, False, True),
                                    (True, False, True, False, True, False)])
def test_gradients_of_operands_are_the_same(bound, monkeypatch, wanted, through):
    def gradients():
        generator = torch.Generator().manual_seed(1)
        operands = [torch.randn(shape, generator=generator) for shape in ((1, 4, 8, 8), (4,), (4,))]
        given = [tensor.requires_grad_(want) for tensor, want in zip([*tensors_of(), *operands], wanted, strict=True)]
        out, lse = attention(*given[:3], bias=given[3], alibi_slopes=given[4], sinks=given[5], return_aux=("lse",))
        total = {"out": out.sum(), "lse": lse.sum(), "both": (out**2).sum() + lse.sum()}[through]
        total.backward()
        return [tensor.grad for tensor in given]

    expected = by_operators(monkeypatch, gradients)
    paths, made = paths_of(bound, gradients)
    assert paths == ["fast", "operator backward"]
    assert [gradient is not None for gradient in made] == list(wanted)
    for gradient, other in zip(made, expected, strict=True):
        assert (gradient is None and other is None) or torch.equal(gradient, other)


@pytest.mark.parametrize("recorded", [False, True])
def test_packed_sequences_take_it_without_a_gradient(bound, monkeypatch, recorded):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 16, generator=generator).requires_grad_(recorded) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 3, 9], dtype=torch.int32)

    def call():
        return attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens, mask=causal(), return_aux=("lse",))

    expected = by_operators(monkeypatch, call)
    for _ in range(2):
        paths, made = paths_of(bound, call)
        assert paths == ["fast"]
        assert is_same(tuple(made), tuple(expected))
        assert [row.shape for row in made] == [(9, 4, 16), (4, 9)]


def test_operands_that_differ_in_one_fact_are_bound_apart(bound, monkeypatch):
    """A tensor that is there in another place, of another layout or shared between two places is another call."""
    tensors, lengths = tensors_of(), torch.tensor([3])
    biases = torch.randn(1, 4, 8, 8), torch.randn(4, 8, 8).mT.contiguous().mT[None], torch.randn(1, 1, 8, 8)
    calls = [*({"bias": bias} for bias in biases), {"mask": biases[0] > 0}, {"seqlens_k": lengths},
             {"seqlens_q": lengths}, {"seqlens_q": lengths, "seqlens_k": lengths},
             {"seqlens_q": lengths, "seqlens_k": lengths.clone()}, {"sinks": torch.randn(4)},
             {"alibi_slopes": torch.randn(4)}]
    for _ in range(2):
        for options in calls:
            expected = by_operators(monkeypatch, lambda options=options: attention(*tensors, **options))
            assert torch.equal(attention(*tensors, **options), expected)
    assert "fast" in bound.paths


@pytest.mark.parametrize("bias", [
    misaligned(torch.randn(1, 4, 8, 8)), torch.randn(1, 4, 8, 8).as_subclass(Subclass),
    torch._neg_view(torch.randn(1, 4, 8, 8))], ids=["misaligned", "subclass", "negative"])
def test_operands_of_other_kinds_go_the_operators(bound, monkeypatch, bias):
    tensors = tensors_of()
    attention(*tensors, bias=torch.randn(1, 4, 8, 8))
    bound.paths.clear()
    expected = by_operators(monkeypatch, lambda: attention(*tensors, bias=bias))
    assert torch.equal(attention(*tensors, bias=bias), expected)
    assert "fast" not in bound.paths


@pytest.mark.parametrize("options", [
    {"scale": True}, {"scale": "1"}, {"scale": 0.0}, {"scale": float("nan")}, {"deterministic": 1}, {"backend": "none"},
    {"backend": 3}, {"return_aux": None}, {"return_aux": "lse"}, {"return_aux": ["sum"]}, {"mask": 3},
    {"double_backward": 0}, {"dropout_p": 2.0}], ids=str)
def test_refusals_are_the_same(monkeypatch, options):
    q, k, v = tensors_of()
    attention(q, k, v, scale=1.0, deterministic=True)  # whose facts are equal to those of some
    expected = outcome(lambda: by_operators(monkeypatch, lambda: attention(q, k, v, **options)))
    assert issubclass(expected[0], TilewiseError)
    assert outcome(lambda: attention(q, k, v, **options)) == expected


def test_what_a_backend_refuses_is_refused_in_its_words(bound, monkeypatch):
    monkeypatch.setattr(Bound, "why_not", lambda self, problem: "is not for you")
    tensors = tensors_of()
    expected = outcome(lambda: by_operators(monkeypatch, lambda: attention(*tensors)))
    assert "is not for you" in expected[1]
    assert outcome(lambda: attention(*tensors)) == expected


def test_autocast_that_casts_nothing_is_no_hindrance(bound):
    tensors = tensors_of(torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        attention(*tensors).sum().backward()
        assert attention(*tensors_of()).dtype is torch.bfloat16
    assert bound.paths == ["fast", "fast backward", "operator"]


def test_calls_that_differ_in_one_fact_are_bound_apart(bound, monkeypatch):
    q, k, v = tensors_of()
    calls = [{}, {"scale": 0.5}, {"mask": causal()}, {"mask": causal("top_left")}, {"mask": window(1, 1)},
             {"deterministic": True}, {"backend": "triton"}]
    for _ in range(2):
        for options in calls:
            expected = by_operators(monkeypatch, lambda options=options: attention(q, k, v, **options))
            assert torch.equal(attention(q, k, v, **options), expected)
    assert bound.binds == len(calls)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attention(strided, k, v), attention(q, k, v))
    attention(q[:, :, :5], k, v)
    attention(*(tensor.double() for tensor in (q, k, v)))
    with BackendScope("cuda"):
        attention(q, k, v)
    monkeypatch.setenv("TILEWISE_BACKEND", "torch")
    attention(q, k, v)
    assert bound.binds == len(calls) + 5


@pytest.mark.parametrize("unpack", [
    lambda tensor: tensor.clone(), lambda tensor: tensor.mT.contiguous().mT, lambda tensor: torch.nn.Parameter(tensor),
    lambda tensor: misaligned(tensor)], ids=["copy", "layout", "parameter", "misaligned"])
def test_what_hooks_hand_back_is_looked_at(bound, monkeypatch, unpack):
    def gradients():
        tensors = tensors_of(requires_grad=True)
        out, lse = attention(*tensors, return_aux=("lse",))  # bound to what was saved
        (out.sum() + lse.sum()).backward()
        plain = [tensor.grad.clone() for tensor in tensors]
        with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            out, lse = attention(*tensors, return_aux=("lse",))
        (out.sum() + lse.sum()).backward()
        return [tensor.grad - first for tensor, first in zip(tensors, plain, strict=True)]

    expected = by_operators(monkeypatch, gradients)
    for _ in range(2):
        for gradient, other in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("kind", [torch.Tensor, Subclass])
def test_hooks_unpack_once_whichever_way_is_taken(bound, kind):
    """A checkpoint's refuses to do so twice."""
    unpacked = []

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor.as_subclass(kind)

    q, k, v = tensors_of()  # k and v come as they are unpacked; torch makes those anew that have a gradient
    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = attention(q.requires_grad_(), k, v)
    out.sum().backward()
    assert len(unpacked) == 5
    assert bound.paths == ["fast", "fast backward" if kind is torch.Tensor else "operator backward"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again(bound, reentrant):
    tensors = tensors_of(requires_grad=True)
    checkpoint(attention, *tensors, use_reentrant=reentrant).sum().backward()
    assert bound.paths == ["fast", "fast", "fast backward"]


@pytest.mark.parametrize("changed", range(5), ids=["q", "k", "v", "out", "lse"])
def test_what_was_saved_and_changed_is_refused_in_the_same_words(bound, monkeypatch, changed):
    def differentiate():
        tensors = [tensor * 1 for tensor in tensors_of(requires_grad=True)]
        out, lse = attention(*tensors, return_aux=("lse",))
        with torch.no_grad():
            (*tensors, out, lse)[changed].add_(1)
        (out.sum() + lse.sum()).backward()

    expected = outcome(lambda: by_operators(monkeypatch, differentiate))
    assert "modified by an inplace operation" in expected[1]
    assert outcome(differentiate) == expected
    assert bound.paths == ["operator", "fast"]


@pytest.mark.parametrize("return_aux", [(), ("lse",)])
def test_a_graph_is_the_same(bound, monkeypatch, return_aux):
    def graph():
        handed = []
        results = attention(*tensors_of(requires_grad=True), return_aux=return_aux)
        out = results[0] if return_aux else results
        out.grad_fn.register_prehook(lambda incoming: handed.append([dout is None for dout in incoming]))
        out.sum().backward()
        return out.grad_fn.name(), out.output_nr, len(out.grad_fn.next_functions), handed

    expected = by_operators(monkeypatch, graph)
    assert graph() == expected
    assert bound.paths == ["operator", "operator backward", "fast", "fast backward"]


def test_a_second_derivative_is_refused_in_the_same_words(monkeypatch):
    def twice():
        tensors = tensors_of(requires_grad=True)
        gradient, = torch.autograd.grad((attention(*tensors)**2).sum(), tensors[:1], create_graph=True)
        gradient.sum().backward()

    expected = outcome(lambda: by_operators(monkeypatch, twice))
    assert "double_backward=True" in expected[1]
    assert outcome(twice) == expected


def test_a_scope_holds_for_the_backward_pass(bound):
    tensors = tensors_of(requires_grad=True)
    with BackendScope("torch"):
        out = attention(*tensors)
    out.backward(torch.ones_like(out))
    assert [key[-1][-1] for key in fast_path._backward_plans] == ["torch"]


def test_each_backward_pass_follows_the_default_of_its_own_time(bound, monkeypatch):
    """A plan's second backward pass once ran by what its first had found, whatever the default had become."""
    tensors = tensors_of(requires_grad=True)
    for name in ("torch", "reference"):
        out = attention(*tensors)
        monkeypatch.setenv("TILEWISE_BACKEND", name)
        out.backward(torch.ones_like(out))
        monkeypatch.delenv("TILEWISE_BACKEND")
    assert [key[-1][-1] for key in fast_path._backward_plans] == ["torch", "reference"]


def test_choices_are_forgotten(bound):
    tensors = tensors_of(requires_grad=True)
    for binds in (2, 4):
        out = attention(*tensors)
        out.backward(torch.ones_like(out))
        assert bound.binds == binds
        clear_caches()
        assert not fast_path._plans
        assert not fast_path._backward_plans


def test_so_many_ways_are_kept(monkeypatch):
    monkeypatch.setattr(fast_path, "KEPT", 3)
    for sq in range(1, 9):
        attention(*tensors_of(sq=sq), mask=Mask())
        assert len(fast_path._plans) <= 3


def test_threads_share_the_paths(bound):
    sets = [tensors_of(sq=1 + n) for n in range(4)]
    expected = [attention(*tensors) for tensors in sets]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: attention(*sets[n % 4]), range(64)))
    assert all(torch.equal(out, expected[n % 4]) for n, out in enumerate(made))


def test_a_backend_that_binds_nothing_goes_the_operators(bound, monkeypatch):
    monkeypatch.setattr(Bound, "bind_forward", lambda self, problem: None)
    assert attention(*tensors_of()).shape == (1, 4, 8, 16)
    assert bound.paths == ["operator"]


def test_a_device_that_is_not_current_goes_the_operators(bound, monkeypatch):
    monkeypatch.setattr(fast_path, "is_current", lambda device: False)
    tensors = tensors_of(requires_grad=True)
    out = attention(*tensors)
    out.backward(torch.ones_like(out))
    assert bound.paths == ["operator", "operator backward"]
