"""The same call gives the same bits: repeated, beside other work, and whatever else is in the batch."""

import random
from dataclasses import replace

import pytest
import torch

from conformance.calls import forward_and_backward
from tilewise.masks import Mask, causal, sink_tokens, window
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import make_inputs
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
    for _ in range(1 if device.type == "cpu" else 49):  # nothing races in a CPU's loops
        assert _differing(first, forward_and_backward(backend, case, inputs, "out_and_lse", deterministic=True)) == []


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (192, 128), (64, 200)])
def test_repeats_of_wide_heads_are_bit_equal(backend, d, dv, device, main_dtype):
    """On Hopper, dQ of these heads has a kernel of its own, at 192 and 128 not in plain calls."""
    length = 70 if device.type == "cpu" else 1000
    case = Case("wide", b=2, hq=4, hk=2, sq=length, sk=length + 30, d=d, dv=dv, mask=causal("bottom_right"))
    inputs = make_inputs(case, main_dtype, device)
    first = forward_and_backward(backend, case, inputs, "out_and_lse", deterministic=True)
    for _ in range(1 if device.type == "cpu" else 49):
        assert _differing(first, forward_and_backward(backend, case, inputs, "out_and_lse", deterministic=True)) == []


# Of one sequence: 2 tiles of queries and 2 of keys, neither full.
QUERIES, KEYS = 70, 100
PLAIN = Case("plain", hq=2, hk=1, sq=QUERIES, sk=KEYS, d=16, dv=16)
CHANGED = replace(PLAIN, name="changed", mask=causal("bottom_right") & window(60, 0) & sink_tokens(3), alibi="h",
                  sinks=True, softcap=3.0)


def _composed(case, kind, draw, longest):
    """Return the case with one to three neighbours around its sequence, and the sequence's number."""
    b = draw.randint(2, 4)
    number = draw.randrange(b)
    if kind == "dense":
        return replace(case, b=b), number
    others = [(draw.randint(0, longest), draw.randint(0, longest)) for _ in range(b - 1)]
    lengths_q, lengths_k = zip(*others[:number], (case.sq, case.sk), *others[number:], strict=True)
    room = draw.choice((0, 0, 17))
    packed = draw.choice(("tight", "gaps")) if kind == "packed" else ""
    return replace(case, b=b, sq=max(lengths_q) + room, sk=max(lengths_k) + room, lengths_q=lengths_q,
                   lengths_k=lengths_k, packed=packed), number


def _sequence_of(case, number, tensors, sides):
    """Cut one sequence out of (b, h, s, ...) tensors of queries ("q") or keys ("k")."""
    spans = {side: case.spans(side)[number] for side in "qk"}
    entry = 0 if case.packed else number
    return [tensor[entry, :, spans[side].start:spans[side].stop] for tensor, side in zip(tensors, sides, strict=True)]


@pytest.mark.parametrize("kind", ["dense", "padded", "packed"])
@pytest.mark.parametrize("case", [PLAIN, CHANGED], ids=str)
def test_neighbours_do_not_change_a_bit(backend, case, kind, device, main_dtype):
    """Neither their number nor their lengths, nor where they leave a sequence its place.

    Left out: what the batch shares (a gradient of sinks or slopes is a sum over all of it), and dropout, which draws by
    the sequence's number.
    """
    draw = random.Random(f"{case} {kind}")
    own = [tensor[0] for tensor in make_inputs(case, main_dtype, device, seed=1)]
    compositions = [(replace(case, **({} if kind == "dense" else {
        "lengths_q": (QUERIES,), "lengths_k": (KEYS,), "packed": "tight" if kind == "packed" else ""})), 0)]
    compositions += [_composed(case, kind, draw, 80 if device.type == "cpu" else 3000)
                     for _ in range(2 if device.type == "cpu" else 50)]
    found = []
    for composition, number in compositions:
        inputs = make_inputs(composition, main_dtype, device)
        for place, values in zip(_sequence_of(composition, number, inputs, "qkkqq"), own, strict=True):
            place.copy_(values)
        got = forward_and_backward(backend, composition, inputs, "out_and_lse", deterministic=True)
        found.append(_sequence_of(composition, number, got[:5], "qqqkk"))
    for (composition, number), results in zip(compositions, found, strict=True):
        differing = [name for name, one, alone in zip(Results._fields, results, found[0], strict=False)
                     if not torch.equal(one, alone)]
        assert not differing, f"sequence {number} of {composition!r}: {differing}"


@pytest.mark.parametrize(("mask", "group", "lengths"), [
    (Mask(), 1, (500, 530)), (causal("bottom_right"), 2, (250, 280)), (window(100, 20, "top_left"), 1, (500, 530)),
    (Mask(), 1, (1000, 1024)), (causal("top_left"), 1, (1000, 1000)), (window(100, 20, "top_left"), 1, (1000, 1024))],
    ids=str)
