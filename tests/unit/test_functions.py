"""Functions of the user's own: what they may be, how they are found again, what each message says."""

import copy
import gc
import pickle

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from conformance import functions as _functions
from conformance.functions import chosen, chosen_twin, damped, mask_functions, relative, relative_twin, score_functions
from tilewise import (
    InvalidInput,
    UnsupportedProblem,
    attention,
    attention_varlen,
    causal,
    explain,
    functions,
    prefixes,
    tree,
)
from tilewise.autograd.op import backward_op, forward_op
from tilewise.functions import MaskFunction, ScoreFunction, call_functions, code_of, pair_indices
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_SETTINGS, Operands, OperatorOptions
from tilewise.support.caches import clear_caches

# torch's own, of an autograd function that Dynamo instantiates.
_COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def _qkv(requires_grad=False, *, sq=6, sk=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)
            for shape in ((2, 4, sq, 8), (2, 2, sk, 8), (2, 2, sk, 8))]


def _even(batch, head, q_idx, k_idx):
    return (q_idx - k_idx) % 2 == 0


def _message(call):
    with pytest.raises(InvalidInput) as caught:
        call()
    return str(caught.value)


_TENSOR = torch.zeros(3)


@pytest.mark.parametrize(("make", "message"), [
    (ScoreFunction, "ScoreFunction has neither a triton nor a torch function; allowed is one of them, or both."),
    (MaskFunction, "MaskFunction has neither a triton nor a torch function; allowed is one of them, or both."),
    (lambda: ScoreFunction(relative_twin),
     "ScoreFunction: triton is a function; allowed is a function decorated with @triton.jit, or None."),
    (lambda: ScoreFunction(torch=3), "ScoreFunction: torch is a int; allowed is a function, or None."),
    (lambda: ScoreFunction(damped, derivative=relative_twin, tensors=(_TENSOR,)),
     "ScoreFunction: derivative is a function; allowed is a function decorated with @triton.jit, or None."),
    (lambda: ScoreFunction(relative),
     "ScoreFunction: triton takes 6 arguments; allowed are 5: score, batch, head, q_idx, k_idx, and one for each of "
     "the 0 tensors."),
    (lambda: ScoreFunction(damped, derivative=damped, tensors=(_TENSOR,)),
     "ScoreFunction: derivative takes 6 arguments; allowed are 7: dscore, score, batch, head, q_idx, k_idx, and one "
     "for each of the 1 tensors."),
    (lambda: MaskFunction(chosen, tensors=(_TENSOR, _TENSOR)),
     "MaskFunction: triton takes 5 arguments; allowed are 6: batch, head, q_idx, k_idx, and one for each of the 2 "
     "tensors."),
    (lambda: ScoreFunction(torch=relative_twin, tensors=[[1.0]]),
     "ScoreFunction: tensors[0] is a list; allowed is a torch.Tensor."),
    (lambda: ScoreFunction(torch=relative_twin, tensors=[_TENSOR]).with_tensors(),
     "ScoreFunction.with_tensors: got 0 tensors; allowed are 1, as many as it was made with."),
    (lambda: MaskFunction(torch=chosen_twin, tensors=[_TENSOR]).with_tensors(1.0),
     "MaskFunction: tensors[0] is a float; allowed is a torch.Tensor."),
    (lambda: MaskFunction(chosen, tensors=[_TENSOR]).visible(2, 2),
     f"{MaskFunction(chosen, tensors=[_TENSOR])} has no torch function, which is what a picture is made of."),
    (lambda: MaskFunction(torch=_even) & MaskFunction(chosen, tensors=[_TENSOR]),
     f"cannot combine {MaskFunction(torch=_even)} & {MaskFunction(chosen, tensors=[_TENSOR])}: one has a triton "
     "function alone and another a torch function; give one of them both."),
    (lambda: (MaskFunction(torch=_even) & MaskFunction(torch=_even)).function.with_tensors(),
     f"cannot give {MaskFunction(torch=_even)} & {MaskFunction(torch=_even)} other tensors: give them to one of its "
     "parts, and join these again."),
    (lambda: attention(*_qkv(), score_function=relative_twin),
     "score_function is a function; allowed is a tilewise.functions.ScoreFunction, or None."),
    (lambda: code_of("relative#-1"),
     "function relative#-1 is no more; keep the ScoreFunction or MaskFunction as long as it is used."),
])
def test_message_names_the_part_and_what_is_allowed(make, message):
    # Made before a message was written down: parts that nobody keeps get another number.
    assert _without_numbers(_message(make)) == _without_numbers(message)


