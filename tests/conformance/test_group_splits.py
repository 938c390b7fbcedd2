"""Many query heads on few of k: on Hopper the backward pass splits them among tiles, and sums what these have.

On a CPU calls are a sixteenth as long.
"""

import pytest
import torch

from conformance.calls import assert_gradients_within_budget, forward_and_backward, operands_of, problem_of
from tilewise.masks import Mask, causal, window
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs
from tilewise.tuning.device import device_spec
from tilewise.tuning.select import choose_group_splits, hopper_backward_config

CASES = {
    "d64": {"mask": causal()},
    "d64_window": {"mask": causal("bottom_right") & window(500, 0, "bottom_right"), "sk": 1300, "layout": "bshd"},
    "d64_bias": {"mask": causal(), "bias": "1hqk", "sq": 1024, "sk": 1024},
    "d96": {"mask": causal(), "d": 96, "dv": 80},
    "d128": {"mask": Mask(), "d": 128, "dv": 128, "layout": "packed_kv"},
    "d128_alibi": {"mask": causal(), "d": 128, "dv": 128, "alibi": "h"},
    "d128_softcap": {"mask": causal(), "d": 128, "dv": 128, "softcap": 5.0, "sinks": True},
    "d128_dropout": {"mask": causal(), "d": 128, "dv": 128, "dropout_p": 0.25},
    "d256": {"mask": causal(), "d": 256, "dv": 256},
    "d160": {"mask": window(300, 100), "d": 160, "dv": 200},
}


def case_of(name, device):
    case = {"b": 2, "hq": 6, "hk": 1, "sq": 1100, "sk": 1100} | CASES[name]
    if device.type == "cpu":
        case |= {"sq": case["sq"] // 16, "sk": case["sk"] // 16}
    return Case(name, **case)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_few_heads_of_k_stay_within_error_budget(backend, name, device, main_dtype):
    case = case_of(name, device)
    inputs = make_inputs(case, main_dtype, device)
    results = forward_and_backward(backend, case, inputs, "out_and_lse")
    assert_gradients_within_budget(case, inputs, results.gradients, "out_and_lse")
    if backend.name == "gluon":
        problem = problem_of(case, inputs, operands_of(case, inputs)).backward(lse_grad=True)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        assert choose_group_splits(problem, hopper_backward_config(problem, device_spec(device)), num_sms) > 1
        again = forward_and_backward(backend, case, inputs, "out_and_lse")
        assert torch.equal(again.dk, results.dk), "the order of splits does not depend on which came first"
        assert torch.equal(again.dv, results.dv)
