"""Masks of Transformers' mask functions: they hide what the functions hide, and are bands and documents where named."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from integrations.models import transformers
from tilewise import InvalidInput, TilewiseError, UnsupportedProblem, causal
from tilewise.integrations.model_masks import ModelMask, pattern_of
from tilewise.integrations.transformers import attention_forward, attention_mask, register
from tilewise.masks import Mask, TensorMask

utils = transformers.masking_utils
PATTERNS = {
    "causal": utils.causal_mask_function,
    "window": utils.sliding_window_causal_mask_function(4),
    "full": utils.bidirectional_mask_function,
    "window_both_ways": utils.sliding_window_bidirectional_mask_function(2),
}
# Queries, keys, and where the first of each stands.
PLACES = {
    "training": (7, 7, 0, 0),
    "decoding": (1, 9, 8, 0),
    "several_new_tokens": (4, 12, 8, 0),
    "prompt_in_a_static_cache": (5, 13, 0, 0),
    "prompt_in_a_compiled_static_cache": (5, 13, torch.tensor(0), 0),
    "decoding_from_a_static_cache": (1, 13, torch.tensor(6), 0),
    "several_from_a_static_cache": (3, 13, 6, 0),
    "decoding_past_a_full_window": (1, 4, 9, 6),
    "several_past_a_full_window": (3, 6, 9, 6),
}


def padding(kind, keys):
    if kind == "none":
        return None
    positions = torch.arange(keys)
    if kind == "right":
        return positions < torch.tensor([[keys], [keys - 2]])
    return positions >= torch.tensor([[0], [0 if kind == "all_marked" else keys // 2]])


def dense(mask):
    """Return what a mask says, pair by pair."""
    entries, _, queries, keys = mask.shape
    visible = torch.zeros(entries, queries, keys, dtype=torch.bool)
    parts = mask.visible if isinstance(mask.visible, TensorMask) else TensorMask(Mask())
    others = TensorMask(Mask(), parts.tensor, parts.documents).visible(queries, keys).expand(entries, -1, -1, -1)
    for entry in range(entries):
        used = keys if mask.seqlens_k is None else int(mask.seqlens_k[entry])
        visible[entry, :, :used] = mask.band.visible(queries, used) & others[entry, 0, :, :used]
    return visible


class Waiting(TorchDispatchMode):
    """Refuses what a GPU's host would wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function)
        assert "nonzero" not in str(function)
        return function(*args, **(kwargs or {}))


def both(function, place, marks, **options):
    """Return our mask, and Transformers' own boolean one."""
    queries, keys, query_offset, key_offset = place
    given = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": query_offset,
             "kv_offset": key_offset, "mask_function": function, "attention_mask": marks}
    with Waiting():
        mask = attention_mask(**given, device="cpu", config=None, dtype=torch.float32, **options)
    return mask, utils.sdpa_mask(**given, allow_is_causal_skip=False)[:, 0]


