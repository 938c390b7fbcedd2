"""Score and mask functions of the user's own: every backend that takes them agrees with float64, gradients included."""

import pytest
import torch

from conformance.calls import TRAINABLE, skip_if_refused, trainable
from conformance.functions import known_masks, mask_functions, score_functions
from tilewise import attention, causal, window
from tilewise.api import AttentionOutputWithMax
from tilewise.backends.base import Gradients
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem
from tilewise.problem.options import ScoreSettings
from tilewise.testing.cases import Case
from tilewise.testing.inputs import call_options, make_inputs, make_operands
from tilewise.testing.oracle import Changes, attend, gradients, max_logit, yardsticks
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_within_budget

PLAIN = Case("plain", b=2, hq=2, hk=2, sq=71, sk=150, d=32, dv=32)
CAUSAL = Case("causal", b=1, hq=2, hk=1, sq=130, sk=130, d=16, dv=24, mask=causal())
EVERYTHING = Case("everything", b=2, hq=4, hk=2, sq=70, sk=97, d=32, dv=32, mask=window(40, 20, "bottom_right"),
                  bias="bhqk", mask_tensor="b11k", alibi="h", sinks=True, softcap=4.0, dropout_p=0.25,
                  operand_dtype="float32")
IN_16_BITS = [
    Case("narrow", b=2, hq=4, hk=2, sq=150, sk=190, d=64, dv=64, mask=causal("bottom_right")),
    Case("wide", b=1, hq=2, hk=1, sq=190, sk=150, d=128, dv=128, mask=window(100, 20, "top_left")),
    Case("optioned", b=2, hq=4, hk=2, sq=150, sk=190, d=64, dv=64, mask=window(90, 30, "bottom_right"), alibi="h",
         sinks=True, softcap=4.0),
    Case("long", b=1, hq=2, hk=1, sq=600, sk=640, d=64, dv=64, mask=causal("bottom_right")),
    Case("long and wide", b=1, hq=1, hk=1, sq=520, sk=520, d=128, dv=128)]
NAMES = [(name, None) for name in ("relative", "damped", "squashed")] + [(None, "dilated"), (None, "chosen"),
                                                                        ("relative", "chosen"), ("squashed", "dilated")]


class Call:
    """One call with functions: its arguments, and what the oracle is told of them."""

    def __init__(self, case, score, mask, device, dtype=torch.float32, *, operands=None):
        self.case, self.inputs = case, make_inputs(case, dtype, device)
        self.operands = make_operands(case, dtype, device) if operands is None else operands
        self.score = score_functions(device)[score] if isinstance(score, str) else score
        self.mask = mask_functions(device)[mask] if isinstance(mask, str) else mask

    @property
    def changes(self):
        score, mask = (() if function is None else function.tensors for function in (self.score, self.mask))
        codes = [None if function is None else function.code for function in (self.score, self.mask)]
        return Changes(self.operands._replace(score_tensors=score, mask_tensors=mask),
                       self.case.settings._replace(score_function=codes[0], mask_function=codes[1]))

    def problem(self):
        operands, settings = self.changes
        return AttentionProblem.from_tensors(*self.inputs[:3], operands, mask=self.case.mask, scale=self.case.scale,
                                             settings=settings)

    def attend(self, qkv, operands, **options):
        arguments = call_options(self.case, operands)
        if self.mask is not None:
            arguments["mask"] &= self.mask
        return attention(*qkv, **arguments, score_function=self.score, **options)

    def run(self, backend):
        """Return (out, lse, max_logit) and the gradients, after skipping what the backend refuses."""
        skip_if_refused(backend, self.problem().backward(lse_grad=True))
        leaves = [tensor.detach().requires_grad_() for tensor in self.inputs[:3]]
        given = trainable(self.operands)
        results = self.attend(leaves, self.operands._replace(**given), return_aux=("lse", "max_logit"),
                              backend=backend.name)
        made = torch.autograd.grad(results[:2], [*leaves, *given.values()], (self.inputs.dout, self.inputs.dlse))
        return results, Gradients(*made[:3], **{f"d{name}": one for name, one in zip(given, made[3:], strict=True)})

    def assert_within_budget(self, results, got):
        q, k, v, dout, dlse = self.inputs
        arguments = self.case.mask, self.case.scale, self.changes._replace(
            settings=self.changes.settings._replace(max_logit=True))
        samples = yardsticks(q, k, v, dout, dlse, *arguments)
        exact = AttentionOutputWithMax(*attend(q, k, v, *arguments), max_logit(q, k, *arguments))
        for name in exact._fields:
            assert_within_budget(name, getattr(results, name), getattr(exact, name),
                                 [getattr(sample, name) for sample in samples], OUTPUT_FACTOR)
        for name, gradient, true in zip(got._fields, got, gradients(q, k, v, dout, dlse, *arguments), strict=True):
            assert (gradient is None) == (true is None)
            if gradient is not None:
                assert_within_budget(name, gradient, true, [getattr(sample, name) for sample in samples],
                                     GRADIENT_FACTOR)


@pytest.mark.parametrize("case", [PLAIN, CAUSAL, EVERYTHING], ids=str)
@pytest.mark.parametrize(("score", "mask"), NAMES)
def test_functions_stay_within_error_budget(backend, case, score, mask, device):
    call = Call(case, score, mask, device)
    call.assert_within_budget(*call.run(backend))