def _without_numbers(text):
    return "".join(part.lstrip("0123456789") if i else part for i, part in enumerate(text.split("#")))


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("tensor", "message"), [
    (torch.zeros(4, 1281, device="meta"), "tensors[0] is on meta and q is on cpu: move them to one device."),
    (torch.zeros(1281, 4).mT, "tensors[0] has strides (1, 4); allowed are those of a contiguous tensor, which a kernel "
                             "reads by its pointer: call contiguous() on it."),
    (torch.zeros(4, 1281, requires_grad=True), "tensors[0] requires a gradient, and a function's tensors have none; "
                                              "pass it detached, or pass what it adds to the scores as bias."),
])
def test_message_names_the_tensor_of_a_function(call, tensor, message):
    score = ScoreFunction(torch=relative_twin, tensors=(tensor,))
    assert _message(lambda: call(*_qkv(), score_function=score)) == f"score_function: {message}"
    mask = MaskFunction(torch=chosen_twin, tensors=(tensor,))
    said = "mask function" if tensor.requires_grad else "mask_function"
    assert _message(lambda: call(*_qkv(), mask=mask)) == f"{said}: {message}"


def test_a_tensor_that_wants_a_gradient_passes_where_none_is_made():
    score = ScoreFunction(torch=relative_twin, tensors=(torch.zeros(4, 1281, requires_grad=True),))
    with torch.no_grad():
        out = attention(*_qkv(), score_function=score)
    torch.testing.assert_close(out, attention(*_qkv()))


def test_each_backend_says_why_it_refuses_a_function():
    only_torch = ScoreFunction(torch=relative_twin, tensors=(torch.zeros(4, 1281),))
    only_triton = MaskFunction(chosen, tensors=(torch.zeros(9),))
    for arguments, name, reason in (
            ({"score_function": only_torch}, "triton", f"needs a triton function, got {only_torch.code.name} without "
                                                       "one; backend='reference' takes a torch function"),
            ({"mask": only_triton}, "reference", f"needs a torch function, got {only_triton.code.name} without one; "
                                                 "backend='triton' takes a triton one"),
            ({"score_function": only_torch}, "torch", "takes no score function"),
            ({"mask": causal() & only_triton}, "torch", "takes no mask function")):
        with pytest.raises(UnsupportedProblem) as caught:
            attention(*_qkv(), **arguments, backend=name)
        assert caught.value.reasons == {name: reason}
        assert explain(*_qkv(), **arguments).reasons["forward", name] == reason
    with pytest.raises(UnsupportedProblem, match="needs a torch function"):
        attention(*_qkv(), mask=only_triton, double_backward=True)


def test_the_same_parts_have_one_code_and_others_another():
    table = torch.zeros(4, 1281)
    one, same = (ScoreFunction(relative, relative_twin, tensors=(table,)) for _ in range(2))
    assert one.code is same.code is one.with_tensors(table + 1).code
    assert one.with_tensors(table + 1).tensors[0].any()
    assert one.code is not ScoreFunction(relative, tensors=(table,)).code
    assert code_of(one.code.name) is one.code
    assert one.code.name.startswith("relative#")


def test_a_function_that_nobody_keeps_is_forgotten():
    name = ScoreFunction(torch=lambda score, *_: score).code.name
    gc.collect()
    assert name not in functions._BY_NAME
    assert all(code.name != name for code in functions._BY_FUNCTIONS.values())


@pytest.mark.parametrize(("function", "reads"), [
    (_functions.dilated, (False, True)), (_functions.behind, (True, False)), (_functions.near, (False, False)),
    (_functions.passing, (True, True)), (_functions.of_all, (True, True)), (None, (True, True))])
def test_a_code_tells_whether_a_mask_differs_by_batch_entry_or_head(function, reads):
    """From an argument that is not named: what a function does with one that it hands on, nobody looks at."""
    code = MaskFunction(function, chosen_twin, (_TENSOR,) * (function is _functions.behind)).code
    assert (code.reads_batch, code.reads_head) == reads