@pytest.mark.parametrize("kind", ["none", "left", "right", "all_marked"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PATTERNS)
def test_named_masks_hide_what_the_function_hides_without_a_tensor_of_all_pairs(name, place, kind):
    queries, keys, _, key_offset = PLACES[place]
    mask, wanted = both(PATTERNS[name], PLACES[place], padding(kind, keys + key_offset))
    assert torch.equal(dense(mask), wanted)
    fits_no_band = name == "window_both_ways" and "static_cache" in place and place != "prompt_in_a_static_cache"
    tensor = mask.visible.tensor if isinstance(mask.visible, TensorMask) else None
    assert (tensor is not None and (queries == 1 or tensor.shape[2] > 1)) == (
        fits_no_band or (queries == 1 and kind != "none"))


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("place", PLACES)
def test_chunks_begin_where_the_padding_ends(place, kind):
    _, keys, _, key_offset = PLACES[place]
    marks = padding(kind, keys + key_offset)
    start = torch.zeros(2, dtype=torch.long) if marks is None else (marks.cumsum(-1) == 0).sum(-1)
    mask, wanted = both(utils.chunked_causal_mask_function(4, start), PLACES[place], marks)
    assert torch.equal(dense(mask), wanted)
    assert not isinstance(mask.visible, TensorMask) or mask.visible.tensor is None


@pytest.mark.parametrize("name", ["causal", "window"])
def test_packed_sequences_become_documents(name):
    ids, positions = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    ids, positions = ids.expand(2, -1), positions.expand(2, -1)
    pack = getattr(utils, "packed_sequence_compatibility_function",  # of Transformers 5.17, positions are not moved
                   lambda function, _, ids: utils.and_masks(function, utils.packed_sequence_mask_function(ids)))
    mask, wanted = both(pack(PATTERNS[name], positions, ids), PLACES["training"], None)
    assert torch.equal(dense(mask), wanted)
    assert mask.visible.documents is not None
    assert mask.visible.tensor is None
    assert mask.is_band


def test_a_window_of_no_keys_hides_all_without_a_tensor_of_all_pairs():
    """Qwen2-MoE without sliding layers describes one, which no layer uses."""
    mask, wanted = both(utils.sliding_window_causal_mask_function(0), PLACES["training"], padding("left", 7))
    assert torch.equal(dense(mask), wanted)
    assert mask.visible.tensor.numel() == 1
    assert not attend(ModelMask(mask.visible, None, (1, 1, 4, 4), is_band=False)).any()


def test_what_has_no_name_is_evaluated():
    blocks = torch.tensor([[-1, 0, 0, -1, 1, 1, 1]]).expand(2, -1)
    image = utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(blocks))
    mask, wanted = both(image, PLACES["training"], padding("right", 7))
    assert torch.equal(dense(mask), wanted)
    own = utils.and_masks(utils.causal_mask_function, lambda batch, head, query, key: (query + key) % 3 != 1)
    mask, wanted = both(own, PLACES["training"], None, use_vmap=True)
    assert torch.equal(dense(mask), wanted)
    assert pattern_of(own) is None


def test_evaluated_masks_of_several_tiles_list_the_visible_ones():
    own = utils.and_masks(utils.causal_mask_function, lambda batch, head, query, key: (query + key) % 3 != 1)
    mask, _ = both(own, (300, 300, 0, 0), None)
    assert mask.visible.tiles.q.shape[2] == 3
    assert both(own, (100, 100, 0, 0), None)[0].visible.tiles is None


def test_bounds_that_hide_nothing_are_left_out():
    calls = ("window", (3, 3, 0, 0), None), ("window", (5, 5, 0, 0), 3), ("causal", (1, 9, 8, 0), None)
    for name, place, left in calls:
        mask = both(PATTERNS[name], place, None)[0].visible
        assert (mask.left, mask.right) == (left, None if place[0] == 1 else 0)


def test_a_padding_mask_that_is_read_and_hides_nothing_is_dropped():
    marks = torch.ones(2, 7, dtype=torch.bool)
    for kept in (marks, marks.cumsum(-1) > 1):
        mask = attention_mask(2, 7, 7, mask_function=utils.causal_mask_function, attention_mask=kept, read_padding=True)
        assert isinstance(mask.visible, Mask) == bool(kept.all())


def test_a_mask_moves_to_another_device_whole():
    mask, _ = both(PATTERNS["window"], PLACES["several_from_a_static_cache"], padding("left", 13))
    moved = mask.to("meta", non_blocking=True)
    tensors = moved.seqlens_k, *moved.visible.documents
    assert [tensor.device.type for tensor in tensors] == 3 * ["meta"]
    assert moved.shape == mask.shape == mask.contiguous().shape
    plain = ModelMask(causal(), None, (1, 1, 4, 4))
    assert plain.to("meta").visible == causal()