def test_an_entry_among_many_has_the_bits_that_it_has_alone(backend, mask, group, lengths, device, main_dtype):
    """On Hopper, where heads are as many as multiprocessors, a program has all keys of one, then of another.

    Of a longer one several programs have all keys, which add to its dQ in turn.
    """
    b, heads = (4, 66) if lengths[0] <= 500 else (8, 33)
    sq, sk = lengths
    if device.type == "cpu":
        b, heads, sq, sk = 2, 2, 70, 70 + sk - sq
    many = Case("many", b=b, hq=heads * group, hk=heads, sq=sq, sk=sk, d=64, dv=64, mask=mask)
    inputs, own = (make_inputs(case, main_dtype, device) for case in (many, replace(many, b=1)))
    of_all = forward_and_backward(backend, many, inputs, "out_and_lse", deterministic=True)
    for entry in (0, b - 1):
        for place, values in zip(own[:5], inputs[:5], strict=True):
            place.copy_(values[entry:entry + 1])
        alone = forward_and_backward(backend, replace(many, b=1), own, "out_and_lse", deterministic=True)
        assert [name for name, one, other in zip(Results._fields[:5], of_all, alone, strict=False)
                if not torch.equal(one[entry:entry + 1], other)] == []


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("entries", [4, 5])
@pytest.mark.parametrize("mask", [Mask(), causal("top_left"), window(100, 20, "top_left")], ids=str)
def test_programs_that_take_tile_after_tile_leave_nothing_of_one_in_the_next(backend, mask, entries, d, device,
                                                                             main_dtype):
    """On Hopper 132 programs have these tiles in turn, and those of one entry at once.

    Of five entries a tile at a time, twice, since they share a counter; of four a head at a time.
    """
    b, heads, length = (2, 1, 70) if device.type == "cpu" else (entries, 33, 300)
    many = Case("many", b=b, hq=heads, hk=heads, sq=length, sk=length, d=d, dv=d, mask=mask)
    inputs, own = (make_inputs(case, main_dtype, device) for case in (many, replace(many, b=1)))
    for place, values in zip(own[:5], inputs[:5], strict=True):
        place.copy_(values[-1:])
    first, second = (forward_and_backward(backend, many, inputs) for _ in range(2))
    alone = forward_and_backward(backend, replace(many, b=1), own)
    for all_of_one, all_of_other, want in zip(first[2:5], second[2:5], alone[2:5], strict=True):
        for got in (all_of_one[-1:], all_of_other[-1:]):
            assert float((got - want).float().abs().max()) <= 2.0**-7 * float(want.float().abs().max())


@pytest.mark.gpu
def test_calls_racing_on_two_streams_do_not_disturb_one_another(backend, device, main_dtype):
    """On Hopper with more tiles than multiprocessors, of which some wait for others, on streams of two priorities."""
    case = Case("racing", b=2, hq=20, hk=10, sq=1023, sk=1023, d=64, dv=64, mask=case_named("mha_causal").mask)
    pair = [make_inputs(case, main_dtype, device, seed) for seed in (0, 1)]
    calm = [forward_and_backward(backend, case, inputs, deterministic=True) for inputs in pair]
    streams = [torch.cuda.Stream(device, priority=-i) for i in range(2)]
    torch.cuda.synchronize(device)
    racing = []
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                racing.append((i, forward_and_backward(backend, case, pair[i], deterministic=True)))
    torch.cuda.synchronize(device)
    assert [names for i, results in racing if (names := _differing(calm[i], results))] == []


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", [Mask(), causal()], ids=str)
def test_no_run_of_250_is_an_outlier(backend, mask, d, device, main_dtype):
    """Of a call that need not be deterministic: what one program owns has the same bits; dq, its order of sums.

    A read before its write, once in a while, would be off by far more than rounding.
    """
    case = Case("outlier", b=2, hq=4, hk=2, sq=1000, sk=1000, d=d, dv=d, mask=mask)
    inputs = make_inputs(case, main_dtype, device)
    first = forward_and_backward(backend, case, inputs)
    largest, eps = first.dq.abs().amax(), torch.finfo(main_dtype).eps
    if main_dtype is torch.float32:  # each of 1000 / 32 additions rounds a sum that may be larger than what comes of it
        step = 32 * eps * largest
    else:  # to the next number, at most
        step = eps * first.dq.abs().clamp(min=largest * 2**-10)
    for _ in range(250):
        again = forward_and_backward(backend, case, inputs)
        assert _differing(first._replace(dq=None), again._replace(dq=None)) == []
        assert ((again.dq - first.dq).abs() <= step).all()
