"""A launch through the CUDA driver hands a kernel what Triton's own launcher does, whichever Triton compiled it."""

import pytest

from compiled.compile_process import BETWEEN, SCRIPT, VERSIONS, compile_all

pytestmark = pytest.mark.aot
CAUSAL, FULL = [None, 0, "top_left"], [None, None, None]
PACKED = ["cu_seqlens_q", "cu_seqlens_k", "seqlens_k"]
CALLS = {
    "forward with sinks": {"kernel": "hopper_forward", "d": 64, "mask": CAUSAL, "options": ["sinks"]},
    "forward in two pieces": {"kernel": "hopper_forward", "d": 192, "mask": FULL},
    "forward of packed sequences": {"kernel": "hopper_forward", "d": 40, "mask": FULL, "options": PACKED},
    "forward of packed sequences, heads in one tile": {"kernel": "hopper_forward", "d": 128, "mask": CAUSAL,
                                                       "options": [*PACKED, "sinks"], "heads": (8, 2), "pack_gqa": 4},
    "forward with a mask plan": {"kernel": "hopper_forward", "d": 128, "mask": CAUSAL,
                                 "options": ["documents_q", "documents_k", "sinks"]},
    "forward with a bias, slopes and dropout": {"kernel": "hopper_forward", "d": 128, "mask": CAUSAL,
                                                "options": ["bias", "alibi_slopes", "seed", "sinks"]},
    "forward with the largest scores": {"kernel": "hopper_forward", "d": 64, "mask": CAUSAL, "options": ["max_logit"]},
    "backward with slopes": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL,
                             "options": [*PACKED, "alibi_slopes", "seed"]},
    "backward with a mask plan": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL, "options": ["mask"]},
    "backward with a mask plan and a softcap": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL,
                                                "options": ["mask", "softcap"]},
    "backward": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL, "heads": (10, 5)},
    "backward, d 128": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL, "heads": (10, 5)},
    "backward in order": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL, "heads": (10, 5),
                          "deterministic": True},
    "backward in order, of packed sequences": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL,
                                               "options": PACKED, "deterministic": True},
    "backward, a head a program": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL, "heads": (132, 132), "s": 128},
    "backward of packed sequences": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL, "options": PACKED},
    "backward with dropout": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL, "options": ["seed"]},
    "backward with a bias": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL, "options": ["bias"]},
    "backward with a bias and a softcap": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL,
                                           "options": ["bias", "softcap"]},
    "backward, d 192 and 128": {"kernel": "hopper_backward", "d": 192, "dv": 128, "mask": CAUSAL},
    "backward, d 256": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL},
    "backward, d 256, with a softcap": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL, "options": ["softcap"]},
    "backward, groups split": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL, "heads": (8, 2),
                               "group_splits": 4},
    "backward, d 256, with dropout": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL, "options": ["seed"]},
    "backward, d 256, of packed sequences": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL, "options": PACKED},
    "backward, d 256, with mask plans": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL,
                                         "options": ["mask", "seed"]},
    "backward, d 256, groups split": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL, "heads": (4, 2),
                                      "group_splits": 2},
    "forward in float32": {"kernel": "hopper_forward", "d": 128, "mask": CAUSAL, "float32_results": True},
    "backward in float32": {"kernel": "hopper_backward", "d": 128, "mask": CAUSAL, "float32_results": True},
    "backward, a head a program, in float32": {"kernel": "hopper_backward", "d": 64, "mask": CAUSAL,
                                               "heads": (132, 132), "s": 128, "float32_results": True},
    "backward, d 256, in float32": {"kernel": "hopper_backward", "d": 256, "mask": CAUSAL, "float32_results": True},
    "gradient of a bias": {"kernel": "hopper_dbias", "d": 64, "mask": CAUSAL},
    "Triton's forward": {"kernel": "forward", "d": 64, "mask": CAUSAL, "descriptors": True,
                         "options": ["sinks", "bias", "alibi_slopes"]},
    "Triton's forward through pointers": {"kernel": "forward", "d": 40, "mask": FULL, "descriptors": False,
                                          "options": ["seed", "score:relative", "documents_q", "documents_k"]},
}
KERNELS = {"backward": ["hopper_augmented_k_kernel", "hopper_backward_d64_kernel", "hopper_dq_kernel"],
           "backward of packed sequences": ["hopper_zero_kernel", "hopper_backward_kernel", "hopper_dq_kernel"],
           "backward, d 256": ["hopper_backward_d256_kernel", "hopper_dq_d256_kernel"],
           "backward, groups split": ["hopper_augmented_k_kernel", "hopper_backward_kernel", "hopper_dq_kernel",
                                      "hopper_sum_splits_kernel"]}


def handed(version, name):
    row, = compile_all(version, [{"dtype": "bfloat16", "s": 4096} | CALLS[name]],
                       script=SCRIPT.with_name("handed_arguments.py"))
    return row["launches"]


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_hand_the_same(name):
    check(handed(VERSIONS[0], name), name)


@pytest.mark.parametrize("version", [*VERSIONS[1:], BETWEEN])
@pytest.mark.parametrize("name", ["forward with sinks", "backward", "Triton's forward"])
def test_both_ways_hand_the_same_with_every_triton(version, name):
    check(handed(version, name), name)


def check(launches, name):
    assert launches
    assert name not in KERNELS or [launch["kernel"] for launch in launches] == KERNELS[name]
    for launch in launches:
        (grid, values), (own_grid, own_values) = launch["triton"], launch["driver"]
        assert own_grid == grid
        assert own_values == values
        assert any(isinstance(value, int) and value > 2**32 for value in values), "an address"