def attend(mask, sq=4, sk=4, b=1, **options):
    q, k = torch.randn(b, 2, sq, 8), torch.randn(b, 2, sk, 8)
    return attention_forward(torch.nn.Identity(), q, k, k, mask, **options)[0]


def test_without_a_mask_the_layer_says_whether_it_is_causal():
    layer = torch.nn.Identity()
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    full = attention_forward(layer, q, k, k, None, is_causal=False)[0]
    layer.is_causal = False
    assert torch.equal(attention_forward(layer, q, k, k, None)[0], full)
    layer.is_causal = True
    with pytest.raises(InvalidInput, match="names no alignment, but q has 4 positions and k has 6"):
        attention_forward(layer, q, k, k, None)
    one = attention_forward(layer, q[:, :, :1], k, k, None)[0]
    torch.testing.assert_close(one, full[:, :1])
    windowed = attention_forward(layer, q[:, :, :1], k, k, None, sliding_window=2)[0]
    torch.testing.assert_close(windowed, attention_forward(layer, q[:, :, :1], k[:, :, 4:], k[:, :, 4:], None)[0])


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 3, 6, dtype=torch.bool).tril(2)])
def test_one_batch_entry_of_queries_serves_all(mask):
    """Learned queries come as one entry; Transformers' own implementations broadcast them, here they were refused."""
    layer = torch.nn.Identity()
    layer.is_causal = False
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(2, 2, 6, 8)
    out = attention_forward(layer, q, k, k, mask)[0]
    torch.testing.assert_close(out, attention_forward(layer, q.repeat(2, 1, 1, 1), k, k, mask)[0])
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("name", ["tilewise_flash", "me/tilewise", "my_sdpa", "paged|tilewise"])
def test_names_that_transformers_takes_for_its_own_are_refused(name):
    with pytest.raises(InvalidInput, match="by which Transformers takes it for an implementation of its own"):
        register(name)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TilewiseError, match=r"allowed are 5.17 and newer: install 'tilewise\[transformers\]'"):
        register()


def test_what_would_change_the_result_unseen_raises():
    with pytest.raises(UnsupportedProblem, match="output_attentions is True; allowed is False"):
        attend(None, output_attentions=True)
    with pytest.raises(UnsupportedProblem, match="indices is given, a Tensor; allowed is None"):
        attend(None, indices=torch.zeros(1))
    assert attend(None, output_attentions=False, indices=None, use_cache=True).shape == (1, 4, 2, 8)


def test_masks_that_were_made_for_another_call_raise():
    with pytest.raises(InvalidInput, match="attention_mask is of 4 queries and 9 keys, and query and key have 4 and 4"):
        attend(ModelMask(causal(), None, (1, 1, 4, 9)))
    with pytest.raises(InvalidInput, match=r"attention_mask has shape \(1, 4\); allowed are four dims"):
        attend(torch.ones(1, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_integers_is_refused_by_its_dtype(dtype):
    """torch refused to tell the least number of an integer type as it does of floating-point ones."""
    with pytest.raises(InvalidInput, match=f"attention_mask has dtype {dtype}; allowed are torch.bool, True = take "):
        attend(torch.ones(1, 1, 4, 4, dtype=dtype))


def test_packed_lengths_beside_padding_raise():
    lengths = {"cu_seq_lens_q": torch.tensor([0, 1, 4]), "cu_seq_lens_k": torch.tensor([0, 1, 4])}
    mask = attention_mask(1, 4, 4, attention_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(UnsupportedProblem, match="are given with 1 batch entries and padding or another mask"):
        attend(mask, **lengths)
    with pytest.raises(UnsupportedProblem, match="are given with 2 batch entries and a band"):
        attend(None, b=2, **lengths)
    assert attend(None, **lengths).shape == (1, 4, 2, 8)
    for name, one in lengths.items():
        with pytest.raises(InvalidInput, match="of cu_seq_lens_q and cu_seq_lens_k one is given; allowed are both or"):
            attend(None, **{name: one})