def test_mask_functions_join_one_another():
    kept = torch.tensor([1, 1, 0, 1])
    even, some = MaskFunction(torch=_even), MaskFunction(torch=chosen_twin, tensors=[kept])
    seen = torch.tensor([[True, True, True, False]])
    expected = causal().visible(4, 4) & even.visible(4, 4) & (kept > 0) & seen
    for mask in (causal() & even & some & seen, (even & causal()) & (some & seen), seen & (even & some) & causal(),
                 causal() & (even & seen & some)):
        assert torch.equal(mask.visible(4, 4)[0, 0], expected)
        assert str(mask).endswith(f"{even} & {some}")
        drawn = [[word == "■" for word in row.split()] for row in mask.show(4, 4).split("\n")]
        assert torch.equal(torch.tensor(drawn), expected)
        q, k, v = _qkv(sq=4, sk=4)
        torch.testing.assert_close(attention(q, k, v, mask=mask), attention(q, k, v, mask=expected))


def test_functions_that_are_joined_have_one_code_in_one_order():
    even, some = MaskFunction(torch=_even), MaskFunction(torch=chosen_twin, tensors=[_TENSOR])
    code = (even & some).function.code
    assert code is (even & some.with_tensors(_TENSOR + 1)).function.code
    assert code.name == f"{even.code.name} & {some.code.name}"
    assert code is not (some & even).function.code
    assert ((even & some) & even).function.code is (even & (some & even)).function.code, "a join is joined of no joins"
    assert code.parts == (even.code, some.code)
    name = (even & MaskFunction(torch=lambda *_: True)).function.code.name
    gc.collect()
    with pytest.raises(InvalidInput, match="is no more"):
        code_of(name)


def test_a_join_reads_what_one_of_its_parts_reads():
    near, head = MaskFunction(_functions.near), MaskFunction(_functions.dilated)
    firsts = MaskFunction(_functions.behind, tensors=[torch.tensor([1, 0])])

    def problem_of(mask):
        return AttentionProblem.from_tensors(*_qkv(), Operands(mask_tensors=mask.tensors),
                                             settings=NO_SETTINGS._replace(mask_function=mask.code))

    for mask, distinct, may_change in (
            (near & near, (1, 1), False), (near & head, (1, 4), False), (firsts & near, (2, 1), True),
            (near & tree(torch.zeros(6, dtype=torch.int64), [-1]), (1, 1), False),
            (head & prefixes(torch.tensor([1, 2])), (2, 4), False),
            (prefixes(torch.tensor([1])) & firsts, (2, 1), True)):
        problem = problem_of(mask.function)
        assert problem.distinct_masks == distinct
        assert problem.scores.mask_function.may_change is may_change
    wrong = near & tree(torch.zeros(5, dtype=torch.int64), [-1])
    assert _message(lambda: problem_of(wrong.function)) == (
        "mask is tree of 5 tokens, made for 5 queries, and the call has 6.")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
                         ids=["deepcopy", "pickle"])
def test_a_copy_of_a_join_has_copies_of_its_parts(copied):
    mask = tree(torch.tensor([0, 0, 1, 1]), [-1, 0]) & MaskFunction(torch=_table_says, tensors=[torch.arange(4)])
    other = copied(mask)
    assert other.function.code is mask.function.code
    assert torch.equal(other.visible(4, 4), mask.visible(4, 4))
    assert all(one is not own for one, own in zip(other.function.tensors, mask.function.tensors, strict=True))


def _doubled(score, batch, head, q_idx, k_idx, table):
    return score * 2


def _table_says(batch, head, q_idx, k_idx, table):
    return (q_idx + k_idx) % 3 != table[head]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
                         ids=["deepcopy", "pickle"])
def test_a_copy_outlives_its_original(copied):
    """A model that is copied, or sent to another process, has the functions of no other: theirs were "no more"."""
    made = (ScoreFunction(torch=_doubled, tensors=[_TENSOR]), causal() & MaskFunction(torch=_table_says, tensors=[
        torch.arange(4)]))
    expected = attention(*_qkv(), score_function=made[0], mask=made[1])
    copies = tuple(map(copied, made))
    del made
    clear_caches()
    gc.collect()
    assert all(name in functions._BY_NAME for name in (copies[0].code.name, copies[1].function.code.name))
    assert torch.equal(attention(*_qkv(), score_function=copies[0], mask=copies[1]), expected)