@pytest.mark.parametrize(("case", "name"), [(PLAIN, "intervals"), (PLAIN, "blocks"), (CAUSAL, "tree"),
                                            (EVERYTHING, "prefixes")], ids=str)
def test_masks_of_tables_stay_within_error_budget(backend, case, name, device):
    call = Call(case, None, known_masks(case, device)[name], device)
    call.assert_within_budget(*call.run(backend))


def test_mask_functions_that_are_joined_stay_within_error_budget(backend, device):
    known, own = known_masks(PLAIN, device), mask_functions(device)
    call = Call(PLAIN, None, (known["blocks"] & own["chosen"] & known["intervals"]).function, device)
    call.assert_within_budget(*call.run(backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_functions_stay_within_error_budget_in_half_precision(backend, dtype, device):
    call = Call(EVERYTHING, "damped", "dilated", device, dtype)
    call.assert_within_budget(*call.run(backend))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", IN_16_BITS, ids=str)
@pytest.mark.parametrize("score", ["relative", "damped", "squashed"])
def test_score_functions_stay_within_error_budget_in_16_bits(backend, score, case, half, device):
    """Of calls that the Hopper kernels take in both passes."""
    call = Call(case, score, None, device, half)
    call.assert_within_budget(*call.run(backend))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the roots that are hidden
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_a_function_makes_of_hidden_pairs_reaches_nothing(backend, softcap, dtype, device):
    d = 16 if dtype is torch.float32 else 64
    call = Call(Case("hidden", hq=2, hk=1, sq=136, sk=136, d=d, dv=d, mask=causal(), bias="1hqk", softcap=softcap),
                "singular", None, device, dtype)
    call.assert_within_budget(*call.run(backend))


def test_a_mask_function_is_a_mask_by_itself(backend, device):
    call = Call(PLAIN, None, "dilated", device)
    skip_if_refused(backend, call.problem())
    out = attention(*call.inputs[:3], mask=call.mask, backend=backend.name)
    joined = attention(*call.inputs[:3], mask=Mask() & call.mask, backend=backend.name)
    assert torch.equal(out, joined)


@pytest.mark.parametrize("others", [causal(), window(3, 40)], ids=str)
def test_a_mask_function_is_asked_in_every_tile_that_a_list_leaves_visible(backend, others, device):
    """Whole tiles of a list are not masked by what they were made of; a function is no part of that."""
    q, k, v = (torch.randn(1, 2, 290, 16, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
               for seed in range(3))
    tensor = torch.ones(290, 290, dtype=torch.bool, device=device)
    tensor[:, 128:256] = False
    joined = others & tensor & mask_functions(device)["dilated"]
    problem = AttentionProblem.from_tensors(q, k, v, settings=ScoreSettings(mask_function=joined.function.code))
    skip_if_refused(backend, problem.backward(lse_grad=False))
    out, expected = (attention(q, k, v, mask=mask, backend=backend.name) for mask in (joined.tiled(290, 290), joined))
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (out, expected)),
                          strict=True):
        torch.testing.assert_close(one, other)


def test_rows_that_a_mask_function_hides_whole_give_zero_and_have_no_gradient(backend, device):
    call = Call(PLAIN, "relative", None, device)
    keys = torch.zeros(300, dtype=torch.int32, device=device)
    call.mask = mask_functions(device)["chosen"].with_tensors(keys)
    (out, lse, _), made = call.run(backend)
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert not any(gradient.any() for gradient in made[:3])


def test_other_tensors_of_one_function_give_other_results(backend, device):
    """A launch keeps the kernel of its first call; what it reads must not be kept too."""
    call = Call(CAUSAL, "relative", None, device)
    first, _ = call.run(backend)
    call.score = call.score.with_tensors(-call.score.tensors[0])
    call.assert_within_budget(*call.run(backend))
    assert not torch.equal(first.out, call.run(backend)[0].out)


def test_tensors_of_another_dtype_or_alignment_are_read_as_they_are(backend, device):
    call = Call(CAUSAL, "relative", None, device)
    table = call.score.tensors[0]
    call.run(backend)
    call.score = call.score.with_tensors(table.half())
    call.assert_within_budget(*call.run(backend))
    call.score = call.score.with_tensors(torch.cat([table.flatten()[:1], table.flatten()])[1:].view(table.shape))
    call.assert_within_budget(*call.run(backend))


def test_derivatives_of_functions_pass_gradcheck_and_forward_mode_and_a_second_one(device):
    call = Call(Case("small", hq=2, hk=1, sq=5, sk=6, d=3, dv=2, mask=causal("bottom_right"), bias="1hqk",
                     softcap=2.0), "damped", "dilated", device, torch.float64)
    leaves = [tensor.detach().requires_grad_() for tensor in call.inputs[:3]]

    def plain(*qkv):
        return call.attend(qkv, call.operands, backend="reference")

    def twice(*qkv):
        return call.attend(qkv, call.operands, double_backward=True)

    assert torch.autograd.gradcheck(plain, leaves)
    assert torch.autograd.gradcheck(twice, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(twice, leaves)


def test_bias_has_its_gradient_beside_a_function(backend, device):
    call = Call(EVERYTHING, "squashed", None, device)
    _, made = call.run(backend)
    assert all(getattr(made, f"d{name}") is not None for name in TRAINABLE)
