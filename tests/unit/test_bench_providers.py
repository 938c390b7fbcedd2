"""What can be timed: refusals, and the operands that a provider gets."""

import sys
from dataclasses import replace

import pytest
import torch

from tilewise.bench import accuracy
from tilewise.bench.checking import Checker, Prepared
from tilewise.bench.flex import FlexProvider
from tilewise.bench.grids import Cell
from tilewise.bench.options import make_tensors
from tilewise.bench.peers import FlashAttentionProvider, peer_providers
from tilewise.bench.plan import blank_row
from tilewise.bench.provenance import provenance
from tilewise.bench.providers import DenseProvider, TilewiseProvider, own_providers, torch_providers
from tilewise.bench.shapes import CAUSAL, FULL, packed_case, priced, shape_case
from tilewise.dispatch import get_backend
from tilewise.masks import causal, chunk, prefix, sink_tokens, window
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case, case_named

CPU = torch.device("cpu")
PLAIN = shape_case(2, (4, 2), (33, 33), (16, 16), CAUSAL, "bshd")
CELLS = [Cell("options", case, torch.float32, learned) for case, learned in priced(PLAIN)]
# What the grid of masks has beside causal.
KINDS = [prefix(9), causal() & chunk(8), causal() & window(7, 0) & sink_tokens(4)]
ORIGIN = provenance(CPU, "")
KNOWN = {provider.name: provider for provider in (*own_providers(), *torch_providers(), *peer_providers())}


def cell_with(end):
    return next(cell for cell in CELLS if cell.case.name.endswith(end))


def checked(provider, cell, direction):
    row = blank_row(cell, provider.name, direction, "test", ORIGIN)
    return Checker(cell, make_tensors(cell, CPU), CPU).checked(row, provider, direction)


def taken(provider, device=CPU):
    """Return the ends of the names of the cells that a provider takes, and the others' reasons."""
    reasons = {cell.case.name.removeprefix(PLAIN.name).strip("_"): provider.reason_against(cell, "backward", device)
               for cell in CELLS}
    return ([end for end, reason in reasons.items() if reason is None],
            {end: reason for end, reason in reasons.items() if reason is not None})


ALL = ["", "bias", "bias_learned", "alibi", "softcap", "sinks", "dropout", "mask_tensor", "documents"]


@pytest.mark.parametrize(("name", "ends"), [
    ("tilewise", ALL), ("tilewise:reference", ALL), ("naive", [""]),
    ("sdpa_math", ["", "bias", "bias_learned", "dropout", "mask_tensor", "documents"]), ("sdpa_flash", [""]),
    ("sdpa_efficient", ["", "bias", "bias_learned", "mask_tensor", "documents"]),
    ("sdpa_cudnn", ["", "bias", "mask_tensor", "documents"]),
    ("flex", [end for end in ALL if end != "dropout"])])
def test_a_provider_takes_the_options_that_it_has_and_no_other(name, ends):
    assert taken(KNOWN[name])[0] == ends


def test_a_refusal_says_which_option_or_gradient_is_lacking():
    assert taken(KNOWN["sdpa_cudnn"])[1] == {
        "bias_learned": "has no gradient of bias", "alibi": "takes no ALiBi slopes", "softcap": "takes no softcap",
        "sinks": "takes no sinks", "dropout": "has dropout on GPUs only"}
    assert taken(KNOWN["flex"])[1] == {"dropout": "takes no dropout"}
    both = Cell("options", replace(PLAIN, bias="1hqk", sinks=True), torch.float32)
    assert KNOWN["naive"].reason_against(both, "forward", CPU) == "takes no bias, no sinks"
    assert "takes no mask tensor" in KNOWN["tilewise:torch"].reason_against(cell_with("mask_tensor"), "forward", CPU)


def test_torch_kernels_have_dropout_on_gpus():
    for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn"):
        assert KNOWN[name].reason_against(cell_with("dropout"), "backward", torch.device("cuda")) is None


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["tilewise:reference", "sdpa_math"])
def test_the_operands_reach_the_call_and_the_gradients_come_back(name, direction, cell):
    provider = KNOWN[name]
    row = checked(provider, cell, direction)
    reason = provider.reason_against(cell, direction, CPU)
    assert (row.status, row.reason) == (("ok", "") if reason is None else ("refused", reason))


