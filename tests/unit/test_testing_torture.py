"""Every check of the torture suite fails where it should, and ours passes all that apply on a CPU."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tilewise.bench.torture_peers import implementation_named
from tilewise.errors import InvalidInput
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.torture import CHECKS, Implementation, Takes, failures, torture
from tilewise.testing.torture import suite as suites
from tilewise.testing.torture.checks import Check, held_to_budget
from tilewise.testing.torture.sizes import offsets_along, some_of, some_rows
from tilewise.testing.torture.trial import NotApplicable, Trial, Wrong
from unit import broken_attention as broken

BY_NAME = {check.name: check for check in CHECKS}
ON_CPU = [check for check in CHECKS if not check.gpu_only]
# What is wrong in one way each, and checks that have to see it, by a part of the sentence.
CAUGHT = [
    (broken.drops_the_mask, {"ordinary_causal": "out: error", "length_113_causal": "out: error",
                             "rows_without_a_key": "times the budget"}),
    (broken.drops_the_boolean_mask, {"mask_of_each_head": "out: error", "lse_below_minus_88_masked": "out: error",
                                     "masked_keys_are_large": "out: error", "masked_keys_hold_nan": "out: nan"}),
    (broken.aligns_at_the_other_corner, {"causal_bottom_right_more_keys": "out: error",
                                         "causal_bottom_right_one_query": "out: error"}),
    (broken.wrong_scale, {"scale_given": "out: error", "scale_of_one": "out: error"}),
    (broken.without_a_maximum, {"sharp_rows_20": "out: nan", "lse_above_88": "out: nan",
                                "scores_of_thousands": "out: nan", "climbing_scores": "out: nan",
                                "lse_below_minus_88": "out: nan", "lse_below_minus_88_causal": "out: nan",
                                "large_constants": "not finite", "inputs_of_1e6": "out: nan",
                                "large_constants_gradients": "not finite", "inputs_of_1e6_gradients": "not finite"}),
    (broken.frozen_maximum, {"climbing_scores": "out: error"}),
    (broken.ignores_strides, {"storage_bshd": "times the budget", "packed_qkv": "times the budget",
                              "packed_kv": "times the budget", "moat": "nan"}),
    (broken.other_bits_each_time, {"same_bits_forward": "in run", "same_bits_of_gradients": "in run",
                                   "same_bits_of_grouped_heads": "in run"}),
    (broken.other_bits_in_a_batch, {"same_bits_in_any_batch": "of batch entry 0 in its batch than alone"}),
    (broken.writes_into_q, {"inputs_untouched": "q: other bits behind the call"}),
    (broken.writes_into_dout, {"inputs_untouched": "dout: other bits behind the call"}),
    (broken.only_whole_tiles, {"length_192": "out: error", "length_257_causal": "out: error"}),
    (broken.pads_keys_with_zeros, {"lse_below_minus_88": "out: error", "length_320": "out: error"}),
    (broken.wrong_groups, {"grouped_heads": "out: error", "groups_of_three": "out: error"}),
    (broken.nan_where_nothing_is_seen, {"rows_without_a_key": "out: nan",
                                        "causal_bottom_right_more_queries": "out: nan",
                                        "blind_queries_hold_nan": "nan"}),
    (broken.garbage_where_nothing_is_seen, {"rows_without_a_key": "out: error",
                                            "causal_bottom_right_more_queries": "out: error"}),
    (broken.hides_by_a_product, {"masked_keys_hold_nan": "out: nan", "masked_keys_hold_inf": "out: nan"}),
    (broken.swallows_nan, {"nan_is_shown": "are a number in rows that see a key of NaN"}),
    (broken.shares_a_factor, {"infinity_stays_in_its_row": "not finite"}),
    (broken.adds_hidden_keys, {"scores_of_thousands": "out: error"}),
    (broken.base_2_lse, {"ordinary": "lse: error"}),
    (broken.wrong_at_head_dim_256, {"means_at_head_dim_256": "times the budget"}),
    (broken.raises_where_lengths_are_odd, {"length_113": "raised RuntimeError: no kernel image for an odd length"}),
    (broken.takes_no_empty_tensors, dict.fromkeys(("no_queries", "no_keys", "no_batch"), "raised ValueError")),
    (broken.another_shape, {"ordinary": "out has shape (1, 192, 2, 64)"}),
    (broken.scales_dq, {"ordinary": "dq: error", "one_learns": "dq: error", "expanded": "dq: error"}),
    (broken.nan_of_one_query, {"one_query": "dk: nan", "causal_bottom_right_one_query": "dk: nan"}),
    (broken.reads_dout_as_dense, {"storage_bshd": "dq: error", "expanded": "dq: error", "storage_bhds": "dq: error",
                                  "one_number_as_dout": "dv: error"}),
    (broken.overflows, {"inputs_of_1e6_gradients": "dv: ", "large_constants_gradients": "dv: "}),
    (broken.halves_dv_of_zeros, {"zeros": "dv: error"}),
    (broken.forgets_gradients_of_v_alone, {"one_learns": "dv: error"}),
]
PACKED = [
    (broken.packed_as_one_sequence, {"packed": "out: error", "packed_causal_more_keys": "out: error"}),
    (broken.packed_nothing_is_nan, {"packed_zero_lengths": "out: nan", "packed_zero_lengths_head_dim_256": "out: nan"}),
    (broken.packed_of_32_at_most, {"packed_many": "out: error"}),
]


def run(implementation, names, dtype=torch.float32):
    return {result.check: result for result in torture(implementation, "cpu", dtype,
                                                       checks=[BY_NAME[name] for name in names])}


@pytest.mark.parametrize(("attention", "sentences"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_is_found_by_the_right_check(attention, sentences):
    found = run(broken.implementation(attention), sentences)
    for check, part in sentences.items():
        assert found[check].status == "fail", check
        assert part in found[check].sentence, (check, found[check].sentence)


@pytest.mark.parametrize(("make", "sentences"), PACKED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_with_packed_sequences_is_found(make, sentences):
    found = run(make(), sentences)
    for check, part in sentences.items():
        assert found[check].status == "fail", check
        assert part in found[check].sentence, (check, found[check].sentence)


def test_sums_in_16_bits_are_found_in_long_rows():
    found = run(broken.implementation(broken.adds_in_16_bits), ["long_rows"], torch.bfloat16)
    assert "out: error" in found["long_rows"].sentence


def test_every_check_can_fail():
    """What no wrong function above fails, one that returns zeros does."""
    others = [check.name for check in ON_CPU
              if not any(check.name in sentences for _, sentences in (*CAUGHT, *PACKED))]

    def zeros_of_packed(q, k, v, **options):
        return broken.dense_varlen(q, k, v, **options) * 0.0

    takes = {"alignments": ("top_left", "bottom_right")}

    def zeros(q, k, v, *, alignment="bottom_right", **options):
        return broken.returns_zeros(q, k, v, **options)

    found = run(broken.implementation(zeros, zeros_of_packed, **takes), others)
    assert {name: result.status for name, result in found.items() if result.status != "fail"} == {}


def test_ours_passes_in_16_bits():
    names = ("sharp_rows_20", "values_with_a_mean", "scores_of_thousands", "lse_below_minus_88_causal", "long_rows",
             "large_constants", "large_constants_gradients", "inputs_of_1e6", "inputs_of_1e6_gradients")
    found = run(implementation_named("tilewise"), names, torch.bfloat16)
    assert [result for result in found.values() if result.status != "pass"] == []


def test_ours_passes_all_that_applies_on_a_cpu():
    results = torture(implementation_named("tilewise"), "cpu", torch.float32)
    assert failures(results) == []
    assert [result.check for result in results] == [check.name for check in CHECKS]
    assert {result.check for result in results if result.status == "n/a"} == {
        check.name for check in CHECKS if check.gpu_only}
    assert all(result.sentence for result in results if result.status == "n/a")


def test_a_right_function_passes_and_one_of_its_corner_does_not_see_the_other():
    checks = [check for check in CHECKS if check.group != "numbers" and not check.name.startswith("head_dim")]
    results = torture(broken.implementation(broken.dense), "cpu", torch.float32, checks=checks)
    assert failures(results) == []
    assert {result.check for result in results if result.status == "n/a" and "top left" in result.sentence} == {
        "causal_top_left_more_keys", "causal_top_left_more_queries", "unseen_keys_hold_nan"}


@pytest.mark.parametrize(("takes", "check", "sentence"), [
    ({"dtypes": (torch.float16,)}, "ordinary", "takes no float32"),
    ({"head_dims": (64, 128)}, "head_dim_33", "takes no head dim of 33"),
    ({"head_dims": (64, 192)}, "value_dim_smaller", "takes no head dim of 128"),
    ({"other_value_dim": False}, "value_dim_smaller", "takes no head dim of v that differs"),
    ({"grouped_heads": False}, "grouped_heads", "takes no grouped heads"),
    ({"causal": False}, "ordinary_causal", "takes no causal mask"),
    ({"alignments": ()}, "causal_bottom_right_more_keys",
     "takes no causal mask of unequal lengths aligned at the bottom right"),
    ({"masks": False}, "masked_keys_hold_nan", "takes no boolean mask"),
    ({"strided_head_dim": False}, "storage_bhds", "takes no head dim whose stride is not 1"),
    ({"nothing": False}, "no_keys", "takes no empty tensors"),
    ({"backward": False}, "one_learns", "has no backward pass"),
    ({"deterministic": False}, "same_bits_forward", "does not claim the same bits in every run"),
    ({"batch_invariant": False}, "same_bits_in_any_batch", "does not claim the same bits in any batch"),
])
def test_what_is_declared_as_not_taken_is_not_applicable(takes, check, sentence):
    found = run(broken.implementation(broken.dense, **takes), [check])[check]
    assert (found.status, found.sentence) == ("n/a", sentence)


def test_without_a_function_of_packed_sequences_they_are_not_applicable():
    found = run(broken.implementation(broken.dense, None), ["packed"])["packed"]
    assert (found.status, found.sentence) == ("n/a", "takes no packed sequences")


def test_a_refusal_of_one_call_is_not_applicable():
    implementation = replace(broken.implementation(broken.dense), why_not=lambda call: f"takes no {call.q.shape[2]}")
    found = run(implementation, ["ordinary"])["ordinary"]
    assert (found.status, found.sentence) == ("n/a", "takes no 192")


def test_numbers_that_a_dtype_does_not_have_are_not_applicable():
    found = run(broken.implementation(broken.dense), ["inputs_of_1e6"], torch.float16)["inputs_of_1e6"]
    assert (found.status, found.sentence) == ("n/a", "its numbers are not to be written in float16")


def test_a_forward_pass_alone_is_held_to_the_budget_too():
    def forward_only(q, k, v, **options):
        with torch.no_grad():
            return broken.drops_the_mask(q, k, v, **options)

    found = run(broken.implementation(forward_only, backward=False), ["ordinary", "ordinary_causal"])
    assert found["ordinary"].status == "pass"
    assert found["ordinary_causal"].sentence.startswith("out: error")
    assert "dq" not in found["ordinary_causal"].sentence


@pytest.mark.parametrize(("lse", "returned", "sentence"), [
    (False, None, "returned None; allowed is out, a tensor"),
    (False, (1.0, None), "returned (float, None); allowed is out, a tensor"),
    (True, None, "returned None; allowed is (out, lse), two tensors"),
    (True, torch.zeros(2), "returned Tensor; allowed is (out, lse), two tensors"),
    (True, (torch.zeros(2), None), "returned (Tensor, None); allowed is (out, lse), two tensors"),
])
def test_what_is_no_tensor_is_a_failure_that_says_what_was_returned(lse, returned, sentence):
    """torch's cuDNN attention returns None for an empty batch, which ended the suite's process."""
    made = broken.implementation(lambda q, k, v, **options: returned, lse=lse)
    found = run(made, ["no_batch", "ordinary", "storage_bshd"])
    assert {result.sentence for result in found.values()} == {sentence}
    assert {result.status for result in found.values()} == {"fail"}


def test_packed_sequences_that_give_no_tensor_are_a_failure():
    made = replace(broken.implementation(broken.dense), attention_varlen=lambda q, k, v, **options: None)
    (name,) = [check.name for check in ON_CPU if check.case.packed][:1]
    assert run(made, [name])[name].sentence == "returned None; allowed is out, a tensor"


def test_an_output_that_cannot_be_differentiated_is_a_failure():
    def attention(q, k, v, *, return_lse=False, **options):
        result = broken.dense(q, k, v, return_lse=return_lse, **options)
        return tuple(tensor.detach() for tensor in result) if return_lse else result.detach()

    found = run(broken.implementation(attention), ["ordinary"])["ordinary"]
    assert found.sentence.startswith("raised RuntimeError: element 0 of tensors does not require grad")


def test_out_of_memory_is_not_applicable_and_no_pass():
    def too_large(q, k, v, **options):
        raise torch.OutOfMemoryError("tried to allocate 3 TiB")

    found = run(broken.implementation(too_large), ["ordinary"])["ordinary"]
    assert (found.status, found.sentence) == ("n/a", "out of memory: tried to allocate 3 TiB")


def test_memory_that_is_not_there_is_told_with_what_it_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**37))
    trial = Trial(broken.implementation(broken.dense), "cuda", torch.bfloat16)
    assert suites._too_large(BY_NAME["elements_past_2_31"], trial) == (
        f"takes about 52.0 GiB ({13 * 2**31} elements); 1.0 GiB are free")
    assert suites._too_large(BY_NAME["ordinary"], trial) is None


def test_a_lost_device_ends_the_run(monkeypatch):
    monkeypatch.setattr(suites, "run_check", lambda check, trial: suites._result(
        check, trial, "fail", "raised AcceleratorError: an illegal memory access", lost=True))
    results = torture(broken.implementation(broken.dense), checks=CHECKS[:3])
    assert [(result.status, result.sentence) for result in results[1:]] == [
        ("n/a", "the device was lost in ordinary")] * 2


def test_a_check_that_measures_nothing_says_so_and_blames_nobody():
    def overflowing(inputs, case):
        return inputs._replace(v=inputs.v * 1e38)

    check = Check("nothing", "numbers", "", Case("nothing"), held_to_budget(overflowing))
    with pytest.raises(ValueError, match="dense attention in the tested dtype has no finite error: dq"):
        torture(broken.implementation(broken.dense), "cpu", torch.float32, checks=[check])


def test_unknown_alignments_are_refused():
    with pytest.raises(InvalidInput, match=r"alignments is \('top',\); allowed are \('top_left', 'bottom_right'\)"):
        Takes(alignments=("top",))


def test_nothing_of_a_check_is_held_when_it_is_over():
    held = []

    def attention(q, k, v, **options):
        held.extend(weakref.ref(tensor) for tensor in (q, k, v))
        return broken.drops_the_mask(q, k, v, **options)

    torture(broken.implementation(attention), "cpu", torch.float32, checks=[BY_NAME["ordinary"],
                                                                          BY_NAME["ordinary_causal"]])
    gc.collect()
    assert held
    assert all(tensor() is None for tensor in held)


def test_names_and_reports_of_the_checks():
    assert len(BY_NAME) == len(CHECKS)
    assert [check.group for check in CHECKS] == sorted(
        (check.group for check in CHECKS),
        key=["numbers", "edges", "layouts", "sizes", "determinism", "graphs", "streams"].index)
    assert all(check.issue is None or check.issue.startswith("https://github.com/") for check in CHECKS)
    assert all(check.gpu_only for check in CHECKS if check.group in ("sizes", "graphs", "streams"))


def leaves_the_last_entries_out(dim):
    def attention(q, k, v, **options):
        result = broken.dense(q, k, v, **options)
        out, lse = result if isinstance(result, tuple) else (result, None)
        kept = torch.ones(out.shape[dim], dtype=out.dtype)
        kept[-3:] = 0.0
        out = out * kept.view([-1 if place == dim else 1 for place in range(4)])
        return out if lse is None else (out, lse)

    return broken.implementation(attention)


@pytest.mark.parametrize("dim", [0, 1])
def test_entries_past_the_grid_are_found_missing(dim):
    """The checks of sizes, at a size that a CPU has."""
    case = Case("many", b=40 if dim == 0 else 1, hq=40 if dim else 1, hk=40 if dim else 1, sq=16, sk=16)
    some_of(dim, Trial(broken.implementation(broken.dense), "cpu", torch.float32), case)
    with pytest.raises(Wrong, match="out: error"):
        some_of(dim, Trial(leaves_the_last_entries_out(dim), "cpu", torch.float32), case)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_that_wrap_are_found(dim):
    """Little of the storage past 2³¹ elements is touched, so that a CPU has the memory for it."""
    case = replace(BY_NAME["rows_past_2_31"].case, sq=20, sk=20, d=16, dv=16)

    def wraps(q, k, v, **options):
        if max(q.stride(place) * (q.shape[place] - 1) for place in range(4)) >= 2**31:
            k = k * 0.0
        return broken.dense(q, k, v, **options)

    def dense(q, k, v, **options):
        return broken.dense(q.contiguous(), k.contiguous(), v.contiguous(), **options)

    offsets_along(dim, Trial(broken.implementation(dense), "cpu", torch.float32), case)
    with pytest.raises(Wrong, match="out: error"):
        offsets_along(dim, Trial(broken.implementation(wraps), "cpu", torch.float32), case)


@pytest.mark.parametrize("name", ["length_of_65600", "length_of_65600_causal"])
def test_rows_of_long_sequences_are_held_to_the_budget(name):
    case = replace(BY_NAME[name].case, sq=130, sk=130)
    some_rows(Trial(broken.implementation(broken.dense), "cpu", torch.float32), case)
    with pytest.raises(Wrong, match="out: error"):
        some_rows(Trial(broken.implementation(broken.only_whole_tiles), "cpu", torch.float32), case)

    def everywhere(leaves, out, dout):
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return dq + 1e-3, dk, dv

    with pytest.raises(Wrong, match=r"dq: .* in a row at which no gradient arrives"):
        some_rows(Trial(broken.implementation(broken._with_backward(everywhere)), "cpu", torch.float32), case)


def test_a_refusal_is_raised_as_not_applicable():
    implementation = Implementation("refuses", broken.dense, why_not=lambda call: "never")
    trial = Trial(implementation, "cpu", torch.float32)
    with pytest.raises(NotApplicable, match="never"):
        trial.results(Case("case"), Inputs(*trial.inputs(Case("case"))))
