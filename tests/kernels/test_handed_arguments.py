"""What a launch past Triton's front end hands to the launcher in C is what Triton's own way hands there."""

import pytest

from kernels.compile_process import SCRIPT, compile_all

pytestmark = pytest.mark.aot
# What Python has for what the launcher reads: objects, 32- and 64-bit integers, floats.
READS = {"O": object, "i": int, "L": int, "d": float}


def check(request, dims=4):
    """Return the addresses in the encoded maps, in order, what follows the last one, and the tensors' addresses.

    ``dims``: those of the last tensor that comes through a map.
    """
    row, = compile_all("3.6.0", [{"dtype": "bfloat16", "s": 4096} | request],
                       script=SCRIPT.with_name("handed_arguments.py"))
    own, past = row["handed"]
    assert own == past
    arguments = past[row["base"]:]
    assert len(arguments) == len(row["format"])
    assert all(isinstance(argument, READS[read]) for argument, read in zip(arguments, row["format"], strict=True))
    encoded = [argument[1] for argument in arguments if isinstance(argument, list) and argument[0] == "map"]
    # Past the last map come its tensor's sizes and strides, then pointers.
    last = max(i for i, argument in enumerate(arguments) if isinstance(argument, list) and argument[0] == "map")
    return encoded, arguments[last + 1 + 2 * dims:], row["addresses"]


@pytest.mark.parametrize(("d", "mask", "options", "shown"), [
    (128, [None, 0, "top_left"], [], (0, 1, 2, 3)),
    (40, [None, None, None], ["sinks"], (0, 1, 2, 3)),
    (192, [None, None, None], [], (0, 0, 1, 1, 2, 2, 3)),  # in two pieces
], ids=str)
def test_both_ways_hand_the_same_arguments_of_the_forward(d, mask, options, shown):
    encoded, behind, (*tensors, counter) = check(
        {"kernel": "hopper_forward", "d": d, "mask": mask, "options": options})
    lse, sinks = tensors[4:]
    assert encoded == [tensors[i] for i in shown]
    assert behind[:3] == [lse, counter, sinks]


@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (128, False), (64, True), (128, True)])
def test_both_ways_hand_the_same_arguments_of_the_backward(d, deterministic):
    heads = (10, 5)  # 160 tiles of keys
    encoded, behind, (q, k, v, dout, _lse, _delta, _dq, dk, dv, tails, sums, *counter) = check(
        {"kernel": "hopper_backward", "d": d, "mask": [None, 0, "top_left"], "heads": heads,
         "deterministic": deterministic}, dims=2)
    assert encoded == [q, k, v, dout, *([tails] if d == 64 or not deterministic else []), dk, dv, sums]
    # Counters of steps stand behind the sums; where tiles are drawn, one of these comes in their place.
    assert behind[0] == (sums + 4 * heads[0] * 4096 * d if deterministic else counter[0])


@pytest.mark.parametrize(("d", "s"), [(64, 128), (64, 1024), (128, 128)], ids=["one", "two", "wide"])
def test_both_ways_hand_the_same_arguments_where_programs_have_a_head_to_themselves(d, s):
    encoded, behind, (q, k, v, dout, _lse, _delta, dq, dk, dv, tails, sums, *_) = check(
        {"kernel": "hopper_backward", "d": d, "mask": [None, 0, "top_left"], "heads": (132, 132), "s": s}, dims=2)
    assert encoded == [q, k, v, dout, tails, dk, dv, dq, sums]
    assert behind[0] == sums, "as it lies in memory, too"


def test_both_ways_hand_the_same_arguments_of_the_backward_of_packed_sequences():
    encoded, behind, (q, k, v, dout, _lse, _delta, _dq, dk, dv, *lengths, _seed, _tails, sums) = check(
        {"kernel": "hopper_backward", "d": 64, "mask": [None, 0, "top_left"],
         "options": ["cu_seqlens_q", "cu_seqlens_k", "seqlens_k"]}, dims=4)
    assert encoded == [q, k, v, dout, dk, dv]
    assert behind[:8] == [None, sums, None, dk, dv, *lengths[:2], None]
    assert behind[8] == lengths[3]


def test_both_ways_hand_the_same_seed_to_the_backward():
    encoded, behind, (q, k, v, dout, _lse, _delta, _dq, dk, dv, *_lengths, seed, _tails, sums) = check(
        {"kernel": "hopper_backward", "d": 64, "mask": [None, 0, "top_left"], "options": ["seed"]})
    assert encoded == [q, k, v, dout, dk, dv]
    assert behind[:9] == [None, sums, *6 * [None], seed] or behind[:9] == [None, sums, *7 * [None]]


def test_both_ways_hand_the_same_arguments_of_the_backward_of_heads_in_pieces():
    encoded, behind, (q, k, v, dout, _lse, _delta, _dq, dk, dv_, _tails, sums) = check(
        {"kernel": "hopper_backward", "d": 192, "dv": 128, "mask": [None, 0, "top_left"]})
    assert encoded == [q, q, k, k, v, dout, dk, dk, dv_]
    assert sums in behind[:2]


@pytest.mark.parametrize(("d", "dv", "of_q", "of_v"), [(256, 256, 1, 1), (192, 192, 2, 2), (192, 256, 2, 1)])
@pytest.mark.parametrize("part", ["dkdv", "dq"])
def test_both_ways_hand_the_same_arguments_of_the_backward_of_wide_heads(part, d, dv, of_q, of_v):
    encoded, _behind, (q, k, v, dout, _lse, _delta, *gradients, _made) = check(
        {"kernel": "hopper_backward", "d": d, "dv": dv, "mask": [None, 0, "top_left"], "part": part})
    assert encoded == [q] * of_q + [k] * of_q + [v] * of_v + [dout] * of_v + [
        gradient for gradient, pieces in zip(gradients, (of_q, of_v), strict=False) for _ in range(pieces)]


def test_both_ways_hand_the_same_arguments_of_the_sum_of_a_shared_bias_gradient():
    encoded, behind, (q, k, v, dout, lse, delta, dbias, bias, _bias) = check(
        {"kernel": "hopper_dbias", "d": 64, "mask": [None, 0, "top_left"]})
    assert encoded == [q, k, v, dout]
    assert behind[:4] == [lse, delta, bias, dbias]