@pytest.mark.parametrize("fields", [{"mask": FULL, "bias": "b1qk"}, {"mask": FULL, "mask_tensor": "11qk"},
                                    {"bias": "1hqk", "mask_tensor": "b1qk"}, {"bias": "1hqk", "documents": "mixed"},
                                    {"mask_tensor": "11qk", "documents": "mixed"}])
@pytest.mark.parametrize("learned", [True, False])
def test_torch_gets_bias_and_masks_as_one_tensor(fields, learned):
    case = replace(PLAIN, **fields)
    cell = Cell("options", case, torch.float32, ("bias",) if learned and case.bias else ())
    assert checked(KNOWN["sdpa_math"], cell, "backward").status == "ok"


@pytest.mark.parametrize("mask", KINDS, ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_masks_by_position_are_a_tensor_for_kernels_of_torch_that_take_one(mask, direction):
    cell = Cell("masks", replace(PLAIN, mask=mask), torch.float32)
    assert checked(KNOWN["sdpa_math"], cell, direction).status == "ok"
    for name in ("sdpa_efficient", "sdpa_cudnn"):
        assert KNOWN[name].reason_against(cell, direction, CPU) is None
    reason = KNOWN["sdpa_flash"].reason_against(cell, direction, CPU)
    assert reason == f"takes no mask or top-left causal without a dense (sq, sk) mask tensor, got {mask}"


def test_torch_gets_no_mask_tensor_that_nobody_asked_for(monkeypatch):
    given = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, k, v, *options, **names: given.append(options))
    for end in ("causal", "dropout", "mask_tensor"):
        cell = cell_with(end)
        Prepared(KNOWN["sdpa_math"], cell, make_tensors(cell, CPU), CPU).forward()
    (plain, dropout, mask), seen = given, make_tensors(cell_with("mask_tensor"), CPU).operands.mask
    assert plain == (None, 0.0, True)
    assert dropout == (None, 0.1, True)
    assert torch.equal(mask[0], seen & CAUSAL.visible(33, 33, CPU))
    assert mask[1:] == (0.0, False)


def test_a_gradient_of_an_operand_is_checked_too(monkeypatch):
    cell = cell_with("sinks")
    results = Prepared.results
    assert list(results(Prepared(KNOWN["tilewise"], cell, make_tensors(cell, CPU), CPU), "backward")) == [
        "dq", "dk", "dv", "dsinks"]
    monkeypatch.setattr(Prepared, "results", lambda self, direction: {
        name: tensor * 1.1 if name == "dsinks" else tensor for name, tensor in results(self, direction).items()})
    row = checked(KNOWN["tilewise"], cell, "backward")
    assert row.status == "wrong"
    assert row.reason.startswith("dsinks OVER BUDGET")


def test_dropout_of_other_draws_is_checked_without_it_and_the_row_says_so():
    cell = cell_with("dropout")
    for direction in ("forward", "backward"):
        ours, others = (checked(KNOWN[name], cell, direction) for name in ("tilewise", "sdpa_math"))
        assert (ours.status, ours.checked) == ("ok", "full")
        assert (others.status, others.checked) == ("ok", "full, at dropout_p 0")


def test_without_dropout_a_large_case_is_checked_on_its_own_heads_and_not_on_a_twin(monkeypatch):
    cell = cell_with("dropout")
    for limits in (accuracy._WHOLE_PAIRS, accuracy._ORACLE_PAIRS):
        monkeypatch.setitem(limits, "cpu", 2 * 2 * 33 * 33)
    ours, others = (checked(KNOWN[name], cell, "backward") for name in ("tilewise", "sdpa_math"))
    assert (ours.status, ours.checked) == ("ok", "twin of 1 instead of 2 key/value heads")
    assert (others.status, others.checked) == ("ok", "2 of 4 key/value heads, at dropout_p 0")


def test_a_provider_of_the_same_draws_is_held_to_them():
    class Deaf(TilewiseProvider):
        def bind(self, cell, operands, device):
            return super().bind(replace(cell, case=replace(cell.case, dropout_p=0.0)), Operands(), device)

    assert checked(Deaf(None), cell_with("dropout"), "forward").status == "wrong"


