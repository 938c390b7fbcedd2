"""Activations of a pretrained model, replayed through every backend: q, k, v and dout of each of its layers.

Gaussian inputs miss faults that these show: keys of a layer have much in common, so that P is far from flat and dS a
small difference of large numbers, in some heads more than in others. The layers stand in the place of a batch.
"""

import pytest
import torch

from conformance.calls import assert_both_within_budget, forward_and_backward
from conformance.real_activations import captured, joined, with_outliers, with_sink
from tilewise.masks import Mask, causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.oracle import Results

KINDS = {"as_captured": lambda own: own, "outliers": with_outliers, "sink": with_sink,
         "outliers_and_sink": lambda own: with_sink(with_outliers(own))}
MASKS = {"no_mask": Mask(), "causal": causal()}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
JOINED = {64: 2, 128: 4, 256: 8}  # by head dim, how many of the model's heads are one
# On a CPU, where the interpreter takes its time, fewer tokens and heads of each layer, and each kind once with every d.
TOKENS, HEADS = {"cpu": 70, "cuda": 512}, {"cpu": 3, "cuda": 12}
ON_CPU = {("fp32", "as_captured", "causal"), ("fp32", "outliers_and_sink", "no_mask"), ("fp16", "sink", "causal"),
          ("bf16", "outliers", "no_mask")}


def pytest_generate_tests(metafunc):
    if "kind" in metafunc.fixturenames:
        on_cpu = torch.device(metafunc.config.getoption("--device")).type == "cpu"
        rows = [(dtype, kind, mask) for dtype in DTYPES for kind in KINDS for mask in MASKS
                if not on_cpu or (dtype, kind, mask) in ON_CPU]
        metafunc.parametrize(("dtype_name", "kind", "mask_name"), rows, ids=["-".join(row) for row in rows])


def replay(kind, d, mask_name, dtype_name, device):
    """Return a case whose batch entries are the layers, and its inputs."""
    activations = KINDS[kind](joined(captured(TOKENS[device.type]), JOINED[d]))
    q, k, v, dout = (tensor[:, :HEADS[device.type]].to(device=device, dtype=DTYPES[dtype_name])
                     for tensor in activations)
    layers, heads, tokens, _ = q.shape
    case = Case("real_activations", b=layers, hq=heads, hk=heads, sq=tokens, sk=tokens, d=d, dv=d,
                mask=MASKS[mask_name])
    return case, Inputs(q, k, v, dout, torch.zeros(q.shape[:3], device=device))


def assert_parallel(results, exact):
    """Hold each gradient's direction, layer by layer and head by head: a small one disappears in the others' budget."""
    for name in ("dq", "dk", "dv"):
        got, true = (getattr(gradients, name).double().flatten(2) for gradients in (results, exact))
        cosines = torch.nn.functional.cosine_similarity(got, true, dim=-1, eps=0.0)
        assert (cosines > 0.99).all(), f"{name}: its cosines with float64's, by layer and head, are {cosines}"


@pytest.mark.parametrize("d", JOINED)
def test_real_activations_stay_within_error_budget(backend, d, dtype_name, kind, mask_name, device):
    case, inputs = replay(kind, d, mask_name, dtype_name, device)
    results = forward_and_backward(backend, case, inputs)
    assert_parallel(results, assert_both_within_budget(case, inputs, results))


def as_it_is(tensor):
    return tensor


def by_hand(case, inputs, *, of_probs=as_it_is, of_delta=as_it_is, of_keys=as_it_is):
    """Compute in float32 what a fused kernel does, and round the results; each of the functions may plant a fault."""
    q, k, v, dout = (tensor.float() for tensor in inputs[:4])
    scale, visible = case.d ** -0.5, case.mask.visible(case.sq, case.sk, q.device)
    scores = (scale * q @ k.mT).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    probs = of_probs((scores - lse[..., None]).exp())
    out = (probs @ v).to(inputs.q.dtype)
    delta = of_delta((dout * out).sum(-1, keepdim=True))
    dscores = probs * (dout @ v.mT - delta)
    made = (out, scale * dscores @ of_keys(k), scale * dscores.mT @ q, probs.mT @ dout)
    out, dq, dk, dv = (tensor.to(inputs.q.dtype) for tensor in made)
    return Results(out, lse, dq, dk, dv)


def of_bits(count):
    """Return what rounds numbers to so many bits."""

    def rounded(tensor):
        fraction, exponent = torch.frexp(tensor)
        return torch.ldexp(torch.round(fraction * 2**count), exponent - count)

    return rounded


FAULTS = {  # each with the kind of activations that it is planted in
    "probs_of_four_bits": ("as_captured", {"of_probs": of_bits(4)}),
    "probs_below_2^-9_lost": ("as_captured", {"of_probs": lambda probs: torch.where(probs < 2.0**-9, 0.0, probs)}),
    "delta_of_another_head": ("as_captured", {"of_delta": lambda delta: delta.roll(1, 1)}),
    "first_key_lost": ("sink", {"of_probs": lambda probs: probs.clone().index_fill_(-1, torch.tensor([0]), 0.0)}),
    "keys_clipped": ("outliers", {"of_keys": lambda keys: keys.clamp(-16, 16)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    own_kind, planted = FAULTS[fault]
    case, inputs = replay(own_kind, 64, "causal", "bf16", torch.device("cpu"))
    exact = assert_both_within_budget(case, inputs, by_hand(case, inputs))
    assert_parallel(by_hand(case, inputs), exact)
    with pytest.raises(AssertionError, match="its cosines with float64's"):
        assert_parallel(by_hand(case, inputs, **planted), exact)
