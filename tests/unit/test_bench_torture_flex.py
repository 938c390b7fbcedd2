"""FlexAttention in the torture suite: on a CPU it has no backward pass, and its graphs run here without a compiler."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.torture_flex import flex_implementation
from tilewise.testing.torture import CHECKS, torture

BY_NAME = {check.name: check for check in CHECKS}


@pytest.fixture
def graphs(monkeypatch):
    """Run what Dynamo captures as it is, and return the graphs."""
    captured, compile_ = [], torch.compile

    def backend(graph, inputs):
        captured.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    return captured


def forward_of(names):
    flex = flex_implementation()
    flex = replace(flex, takes=replace(flex.takes, backward=False))
    return {result.check: (result.status, result.sentence) for result in
            torture(flex, "cpu", torch.float32, checks=[BY_NAME[name] for name in names])}


def test_what_it_takes_it_computes(graphs):
    names = ("scale_given", "causal_top_left_more_keys", "causal_bottom_right_more_queries", "rows_without_a_key",
             "mask_of_each_head", "groups_of_three", "value_dim_smaller", "packed", "packed_causal_more_keys",
             "packed_zero_lengths")
    assert forward_of(names) == dict.fromkeys(names, ("pass", ""))


def test_what_it_does_not_take_is_not_applicable():
    assert forward_of(["head_dim_8", "no_keys", "same_bits_forward"]) == {
        "head_dim_8": ("n/a", "takes no head dim of 8"), "no_keys": ("n/a", "takes no empty tensors"),
        "same_bits_forward": ("n/a", "does not claim the same bits in every run")}


def test_lengths_and_scales_of_a_kind_are_no_compilation_more(graphs):
    forward_of(["ordinary_causal", "sharp_rows_20"])
    first = len(graphs)
    forward_of(["causal_top_left_more_keys", "causal_top_left_more_queries", "causal_bottom_right_more_keys",
                "causal_bottom_right_more_queries"])
    assert 1 <= len(graphs) - first <= 2  # by Dynamo's own choice whether sq <= sk is another graph


def test_a_boolean_mask_and_a_causal_one_hide_together(graphs):
    q, k, v = (torch.randn(2, 2, length, 16) for length in (33, 65, 65))
    mask = torch.rand(2, 1, 33, 65) < 0.7
    mask[..., 0] = True
    seen = mask & torch.ones(33, 65, dtype=torch.bool).tril(32)
    out = flex_implementation().attention(q, k, v, causal=True, scale=0.25, alignment="bottom_right", mask=mask)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, seen, scale=0.25))


def test_packed_sequences_are_causal_at_either_corner(graphs):
    lengths_q, lengths_k = (3, 0, 20), (17, 5, 9)
    borders = [torch.tensor((0, *lengths)).cumsum(0) for lengths in (lengths_q, lengths_k)]
    q, k, v = (torch.randn(sum(lengths), 2, 16) for lengths in (lengths_q, lengths_k, lengths_k))
    for alignment in ("top_left", "bottom_right"):
        out = flex_implementation().attention_varlen(
            q, k, v, causal=True, scale=0.25, alignment=alignment, cu_seqlens_q=borders[0].int(),
            cu_seqlens_k=borders[1].int(), max_seqlen_q=20, max_seqlen_k=17)
        for number, (sq, sk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            rows, keys = (slice(cu[number], cu[number + 1]) for cu in borders)
            seen = torch.ones(sq, sk, dtype=torch.bool).tril(0 if alignment == "top_left" else sk - sq)
            one = scaled_dot_product_attention(*(tensor.transpose(0, 1) for tensor in (q[rows], k[keys], v[keys])),
                                               seen, scale=0.25)
            torch.testing.assert_close(out[rows].transpose(0, 1), one.masked_fill(~seen.any(1)[:, None], 0.0))