def test_a_failure_without_dropout_names_no_check():
    class Broken(DenseProvider):
        options = frozenset({"dropout_p"})

        def bind(self, cell, operands, device):
            raise ValueError("no kernel")

    row = checked(Broken(), cell_with("dropout"), "forward")
    assert (row.status, row.reason, row.checked) == ("failed", "ValueError: no kernel", "")


class FlashAttention:
    """A stand-in for the packages: keeps what it is called with, gives out q."""

    def flash_attn_func(self, q, k, v, **options):
        self.options = options
        return q, None

    def flash_attn_varlen_func(self, q, k, v, **options):
        self.shapes = [tensor.shape for tensor in (q, k, v)]
        return self.flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize(("name", "keywords"), [
    ("flash_attn2", {"softcap": "softcap", "alibi": "alibi_slopes", "dropout": "dropout_p"}),
    ("flash_attn3", {"softcap": "softcap"}), ("flash_attn4", {"softcap": "softcap", "sinks": "learnable_sink"})])
def test_generations_of_flash_attention_get_their_options_under_their_own_names(name, keywords, monkeypatch):
    provider, package = KNOWN[name], FlashAttention()
    assert isinstance(provider, FlashAttentionProvider)
    monkeypatch.setitem(sys.modules, provider.module, package)
    for end in ("causal", "alibi", "softcap", "sinks", "dropout"):
        cell = replace(cell_with(end), dtype=torch.bfloat16, learned=())
        if end != "causal" and end not in keywords:
            assert provider.reason_against(cell, "forward", CPU) is not None
            continue
        assert provider.reason_against(cell, "forward", CPU) is None
        tensors = make_tensors(cell, CPU)
        Prepared(provider, cell, tensors, CPU).forward()
        given = {option: value for option, value in package.options.items()
                 if option not in ("softmax_scale", "causal", "window_size")}
        slopes = tensors.operands.alibi_slopes
        values = {"softcap": 30.0, "dropout": 0.1, "sinks": tensors.operands.sinks,
                  "alibi": None if slopes is None else slopes[0]}
        assert list(given) == ([] if end == "causal" else [keywords[end]])
        if end != "causal":
            torch.testing.assert_close(given[keywords[end]], values[end])


@pytest.mark.parametrize("name", ["flash_attn2", "flash_attn3", "flash_attn4"])
def test_flash_attention_gets_packed_sequences_with_their_borders_and_longest_lengths(name, monkeypatch):
    provider, package = KNOWN[name], FlashAttention()
    monkeypatch.setitem(sys.modules, provider.module, package)
    cell = Cell("packed", packed_case((4, 2), (9, 0, 5), 16, causal("top_left")), torch.bfloat16)
    assert provider.reason_against(cell, "backward", CPU) is None
    assert Prepared(provider, cell, make_tensors(cell, CPU), CPU).results("forward")["out"].shape == (1, 4, 14, 16)
    assert package.shapes == [(14, 4, 16), (14, 2, 16), (14, 2, 16)]
    borders = [package.options.pop(f"cu_seqlens_{side}") for side in "qk"]
    assert [(tensor.tolist(), tensor.dtype) for tensor in borders] == [([0, 9, 9, 14], torch.int32)] * 2
    none = provider.no_window
    assert package.options == {"softmax_scale": None, "causal": True, "window_size": (none, none), "max_seqlen_q": 9,
                               "max_seqlen_k": 9}
    unlike = Cell("packed", case_named("packed"), torch.bfloat16)
    Prepared(provider, unlike, make_tensors(unlike, CPU), CPU).forward()
    assert package.options["cu_seqlens_k"].dtype is torch.int32


