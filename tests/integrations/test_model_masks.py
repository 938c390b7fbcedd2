"""Masks of Transformers' mask functions: they hide what the functions hide, and are bands and documents where named."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from integrations.models import transformers
from tilewise import InvalidInput, TilewiseError, UnsupportedProblem, causal
from tilewise.integrations.model_masks import ModelMask, pattern_of
from tilewise.integrations.transformers import _WITHOUT_EFFECT_BECAUSE, attention_forward, attention_mask, register
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
    for name, why in {"head_mask": "the probabilities are never in memory to be multiplied",
                      "block_table": "caches in pages, of continuous batching, are not read here",
                      "wings": "tilewise does not know what it would change"}.items():
        with pytest.raises(UnsupportedProblem, match=f"{name} is given, a Tensor; allowed is None: {why}"):
            attend(None, **{name: torch.zeros(1)})
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


def softmax_of(q, k, v, hidden, sinks=None):
    """Return what eager attention computes, (b, sq, hq, d): its scores with what is added, and a column of sinks."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
    scores = scores if sinks is None else torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :k.shape[2]] @ v).transpose(1, 2)


def inputs(sq=5, sk=7, b=2, hq=4, hk=2):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(b, h, s, 8, generator=generator).requires_grad_() for h, s in ((hq, sq), (hk, sk), (hk, sk))]


def same_with_gradients(found, wanted, leaves):
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, weights) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def full_layer():
    layer = torch.nn.Identity()
    layer.is_causal = False
    return layer


@pytest.mark.parametrize("last", [(), (1,)])
def test_sinks_of_each_query_take_their_share(last):
    q, k, v = inputs()
    sinks = torch.randn(2, 4, 5, 1, requires_grad=True)
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    found = attention_forward(full_layer(), q, k, v, None, sinks=sinks.view(2, 4, 5, *last))[0]
    same_with_gradients(found, softmax_of(q, k, v, hidden, sinks), (q, k, v, sinks))


def test_sinks_of_each_query_leave_a_query_without_keys_at_zero():
    q, k, v = inputs()
    sinks = torch.randn(2, 4, 5, requires_grad=True)
    seen = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    seen[..., 2, :] = False
    found = attention_forward(full_layer(), q, k, v, seen, sinks=sinks)[0]
    assert not found[:, 2].any()
    gradients = torch.autograd.grad(found.sum(), (q, k, v, sinks))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, 2].any()
    assert not gradients[3][:, :, 2].any()


def test_sinks_of_another_shape_raise():
    with pytest.raises(InvalidInput, match=r"sinks has shape \(2,\); allowed are \(b, hq, sq\) and \(b, hq, s"):
        attend(None, sinks=torch.zeros(2))


# Queries and keys; keys chosen for each query; -1 chooses none.
CHOSEN = {"training": (7, 7, 3), "decoding": (1, 7, 3), "several_new_tokens": (3, 7, 2), "every_key": (7, 7, 7),
          "one_key": (5, 5, 1), "several_tiles": (130, 300, 40)}


def choice(sq, sk, n, *leading):
    generator = torch.Generator().manual_seed(6)
    return torch.rand(*leading, sq, sk, generator=generator).argsort(-1)[..., :n].to(torch.int32)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", CHOSEN)
def test_chosen_keys_are_seen_where_the_mask_shows_them(place, padded):
    sq, sk, n = CHOSEN[place]
    q, k, v = inputs(sq, sk)
    numbers = choice(sq, sk, n, 2)
    numbers[0, 0, :1] = -1
    marks = torch.arange(sk) >= torch.tensor([[0], [2]]) if padded else None
    mask, shown = both(utils.causal_mask_function, (sq, sk, sk - sq, 0), marks)
    seen = torch.stack([torch.stack([torch.isin(torch.arange(sk), row) for row in entry]) for entry in numbers])
    hidden = ~(seen & shown)[:, None]
    found = attention_forward(torch.nn.Identity(), q, k, v, mask, indices=numbers)[0]
    kept = ~hidden.all(-1, keepdim=True).transpose(1, 2)
    wanted = softmax_of(q, k, v, hidden.masked_fill(hidden.all(-1, keepdim=True), False))
    same_with_gradients(found * kept, wanted * kept, (q, k, v))
    assert not found.masked_select(~kept).any()