def test_a_copy_has_the_code_of_its_original_and_tensors_of_its_own():
    made = ScoreFunction(relative, relative_twin, tensors=(torch.zeros(4, 1281),))
    other = copy.deepcopy(made)
    assert other.code is made.code
    assert other.tensors[0] is not made.tensors[0]


def test_a_problem_tells_functions_and_dtypes_of_their_tensors_apart():
    table = torch.zeros(4, 1281)
    made = [ScoreFunction(relative, relative_twin, tensors=(table,)),
            ScoreFunction(relative, relative_twin, tensors=(table.half(),)),
            ScoreFunction(damped, relative_twin, tensors=(table,))]
    problems = [explain(*_qkv(), score_function=one).problem for one in (*made, made[0].with_tensors(table + 1))]
    assert len(set(problems)) == 3
    assert problems[0] == problems[3]
    for problem, one in zip(problems, made, strict=False):
        assert f"score function {one.code.name}" in str(problem)
        assert problem.scores.changes_scores


def test_a_mask_function_joins_other_masks_from_either_side():
    even = MaskFunction(torch=_even)
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[:, 0] = False
    expected = causal().visible(4, 4) & even.visible(4, 4) & seen
    for mask in (causal() & even & seen, even & causal() & seen, seen & even & causal(), even & seen & causal(),
                 causal() & (seen & even)):
        assert torch.equal(mask.visible(4, 4)[0, 0], expected)
        assert str(mask) == f"causal() & a tensor of shape (4, 4) & function {even.code.name}"
    with pytest.raises(TypeError, match="unsupported operand"):
        even & 3


def test_a_mask_function_draws_itself_with_its_tensors():
    keys = torch.tensor([1, 0, 1])
    mask = MaskFunction(torch=chosen_twin, tensors=(keys,))
    assert mask.show(2, 3) == "■ · ■\n■ · ■"
    assert (causal("bottom_right") & mask).show(2, 3) == "■ · ·\n■ · ■"


def test_pair_indices_count_from_the_first_query_and_key():
    batch, head, q_idx, k_idx = pair_indices((2, 3, 2, 2), None, (4, 5, 7))
    assert [tuple(index.shape) for index in (batch, head, q_idx, k_idx)] == [
        (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    assert q_idx.flatten().tolist() == [5, 6]
    assert k_idx.flatten().tolist() == [7, 8]
    assert head.flatten().tolist() == [0, 1, 2]
    assert batch.flatten().tolist() == [4, 5]


@pytest.mark.parametrize("double_backward", [False, True])
def test_a_function_that_does_not_look_at_its_score_stops_the_gradient(double_backward):
    q, k, v = _qkv(requires_grad=True)
    constant = ScoreFunction(torch=lambda score, batch, head, q_idx, k_idx: (q_idx - k_idx) * 0.5)
    out = attention(q, k, v, score_function=constant, double_backward=double_backward)
    bias = (torch.arange(6)[:, None] - torch.arange(6)) * 0.5
    torch.testing.assert_close(out, attention(q * 0, k, v, bias=bias))
    dq, dv = torch.autograd.grad(out.sum(), (q, v), allow_unused=True)
    assert dq is None or not dq.any()
    assert dv.any()


def test_a_function_may_return_its_argument():
    """What is added behind it must not reach into the argument, of which the derivative is taken."""
    q, k, v = _qkv(requires_grad=True)
    same = ScoreFunction(torch=lambda score, *_: score)
    bias = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    got, expected = (attention(q, k, v, bias=bias, softcap=2.0, score_function=function, backend="reference")
                     for function in (same, None))
    torch.testing.assert_close(got, expected)
    for one, other in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, expected)), strict=True):
        torch.testing.assert_close(one, other)


def _operators_arguments():
    called = call_functions(score_functions("cpu")["damped"], mask_functions("cpu")["chosen"])
    operands = Operands(score_tensors=called.score_tensors, mask_tensors=called.mask_tensors)
    return (*operands, *OperatorOptions(None, None, 0, None, score_function=called.score, mask_function=called.mask,
                                backend="reference"))