@pytest.mark.parametrize(("changes", "direction", "reason"), [
    ({}, "forward", None), ({}, "backward", "is built without a backward pass"),
    ({"dtype": torch.float16}, "forward", "is built for bfloat16 alone, got torch.float16"),
    ({"mask": window(3, 0, "bottom_right")}, "forward", "is built without windows, got causal("),
    ({"mask": window(None, 2, "bottom_right")}, "forward", "is built without windows, got window("),
    ({"mask": causal("top_left")}, "forward", "takes masks aligned bottom-right"),
])
def test_forward_build_of_flash_attention_3_refuses_what_it_was_built_without(changes, direction, reason):
    case = shape_case(1, (2, 2), (9, 17), (64, 64), changes.get("mask", causal("bottom_right")))
    cell = Cell("paper", case, changes.get("dtype", torch.bfloat16))
    answer = KNOWN["flash_attn3_fwd"].reason_against(cell, direction, CPU)
    assert answer == reason if reason is None else answer.startswith(reason)


def test_flash_attention_aligns_masks_bottom_right():
    for case, reason in ((shape_case(1, (2, 2), (9, 17), (16, 16), causal("top_left")), "takes masks aligned "
                          "bottom-right, got causal(alignment='top_left')"),
                         (case_named("packed_causal_bottom_right_gaps"), "takes packed sequences without gaps"),
                         (replace(case_named("packed"), mask=causal("top_left")), "takes masks aligned bottom-right"),
                         (replace(case_named("packed"), mask=causal("bottom_right")), None)):
        got = KNOWN["flash_attn2"].reason_against(Cell("cases", case, torch.float16), "forward", CPU)
        assert got is None if reason is None else got.startswith(reason)


def test_flash_attention_has_no_gradient_of_sinks():
    assert KNOWN["flash_attn4"].reason_against(replace(cell_with("sinks"), dtype=torch.bfloat16), "forward",
                                        CPU) == "has no gradient of sinks"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlex:
    """FlexAttention as torch interprets it: the plumbing alone, its compiler needs a GPU."""

    @pytest.fixture(autouse=True)
    def interpreted(self, monkeypatch):
        from torch._functorch import config
        from torch.nn.attention import flex_attention

        compiler = torch.compile
        monkeypatch.setattr(torch, "compile", lambda function, **options: (
            function if options == {"dynamic": False} else compiler(function, **options)))
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
        with config.patch(donated_buffer=config.donated_buffer):  # put back what the provider changes
            yield

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    @pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.case.dropout_p], ids=str)
    def test_it_has_each_option_of_the_grid(self, cell, direction):
        row = checked(FlexProvider(), cell, direction)
        assert (row.status, row.reason) == ("ok", "")

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_it_has_them_together_and_broadcast_along_any_dim(self, direction):
        case = Case("together", b=2, hq=4, hk=2, sq=20, sk=33, d=16, dv=16, mask=window(12, 3, "bottom_right"),
                    bias="b1qk", alibi="bh", softcap=2.0, sinks=True, mask_tensor="b11k")
        cell = Cell("options", case, torch.float32, ("bias", "alibi_slopes", "sinks"))
        row = checked(FlexProvider(), cell, direction)
        assert (row.status, row.reason) == ("ok", "")

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    @pytest.mark.parametrize("mask", [FULL, causal("top_left"), window(4, 2, "bottom_right")])
    def test_packed_sequences_are_its_documents(self, direction, mask):
        cell = Cell("packed", packed_case((4, 2), (9, 1, 0, 21), 16, mask), torch.float32)
        row = checked(FlexProvider(), cell, direction)
        assert (row.status, row.reason) == ("ok", "")

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    @pytest.mark.parametrize("mask", [*KINDS, chunk(8, "bottom_right") & window(5, 3)], ids=str)
    def test_masks_by_position_are_its_mask_function(self, mask, direction):
        row = checked(FlexProvider(), Cell("masks", replace(PLAIN, sk=40 if mask.alignment else 33, mask=mask),
                                           torch.float32), direction)
        assert (row.status, row.reason) == ("ok", "")

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_documents_and_a_mask_tensor_of_each_entry_are_joined(self, direction):
        for dims in ("11qk", "bhqk"):
            cell = Cell("options", replace(PLAIN, documents="mixed", mask_tensor=dims), torch.float32)
            row = checked(FlexProvider(), cell, direction)
            assert (row.status, row.reason) == ("ok", "")

    def test_its_block_mask_has_an_entry_a_batch_and_head_that_differ(self, monkeypatch):
        from torch.nn.attention import flex_attention

        sizes, make = [], flex_attention.create_block_mask
        monkeypatch.setattr(flex_attention, "create_block_mask", lambda function, *given, **options: (
            sizes.append(given), make(function, *given, **options))[1])
        for case in (PLAIN, replace(PLAIN, documents="mixed"), replace(PLAIN, mask_tensor="1hqk"),
                     replace(PLAIN, documents="mixed", mask_tensor="1hqk"), packed_case((4, 2), (9, 21), 16, FULL)):
            cell = Cell("options", case, torch.float32)
            Prepared(FlexProvider(), cell, make_tensors(cell, CPU), CPU)
        assert sizes == [(None, None, 33, 33), (2, None, 33, 33), (None, 4, 33, 33), (2, 4, 33, 33),
                         (None, None, 30, 30)]

    @pytest.mark.parametrize(("name", "reason"), [
        ("packed", None), ("packed_causal_top_left", None), ("packed_zero_lengths", "without gaps between them"),
        ("packed_bias_of_keys", "takes packed sequences without another option"),
        ("padded", "takes no padded sequences")])
    def test_it_refuses_sequences_that_documents_cannot_say(self, name, reason):
        got = FlexProvider().reason_against(Cell("cases", case_named(name), torch.float32), "forward", CPU)
        assert got is None if reason is None else reason in got

    def test_a_second_backward_over_one_forward_gives_the_same(self):
        cell = cell_with("bias_learned")
        call = Prepared(FlexProvider(), cell, make_tensors(cell, CPU), CPU).call("backward")
        assert all(torch.equal(first, second) for first, second in zip(call(), call(), strict=True))


