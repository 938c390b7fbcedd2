"""What a launch past Triton's front end hands to the launcher in C is what Triton's own way hands there."""

import pytest

from kernels.compile_process import SCRIPT, compile_all

pytestmark = pytest.mark.aot
# What Python has for what the launcher reads: objects, 32- and 64-bit integers, floats.
READS = {"O": (list, int), "i": int, "L": int, "d": float}


def test_both_ways_hand_the_same_arguments_and_the_launcher_can_read_them():
    wanted = [{"d": d, "dtype": "bfloat16", "mask": mask, "s": 4096} for d, mask in (
        (128, [None, 0, "top_left"]), (40, [None, None, None]))]
    for row in compile_all("3.6.0", wanted, script=SCRIPT.with_name("handed_arguments.py")):
        own, past = row["handed"]
        assert own == past
        arguments = past[row["base"]:]
        assert len(arguments) == len(row["format"])
        assert all(isinstance(argument, READS[read])
                   for argument, read in zip(arguments, row["format"], strict=True))
        # A map, four sizes and four strides, four times; lse and the counter.
        maps = [argument for argument in arguments if isinstance(argument, list) and argument[0] == "map"]
        assert [encoded[1] for encoded in maps] == row["addresses"][:4]
        assert arguments[36:38] == row["addresses"][4:]
