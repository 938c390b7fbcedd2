"""NaN in what is hidden, and strides that no layout has."""

import pytest
import torch

from tilewise.masks import causal, window
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs, make_operands
from tilewise.testing.placement import each_once, far_apart, plant_nan, with_meaningless_strides


def planted(case):
    inputs, operands = make_inputs(case, torch.float32, "cpu"), make_operands(case, torch.float32, "cpu")
    plant_nan(case, inputs, operands)
    return inputs, operands


@pytest.mark.parametrize("layout", ["bhsd", "moat", "expanded", "packed_kv"])
@pytest.mark.parametrize("sinks", [False, True])
def test_nan_stands_in_all_of_what_a_band_hides_and_nowhere_else(layout, sinks):
    case = Case("blind", b=2, hq=2, hk=2, sq=30, sk=20, d=8, dv=8, mask=window(0, 2, "bottom_right"), layout=layout,
                sinks=sinks)
    inputs, _ = planted(case)
    blind, unseen = torch.arange(30) < 8, torch.arange(20) < 0
    for name, rows in (("q", blind), ("dout", blind), ("k", unseen), ("v", unseen)):
        assert torch.equal(getattr(inputs, name).isnan(), rows[:, None].expand_as(getattr(inputs, name))), name
    # With sinks a blind query's lse is the sink: its gradient counts.
    assert torch.equal(inputs.dlse.isnan(), (blind & (not sinks)).expand_as(inputs.dlse))


def test_keys_that_no_query_sees_are_planted():
    inputs, _ = planted(Case("unseen", hq=2, hk=1, sq=20, sk=30, d=8, dv=8, mask=causal("top_left")))
    assert inputs.k[:, :, 20:].isnan().all()
    assert inputs.v[:, :, 20:].isnan().all()
    assert not inputs.v[:, :, :20].isnan().any()


@pytest.mark.parametrize(("bias", "layout"), [("bhqk", "bhsd"), ("11qk", "moat"), ("b11k", "expanded"),
                                              ("1hq1", "bhds"), ("bhqk", "expanded")])
def test_a_bias_is_planted_where_every_pair_it_is_added_to_is_hidden(bias, layout):
    case = Case("bias", b=2, hq=2, hk=1, sq=30, sk=20, d=8, dv=8, mask=window(3, 0, "bottom_right"), bias=bias,
                mask_tensor="bh1k", layout=layout)
    operands = planted(case)[1]
    visible = (case.mask.visible(30, 20) & operands.mask).expand(2, 2, 30, 20)
    if layout == "expanded":  # one batch's element stands for the other's
        visible = visible.any(0, keepdim=True).expand(2, -1, -1, -1)
    shared = [dim for dim, letter in enumerate(bias) if letter == "1"]
    seen = visible.sum(shared, keepdim=True) > 0 if shared else visible
    assert (~seen).any()
    assert torch.equal(operands.bias.isnan(), ~seen)


@pytest.mark.parametrize("layout", ["bhsd", "moat", "expanded", "packed_kv"])
def test_padding_is_planted_and_what_a_sequence_hides_by_its_own_lengths(layout):
    case = Case("padded", b=2, hq=2, hk=2, sq=30, sk=20, d=8, dv=8, mask=window(0, 2, "bottom_right"), layout=layout,
                lengths_q=(20, 30), lengths_k=(20, 7), sinks=True)
    inputs, _ = planted(case)
    padding_q, blind, padding_k, unseen = (torch.zeros(2, size, dtype=torch.bool) for size in (30, 30, 20, 20))
    padding_q[0, 20:] = blind[0, 20:] = padding_k[1, 7:] = unseen[1, 7:] = True
    blind[1, :21] = True  # 30 queries, 7 keys, two of them in front of the diagonal
    if layout == "expanded":  # one entry's queries stand for the other's
        blind = blind.all(0, keepdim=True).expand(2, -1)
    for name, rows in (("q", blind), ("dout", blind), ("k", unseen), ("v", unseen), ("dlse", padding_q)):
        tensor = getattr(inputs, name)
        tensor = tensor if tensor.dim() == 4 else tensor[..., None]
        assert torch.equal(tensor.isnan(), rows[:, None, :, None].expand_as(tensor)), name


@pytest.mark.parametrize("layout", ["bhsd", "moat"])
def test_gaps_between_packed_sequences_are_planted(layout):
    case = Case("gaps", b=2, hq=2, hk=1, sq=5, sk=4, d=8, dv=8, lengths_q=(3, 5), lengths_k=(4, 2), packed="gaps",
                layout=layout)
    inputs, _ = planted(case)
    for tensor, (first, second) in zip(inputs, ((3, 5), (4, 2), (4, 2), (3, 5), (3, 5)), strict=True):
        taking_part = torch.zeros(tensor.shape[2], dtype=torch.bool)
        taking_part[:first] = taking_part[first + 2:first + 2 + second] = True  # two rows are behind the first one
        assert tensor[:, :, taking_part].isfinite().all()
        assert tensor[:, :, ~taking_part].isnan().all()
        assert (~taking_part).sum() > 2


def test_a_bias_is_planted_past_the_ends_of_sequences_and_between_documents():
    case = Case("bias", b=2, hq=2, hk=1, sq=6, sk=5, d=8, dv=8, bias="bhqk", lengths_q=(6, 2), lengths_k=(3, 5),
                documents="interleaved")
    seen = (torch.arange(6)[:, None] % 3 == torch.arange(5) % 3).repeat(2, 1, 1)
    seen[0, :, 3:] = seen[1, 2:] = False
    assert torch.equal(planted(case)[1].bias.isfinite(), seen[:, None].expand(-1, 2, -1, -1))


def test_meaningless_strides_move_nothing():
    tensor = torch.randn(1, 3, 1, 5)
    moved = with_meaningless_strides(tensor)
    assert torch.equal(moved, tensor)
    assert moved.stride() == (1_000_003, 5, 1_000_003, 1)
    assert moved.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_far_apart_tensors_keep_their_values_past_two_to_the_31(dim):
    tensors = tuple(torch.randn(shape).half() for shape in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)))
    far = far_apart(tensors, dim)
    for tensor, near in zip(far, tensors, strict=True):
        assert torch.equal(tensor, near)
    assert max((tensor.shape[dim] - 1) * tensor.stride(dim) for tensor in far) >= 2**31
    assert len({tensor.untyped_storage().data_ptr() for tensor in far}) == 1


def test_nothing_to_spread_stays_where_it_is():
    tensors = (torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4))
    assert far_apart(tensors, 0) is tensors
    assert far_apart((torch.randn(2, 1, 3, 4), torch.randn(0, 1, 3, 4)), 0)[1].shape == (0, 1, 3, 4)


def test_each_once_leaves_one_index_of_an_expanded_dim():
    assert each_once(torch.randn(1, 3).expand(4, 3)).shape == (1, 3)