def test_torch_calls_the_backend_that_a_provider_names(monkeypatch):
    """Without the context torch would choose for itself, and every provider's row would be of one kernel."""
    real, allowed = torch.nn.functional.scaled_dot_product_attention, []

    def attend(*arguments, **options):
        allowed.append([torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled(),
                        torch.backends.cuda.mem_efficient_sdp_enabled()])
        return real(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    cell = cell_with("")
    for name in ("sdpa_math", "sdpa_flash"):
        Prepared(KNOWN[name], cell, make_tensors(cell, CPU), CPU).training_step()
    assert allowed == [[True, False, False], [False, True, False]]


def test_a_backward_pass_is_not_timed_on_a_backend_that_refuses_the_forward(monkeypatch):
    gluon = get_backend("gluon")
    monkeypatch.setattr(type(gluon), "why_not", lambda self, problem: {"forward": "takes none", "backward": None}[
        problem.direction])
    for direction in ("forward", "backward"):
        assert TilewiseProvider("gluon").why_not(CELLS[0], direction, CPU) == "takes none"
    monkeypatch.setattr(type(gluon), "why_not", lambda self, problem: None)
    assert TilewiseProvider("gluon").why_not(CELLS[0], "backward", CPU) is None


@pytest.mark.parametrize("cell", [cell_with(""), Cell("packed", packed_case((2, 1), (33, 20), 16, causal("top_left")),
                                                      torch.float32)], ids=["plain", "packed"])
def test_a_provider_of_its_own_asks_for_determinism_and_no_other_says_a_word(cell, monkeypatch):
    asked = []
    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(f"tilewise.bench.providers.{name}",
                            lambda q, k, v, **options: asked.append(options["deterministic"]) or q)
    for name in ("tilewise", "tilewise:triton", "tilewise:deterministic"):
        Prepared(KNOWN[name], cell, make_tensors(cell, CPU), CPU).forward()
    assert asked == [None, None, True]


def test_a_deterministic_call_is_timed_where_it_is_a_call_of_its_own(monkeypatch):
    provider = KNOWN["tilewise:deterministic"]
    assert provider.reason_against(cell_with(""), "backward", CPU) == "is tilewise:reference on the CPU"
    asked = []
    monkeypatch.setattr("tilewise.bench.providers.choose", lambda problem, backend: asked.append(problem))
    assert provider.reason_against(cell_with(""), "backward", torch.device("cuda")) is None
    assert [(problem.direction, problem.deterministic) for problem in asked] == [("forward", True), ("backward", True)]