def test_operators_with_functions_pass_opcheck():
    keep = score_functions("cpu"), mask_functions("cpu")
    tensors, arguments = _qkv(), _operators_arguments()
    assert set(opcheck(forward_op, (*tensors, *arguments)).values()) == {"SUCCESS"}
    out, lse = forward_op(*tensors, *arguments)
    needs = [True, True, False, False, False]
    assert set(opcheck(backward_op, (*tensors, out, lse, torch.randn_like(out), None, *arguments,
                                     needs)).values()) == {"SUCCESS"}
    assert keep


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_does_not_take_the_derivative_away():
    """Inside a mode autograd is shut out of operators: the derivative of a torch function was once lost there, as 0."""
    q, k, v = _qkv(requires_grad=True)
    out = attention(q, k, v, score_function=score_functions("cpu")["squashed"], backend="reference")
    expected = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with _Watching():
        got = torch.autograd.grad(out.sum(), (q, k, v))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@_COMPILES
@pytest.mark.parametrize("where", ["outside", "argument", "with_tensors"])
def test_a_compiled_call_gives_what_an_eager_one_gives(where):
    torch._dynamo.reset()
    score, mask = score_functions("cpu")["relative"], causal() & mask_functions("cpu")["chosen"]

    def call(q, k, v, given):
        function = {"outside": lambda: score, "argument": lambda: given,
                    "with_tensors": lambda: score.with_tensors(given)}[where]()
        return attention(q, k, v, score_function=function, mask=mask, softcap=3.0)

    given = torch.ones(4, 1281) if where == "with_tensors" else score
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for sizes in ((6, 6), (9, 9)):
        q, k, v = _qkv(requires_grad=True, sq=sizes[0], sk=sizes[1])
        results = [function(q, k, v, given) for function in (call, compiled)]
        made = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in results]
        torch.testing.assert_close(*results)
        for eager, traced in zip(*made, strict=True):
            torch.testing.assert_close(eager, traced)
    torch._dynamo.reset()


@_COMPILES
def test_a_compiled_call_knows_another_function_when_it_meets_one():
    torch._dynamo.reset()

    def call(q, k, v, function):
        return attention(q, k, v, score_function=function, mask=causal())

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = _qkv()
    for function in score_functions("cpu").values():
        torch.testing.assert_close(compiled(q, k, v, function), call(q, k, v, function))
    torch._dynamo.reset()


@pytest.mark.parametrize("run", [{"backend": "triton"}, {"backend": "reference"}, {"double_backward": True}],
                         ids=lambda run: "_".join(map(str, run.values())))
@pytest.mark.parametrize("name", ["relative", "damped", "squashed"])
def test_packed_sequences_take_functions_by_their_own_positions(run, name):
    """Each sequence is a batch entry to the function, and counts from its start."""
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in _qkv(sq=150, sk=150))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    lengths = torch.tensor([0, 70, 70, 150], dtype=torch.int32)
    given = {"score_function": score_functions("cpu")[name],
             "mask": causal("top_left") & mask_functions("cpu")["dilated"]}
    out = attention_varlen(q, k, v, cu_seqlens_q=lengths, **given, **run)
    parts = []
    for number, (start, stop) in enumerate(((0, 70), (70, 70), (70, 150))):
        part = [tensor[start:stop].transpose(0, 1).expand(number + 1, -1, -1, -1) for tensor in leaves]
        parts.append(attention(*part, **given, backend="reference")[number].transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(each.square().sum(), leaves) for each in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_padding_does_not_enter_a_function(backend):
    q, k, v = _qkv(sq=150, sk=150)
    used = torch.tensor([150, 33], dtype=torch.int32)
    given = {"score_function": score_functions("cpu")["damped"], "backend": backend}
    out = attention(q, k, v, seqlens_k=used, mask=mask_functions("cpu")["chosen"], **given)
    short = attention(q, k[:, :, :33], v[:, :, :33], mask=mask_functions("cpu")["chosen"], **given)
    torch.testing.assert_close(out[1], short[1], rtol=1e-4, atol=1e-5)
