"""The same call gives the same bits: repeated, beside other work, and whatever else is in the batch."""

import pytest
import torch

from conformance.calls import forward_and_backward
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.oracle import Results


def _differing(first, second):
    return [name for name, a, b in zip(Results._fields, first, second, strict=True)
            if not (a is b is None or torch.equal(a, b))]


@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "window_bottom_right_blind_queries", "everything",
                                  "padded_everything", "packed_everything"])
def test_repeats_are_bit_equal(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    first = forward_and_backward(backend, case, inputs, "out_and_lse", deterministic=True)
    for _ in range(3 if device.type == "cpu" else 49):  # nothing races in a CPU's loops
        assert _differing(first, forward_and_backward(backend, case, inputs, "out_and_lse", deterministic=True)) == []


def test_batch_composition_does_not_change_a_bit(backend, device, main_dtype):
    case = Case("pair", b=2, hq=4, hk=2, sq=66, sk=66, d=40, dv=40)
    alone = Case("alone", b=1, hq=4, hk=2, sq=66, sk=66, d=40, dv=40)
    inputs = make_inputs(case, main_dtype, device)
    both = forward_and_backward(backend, case, inputs, deterministic=True)
    for i in range(2):
        one = forward_and_backward(backend, alone, Inputs(*(tensor[i:i + 1] for tensor in inputs)), deterministic=True)
        assert _differing(one, [None if result is None else result[i:i + 1] for result in both]) == []


@pytest.mark.gpu
def test_calls_racing_on_two_streams_do_not_disturb_one_another(backend, device):
    case = Case("racing", b=2, hq=8, hk=4, sq=1023, sk=1023, d=64, dv=64, mask=case_named("mha_causal").mask)
    pair = [make_inputs(case, torch.bfloat16, device, seed) for seed in (0, 1)]
    calm = [forward_and_backward(backend, case, inputs, deterministic=True) for inputs in pair]
    streams = [torch.cuda.Stream(device) for _ in pair]
    torch.cuda.synchronize(device)
    racing = []
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                racing.append((i, forward_and_backward(backend, case, pair[i], deterministic=True)))
    torch.cuda.synchronize(device)
    assert [names for i, results in racing if (names := _differing(calm[i], results))] == []