def test_chosen_keys_beside_an_evaluated_mask_drop_its_tiles():
    own = utils.and_masks(utils.causal_mask_function, lambda batch, head, query, key: (query + key) % 3 != 1)
    mask, shown = both(own, (300, 300, 0, 0), None)
    assert mask.visible.tiles is not None
    q, k, v = inputs(300, 300)
    numbers = choice(300, 300, 100, 2)
    seen = torch.zeros(2, 300, 300, dtype=torch.bool).scatter(-1, numbers.long(), True)
    hidden = ~(seen & shown)[:, None]
    kept = ~hidden.all(-1, keepdim=True).transpose(1, 2)
    found = attention_forward(torch.nn.Identity(), q, k, v, mask, indices=numbers)[0]
    wanted = softmax_of(q, k, v, hidden.masked_fill(hidden.all(-1, keepdim=True), False))
    torch.testing.assert_close(found * kept, wanted * kept)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_chosen_blocks_are_seen_by_their_group_of_heads(groups):
    q, k, v = inputs(7, 7)
    layer = torch.nn.Identity()
    layer.indexer = torch.nn.Identity()
    layer.indexer.block_size = 3  # the last block has one key
    blocks = choice(7, 3, 2, 2, groups)
    blocks[..., 0, 1] = -1
    blocks[..., 0, 0] = 0
    seen = torch.stack([(blocks == block).any(-1) for block in (0, 0, 0, 1, 1, 1, 2)], -1)
    hidden = ~(seen & torch.ones(7, 7, dtype=torch.bool).tril()).repeat_interleave(4 // groups, 1)
    kept = ~hidden.all(-1, keepdim=True).transpose(1, 2)
    found = attention_forward(layer, q, k, v, None, block_indices=blocks)[0]
    wanted = softmax_of(q, k, v, hidden.masked_fill(hidden.all(-1, keepdim=True), False))
    same_with_gradients(found * kept, wanted * kept, (q, k, v))


def test_choices_that_do_not_fit_raise():
    numbers = torch.zeros(1, 4, 2, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="indices and block_indices are both given; allowed is one of them"):
        attend(None, indices=numbers, block_indices=numbers)
    for wrong in (numbers[:, :3], numbers[0], numbers.float(), numbers.bool()):
        with pytest.raises(InvalidInput, match=r"indices has shape .*; allowed is \(b, sq, n\), of torch.int32 or"):
            attend(None, indices=wrong)
    with pytest.raises(UnsupportedProblem, match=r"block_indices is given, and the layer has no indexer.block_size"):
        attend(None, block_indices=numbers[None])
    with pytest.raises(InvalidInput, match=r"block_indices has shape .*; allowed is \(b, groups, sq, n\) with groups"):
        attend(None, block_indices=numbers)
    lengths = {"cu_seq_lens_q": torch.tensor([0, 1, 4]), "cu_seq_lens_k": torch.tensor([0, 1, 4])}
    for more in ({"indices": numbers}, {"sinks": torch.zeros(1, 2, 4)}):
        with pytest.raises(UnsupportedProblem, match="are given with sinks of each query or with chosen keys; allowed"):
            attend(None, **lengths, **more)


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_mask_of_one_query_serves_all(name, kind):
    """BridgeTower and LightGlue make theirs for the first query; it was refused for its lengths."""
    mask, shown = both(PATTERNS[name], (1, 7, 6, 0), padding(kind, 7))
    q, k, v = inputs()
    found = attention_forward(torch.nn.Identity(), q, k, v, mask)[0]
    same_with_gradients(found, softmax_of(q, k, v, ~shown[:, None]), (q, k, v))


def test_a_mask_of_one_pair_serves_all_keys_without_a_look_at_it():
    """An encoder that generates from a cache has such a mask; eager attention drops it, or adds it to all scores."""
    q, k, v = inputs(sq=1)
    plain, _ = both(PATTERNS["full"], (1, 1, 0, 0), None)
    marked, _ = both(PATTERNS["full"], (1, 1, 0, 0), torch.tensor([[True], [False]]))
    nothing = torch.zeros(1, 7, dtype=torch.bool)
    for mask in (plain, marked):
        found = attention_forward(torch.nn.Identity(), q, k, v, mask)[0]
        wanted = softmax_of(q, k, v, nothing)
        torch.testing.assert_close(found[:1], wanted[:1])
        assert torch.equal(found[1], torch.zeros_like(found[1])) == (mask is marked)
    assert plain.made == {}


def test_of_padding_of_more_rows_than_the_batch_the_first_count():
    """MusicGen's decoder has a row for each codebook of each entry; eager attention reads the first of them."""
    marks = torch.rand(8, 7, generator=torch.Generator().manual_seed(8)) > 0.4
    mask, wanted = both(PATTERNS["causal"], PLACES["training"], marks)
    assert torch.equal(dense(mask), wanted)


def test_models_that_ask_for_a_tensor_or_for_none_get_it():
    given = {"batch_size": 2, "q_length": 7, "kv_length": 7, "mask_function": PATTERNS["causal"]}
    tensor = attention_mask(**given, dtype=torch.bfloat16, config=transformers.DeepseekV4Config())
    assert torch.equal(tensor, utils.eager_mask(**given, dtype=torch.bfloat16))
    informer = {"config": transformers.InformerConfig(), "allow_is_bidirectional_skip": True}
    full = given | {"mask_function": PATTERNS["full"]}
    assert attention_mask(**full, **informer) is None
    assert isinstance(attention_mask(**given, **informer), ModelMask)
    assert isinstance(attention_mask(**full, **informer, attention_mask=torch.ones(2, 7).bool()), ModelMask)
    assert isinstance(attention_mask(**full, config=transformers.InformerConfig()), ModelMask)
    assert isinstance(attention_mask(**full, allow_is_bidirectional_skip=True), ModelMask)


@pytest.mark.parametrize("hidden", ["padded_on_the_left", "all", "none"])
def test_a_query_without_keys_gets_the_average_where_it_is_asked_for(hidden):
    """Transformers' own implementations give it; the gradient of the values is that of the average."""
    q, k, v = inputs(5, 5)
    start = {"padded_on_the_left": 2, "all": 5, "none": 0}[hidden]
    marks = torch.arange(5) >= torch.tensor([[0], [start]])
    mask, shown = both(PATTERNS["causal"], (5, 5, 0, 0), marks)
    found = attention_forward(torch.nn.Identity(), q, k, v, mask, rows_without_keys="average")[0]
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    added = scores + torch.zeros(shown[:, None].shape).masked_fill(~shown[:, None], torch.finfo(torch.float32).min)
    wanted = (added.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    if hidden != "none":  # eager's average has gradients of its scores, which are noise of the least number
        assert found[1, 0].any()
        torch.testing.assert_close(found, wanted)
        kept = found[1, :start].sum()
        torch.testing.assert_close(*(torch.autograd.grad(rows, v, retain_graph=True)[0]
                                     for rows in (kept, wanted[1, :start].sum())))
    else:
        same_with_gradients(found, wanted, (q, k, v))


def test_rows_without_keys_of_another_name_raise():
    with pytest.raises(InvalidInput, match="rows_without_keys is 'mean'; allowed are 'zero' and 'average'"):
        register(rows_without_keys="mean")


def test_the_docs_list_what_is_taken_without_an_effect_and_why():
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    for why, names in _WITHOUT_EFFECT_BECAUSE.items():
        assert f"| {', '.join(f'`{name}`' for name in names)} | {why} |" in page.replace("`generate()`", "generate()")


def test_what_generate_and_vision_models_hand_down_changes_nothing():
    wanted = attend(ModelMask(causal(), None, (1, 1, 4, 4))).shape
    for name in ("num_beams", "max_new_tokens", "min_new_tokens", "cache_implementation", "vision_feature_layer"):
        assert attend(ModelMask(causal(), None, (1, 1, 4, 4)), **{name: 1}).shape == wanted


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
