"""FlexAttention's BlockMasks, traced: results of both backends, the meaning of block lists, and what is not traced."""

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, noop_mask, or_masks

import tilewise as tw
from integrations.dense import dense
from tilewise import InvalidInput, UnsupportedProblem, attention
from tilewise.integrations import flex_masks
from tilewise.integrations.flex import flex_attention, traced_mask
from tilewise.masks import TensorMask
from tilewise.masks.tile_lists import listed

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
GENERATOR = torch.Generator().manual_seed(0)
SQ, SK = 150, 290
DOCUMENTS = torch.tensor([0] * 70 + [1] * 100 + [2] * 120)
EACH = torch.stack([DOCUMENTS, DOCUMENTS.roll(31)])
PREFIXES, OFFSET = torch.tensor([40, 200]), torch.tensor(20)
ANCESTORS = torch.rand(300, 300, generator=GENERATOR) < 0.3
CHOSEN = torch.rand(2, 2, SK, generator=GENERATOR) < 0.5
WIDTH = 17


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return q - k <= 40


def documents(b, h, q, k):
    return EACH[b, q] == EACH[b, k]


def neighbourhood(b, h, q, k):
    return ((q // WIDTH - k // WIDTH).abs() <= 3) & ((q % WIDTH - k % WIDTH).abs() <= 2)


def of_heads(b, h, q, k):
    return (q - k).abs() <= 20 * (h + 1) + 30 * b


MODS = {
    "causal": causal,
    "window": and_masks(causal, window),
    "prefixes": lambda b, h, q, k: (q >= k) | (k < PREFIXES[b]),
    "documents": documents,
    "causal_documents": and_masks(causal, lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
    "neighbourhood": neighbourhood,
    "tree": lambda b, h, q, k: ANCESTORS[q, k] | (q == k),
    "row_by_row": lambda b, h, q, k: ANCESTORS[q][k],
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
    "offset": lambda b, h, q, k: q + OFFSET >= k,
    "other_documents": lambda b, h, q, k: ~(DOCUMENTS[q] == DOCUMENTS[k]),
    "either": or_masks(window, documents, lambda b, h, q, k: k < 4),
    "exclusive": lambda b, h, q, k: (q < 60) ^ (DOCUMENTS[k] == 1),
    "where": lambda b, h, q, k: torch.where(q < 50, k < 100, CHOSEN[b, h, k]),
    "of_heads": of_heads,
    "all": noop_mask,
    "true": lambda b, h, q, k: True,
    "like": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool, device=b.device) & ~k.new_zeros(
        (), dtype=torch.bool) & (q >= k),
    "default": lambda b, h, q, k, ids=DOCUMENTS: ids[q] != ids[k],
}
OF_BATCH, OF_HEAD = ("prefixes", "documents", "either", "where", "of_heads"), ("where", "of_heads")


def inputs(sq=SQ, sk=SK, hk=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, length, 16, generator=generator) for heads, length in ((2, sq), (hk, sk), (hk, sk))]


def made(name, sq=SQ, sk=SK, block=128):
    mod = MODS[name]
    lists_of = noop_mask if name == "true" else mod  # create_block_mask takes tensors alone
    mask = create_block_mask(lists_of, 2 if name in OF_BATCH else None, 2 if name in OF_HEAD else None, sq, sk,
                             device="cpu", BLOCK_SIZE=block)
    mask.mask_mod = mod
    return mask


def visible_to(mod, sq=SQ, sk=SK):
    """The definition, by torch."""
    indices = torch.meshgrid(*(torch.arange(size) for size in (2, 2, sq, sk)), indexing="ij")
    return torch.as_tensor(mod(*indices)).expand(2, 2, sq, sk)


def close(found, expected):
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("name", MODS)
def test_a_block_mask_has_torchs_results(name, block):
    given, mask = inputs(), made(name, block=block)
    expected = dense(*given)[0] if name == "true" else torch_flex.flex_attention(*given, block_mask=mask)
    close(flex_attention(*given, block_mask=mask), expected)


@pytest.mark.parametrize("name", MODS)
def test_the_triton_function_is_its_twin(name):
    given, mask = inputs(), traced_mask(made(name))
    out, expected = (attention(*given, mask=mask, backend=backend) for backend in ("triton", "reference"))
    close(out, expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", ["causal", "where", "of_heads"])
def test_gradients_are_those_of_the_dense_formula(name, backend):
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    out = attention(*leaves, mask=traced_mask(made(name)), backend=backend)
    expected = dense(*leaves, visible_to(MODS[name]))[0]
    for gradient, wanted in zip(*(torch.autograd.grad(own.square().sum(), leaves) for own in (out, expected)),
                                strict=True):
        close(gradient, wanted)


def test_lengths_may_be_longer_than_the_keys():
    given, mask = inputs(SK, SQ), made("window", SK, SQ)
    close(flex_attention(*given, block_mask=mask), torch_flex.flex_attention(*given, block_mask=mask))


def test_a_score_mod_beside_it_and_shared_keys():
    def biased(score, b, h, q, k):
        return 2 * torch.tanh(score / 2) + 0.1 * EACH[b, k]

    given, mask = inputs(hk=1), made("documents")
    close(flex_attention(*given, biased, mask, enable_gqa=True),
          torch_flex.flex_attention(*given, biased, mask, enable_gqa=True))


STATES = torch.tensor([[0, 1, 2, 0], [2, 0, 1, 1], [1, 2, 0, 2], [0, 0, 0, 1]])


def of_states(states, sides, lengths, mod):
    """Make a BlockMask by its lists; states of blocks are 0 hidden, 1 partial, 2 full."""
    counts_and_indices = []
    for wanted in (1, 2):
        is_one = states == wanted
        counts_and_indices += [is_one.sum(-1).int()[None, None],
                               is_one.int().sort(stable=True, dim=-1, descending=True).indices.int()[None, None]]
    return BlockMask.from_kv_blocks(*counts_and_indices, BLOCK_SIZE=sides, mask_mod=mod, seq_lengths=lengths)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("sides", [(128, 128), (64, 128), (96, 80), (256, 32)], ids=str)
def test_full_blocks_are_visible_and_unlisted_ones_hidden_whatever_mask_mod_says(sides, backend):
    lengths = sides[0] * 3 + 10, sides[1] * 4 - 3
    mask = of_states(STATES, sides, lengths, MODS["dilated"])
    state = STATES.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)[:lengths[0], :lengths[1]]
    visible = (state == 2) | ((state == 1) & visible_to(MODS["dilated"], *lengths))
    given = inputs(*lengths)
    out = attention(*given, mask=traced_mask(mask), backend=backend)
    close(out, dense(*given, visible)[0])


@pytest.mark.parametrize(("sides", "lengths"), [
    ((128, 128), (512, 400)), ((64, 128), (200, 512)), ((96, 80), (380, 300)), ((256, 32), (1000, 128)),
    ((1 << 30, 1 << 30), (300, 200))], ids=str)
def test_tiles_are_listed_as_blocks_are(sides, lengths):
    """Of full blocks they are those of the dense mask; a tile that touches a partial block is visible in part."""
    states = STATES[:-(-lengths[0] // sides[0]), :-(-lengths[1] // sides[1])].clone()
    for only_full in (True, False):
        if only_full:
            states[states == 1] = 0
        else:
            states[0, 0] = 1
        rows, columns = (torch.arange(length) // side for length, side in zip(lengths, sides, strict=True))
        pairs = states[rows][:, columns]
        tiles = traced_mask(of_states(states, sides, lengths, noop_mask)).tiles
        if only_full:
            for own, wanted in zip(tiles, TensorMask(tw.Mask(), pairs == 2).tiled(*lengths).tiles, strict=True):
                assert torch.equal(own, wanted)
            continue
        kinds = torch.zeros(-(-lengths[0] // 128), -(-lengths[1] // 128), dtype=torch.int64)
        for i, row in enumerate(kinds):
            for j in range(len(row)):
                part = pairs[i * 128:(i + 1) * 128, j * 128:(j + 1) * 128]
                row[j] = 2 if part.shape == (128, 128) and (part == 2).all() else int(part.any())
        for own, wanted in zip(tiles, listed(kinds[None, None]), strict=True):
            assert torch.equal(own, wanted)


def test_everything_is_made_on_the_device_of_the_lists():
    """Where nothing can be read, nothing waits for it either."""
    ids = DOCUMENTS.to("meta")
    mask = made("documents", SK, SK).to("meta")
    mask.mask_mod = lambda b, h, q, k: (ids[q] == ids[k]) & ~b.new_zeros((), dtype=torch.bool)
    for copied in (False, True):
        traced = traced_mask(mask, copied=copied)
        assert {tensor.device.type for tensor in (*traced.tiles, *traced.function.tensors)} == {"meta"}
    mask.mask_mod = lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]
    with pytest.raises(UnsupportedProblem, match=r"a tensor of shape \(290,\) on cpu\."):
        traced_mask(mask)


def test_no_tensor_of_all_pairs_is_made():
    traced = traced_mask(made("dilated", 4000, 4000))
    assert traced.tensor is None
    assert sum(tensor.numel() for tensor in (*traced.tiles, *traced.function.tensors)) < 4000


def test_another_length_has_the_same_kernels():
    """Sizes are data: those of blocks, and those of what mask_mod reads."""
    def mask_of(length):
        ids = torch.arange(length) // 100
        return traced_mask(create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, length, length,
                                             device="cpu"))

    one, other = mask_of(300), mask_of(500)
    assert one.function.code is other.function.code
    given = inputs(500, 500)
    ids = torch.arange(500) // 100
    close(attention(*given, mask=other), dense(*given, ids[:, None] == ids)[0])


def test_tensors_are_read_in_each_call_and_another_mask_mod_is_another_mask():
    ids, given = DOCUMENTS.clone(), inputs(SK, SK)
    mask = create_block_mask(noop_mask, None, None, SK, SK, device="cpu", separate_full_blocks=False)
    for mask.mask_mod in (lambda b, h, q, k: ids[q] == ids[k], lambda b, h, q, k: ids[q] != ids[k]):
        for ids[:] in (DOCUMENTS, DOCUMENTS.roll(50)):
            close(flex_attention(*given, block_mask=mask), dense(*given, visible_to(mask.mask_mod, SK, SK))[0])


def test_plans_are_kept_of_what_no_caller_writes():
    ids, given = DOCUMENTS.clone(), inputs(SK, SK)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, SK, SK, device="cpu")
    copied = traced_mask(mask, copied=True)
    before = attention(*given, mask=copied)
    of_call = {name: tw.explain(*given, mask=own).problem.scores.mask_function for name, own in {
        "reads": traced_mask(mask), "copied": copied, "positions": traced_mask(made("causal", SK, SK)),
        "given": copied.function.with_tensors(*copied.function.tensors)}.items()}
    assert {name: own.may_change for name, own in of_call.items()} == {
        "reads": True, "copied": False, "positions": False, "given": True}
    ids.zero_()
    assert torch.equal(attention(*given, mask=copied), before)


def test_tensors_that_are_copied_may_lie_in_any_order():
    given, mask = inputs(), made("tree")
    turned = ANCESTORS.mT
    mask.mask_mod = lambda b, h, q, k: turned[k, q] | (q == k)
    close(attention(*given, mask=traced_mask(mask, copied=True)), torch_flex.flex_attention(*given, block_mask=mask))


def test_its_function_joins_other_masks():
    given, traced = inputs(SK, SK), traced_mask(made("documents", SK, SK))
    close(attention(*given, mask=tw.causal() & traced.function),
          dense(*given, visible_to(and_masks(causal, documents), SK, SK))[0])


def test_a_mask_that_was_made_in_inference_serves_training():
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    for mod in (causal, REFUSED["erf(Symbol)"]):
        mask = made("causal")
        mask.mask_mod = mod
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            masks = [traced_mask(mask)] if mod is causal else []
            flex_attention(*(leaf.detach().clone() for leaf in leaves), block_mask=mask)
        for own in (mask, *masks):
            assert torch.autograd.grad(flex_attention(*leaves, block_mask=own).sum(), leaves[2])[0].any()


def test_a_tensor_with_a_gradient_is_read():
    bounds, given = torch.tensor([3.5, 90.0], requires_grad=True), inputs()
    mask = create_block_mask(lambda b, h, q, k: k > bounds[h], None, 2, SQ, SK, device="cpu")
    close(flex_attention(*given, block_mask=mask), dense(*given, visible_to(mask.mask_mod))[0].detach())


@pytest.mark.parametrize("name", ["causal", "documents", "of_heads"])
def test_only_batch_entries_and_heads_that_differ_have_a_plan(name):
    problem = tw.explain(*inputs(), mask=traced_mask(made(name))).problem
    assert problem.distinct_masks == (2 if name in OF_BATCH else 1, 2 if name in OF_HEAD else 1)


def test_the_hopper_kernels_take_it_by_plan():
    from tilewise.backends.gluon import _wrong_mask

    problem = tw.explain(*inputs(), mask=traced_mask(made("documents"))).problem
    assert _wrong_mask(problem) is None
    assert _wrong_mask(problem.backward(lse_grad=False)) is None


TURNED = DOCUMENTS.repeat(2, 1).mT
REFUSED = {
    "a decision by a value (if, and, or, not, int, float, range); use torch.where, &, | and ~":
        lambda b, h, q, k: q > k if isinstance(q, torch.Tensor) else bool(q),
    "erf(Symbol)": lambda b, h, q, k: torch.erf(q - k) > 0,
    "new_zeros of a size": lambda b, h, q, k: (q > k) & (q.new_zeros((1,), dtype=torch.int64)[0] == 0),
    "TypeError: unsupported operand type(s) for <<: 'Symbol' and 'int'": lambda b, h, q, k: (q << 1) >= k,
    "a tensor of shape (290, 2) on cpu that is not contiguous": lambda b, h, q, k: TURNED[q, 0] == TURNED[k, 1],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_traced_is_evaluated_and_named_in_a_warning(reason):
    mod, given = REFUSED[reason], inputs()
    mod.__name__ = "odd"
    mask = create_block_mask(mod, None, None, SQ, SK, device="cpu")
    with pytest.warns(RuntimeWarning) as caught:
        out = flex_attention(*given, block_mask=mask)
    close(out, torch_flex.flex_attention(*given, block_mask=mask))
    assert [str(own.message) for own in caught if own.category is RuntimeWarning] == [
        f"mask_mod odd has what no Triton is made of: {reason}. What it lets take part is read from a boolean tensor "
        "of 150 x 290, made of it once."]
    assert caught[0].filename == __file__
    assert torch.equal(flex_attention(*given, block_mask=mask), out), "and not once more"
    with pytest.raises(UnsupportedProblem) as refused:
        traced_mask(mask)
    assert str(refused.value) == (
        f"mask_mod odd has what no Triton is made of: {reason}. Allowed are arithmetic, comparisons, torch.where, "
        "functions of one number, and tensors read at positions; a tilewise.functions.MaskFunction has any formula.")


def test_full_and_unlisted_blocks_count_where_mask_mod_is_evaluated():
    sides, lengths = (64, 128), (250, 500)
    mask = of_states(STATES, sides, lengths, lambda b, h, q, k: ((q - k) << 1) % 3 == 0)
    state = STATES.repeat_interleave(64, 0).repeat_interleave(128, 1)[:250, :500]
    visible = (state == 2) | ((state == 1) & visible_to(mask.mask_mod, *lengths))
    given = inputs(*lengths)
    with pytest.warns(RuntimeWarning, match="<<"):
        close(flex_attention(*given, block_mask=mask), dense(*given, visible)[0])


@pytest.mark.filterwarnings("ignore:mask_mod <lambda> has what no Triton is made of:RuntimeWarning")
def test_what_mask_mod_raises_is_raised():
    given, mask = inputs(), made("causal")
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex_attention(*given, block_mask=mask[:1])
    mask.mask_mod = lambda b, h, q, k: q - k
    with pytest.raises(UnsupportedProblem, match=r"no Triton is made of: a result torch\.int32\."):
        traced_mask(mask)


def test_masks_of_other_sizes_raise():
    given = inputs()
    for sizes, said in (((3, None), "3 batch entries and 1"), ((None, 4), "1 batch entries and 4")):
        mask = create_block_mask(causal, *sizes, SQ, SK, device="cpu")
        with pytest.raises(InvalidInput, match=f"block_mask is of {said} heads, and query has 2 and 2; allowed are as "
                                               "many, or 1"):
            flex_attention(*given, block_mask=mask)
    mask = made("causal")[:, :, :1]
    mask.mask_mod = causal
    with pytest.raises(InvalidInput, match="block_mask has 1 rows of blocks of 128 queries, and its seq_lengths say "
                                           r"150 queries\. A part of a BlockMask keeps the lengths of the whole: set"):
        flex_attention(*given, block_mask=mask)
    mask.seq_lengths = (100, SK)
    close(flex_attention(given[0][:, :, :100], *given[1:], block_mask=mask),
          dense(given[0][:, :, :100], *given[1:], visible_to(causal)[..., :100, :])[0])
    with pytest.raises(InvalidInput, match="block_mask is a Tensor; allowed is a BlockMask, a mask of"):
        traced_mask(DOCUMENTS)


def test_a_mask_whose_lengths_are_set_anew_has_lists_of_these():
    """A part of the last block: its lists would reach past the keys."""
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu")
    given = inputs(256, 256)
    flex_attention(*given, block_mask=mask)
    mask.seq_lengths = (200, 200)
    shorter = [tensor[:, :, :200] for tensor in given]
    close(flex_attention(*shorter, block_mask=mask), dense(*shorter, visible_to(causal, 200, 200))[0])
    assert flex_masks._TRANSLATED[mask][2] is not flex_masks._translated(mask)
    assert flex_masks._TRANSLATED[mask][1] == (200, 200)


def test_ids_of_inference_mode_serve_training():
    with torch.inference_mode():
        ids = DOCUMENTS.clone()
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, SQ, SK, device="cpu")
    with pytest.warns(RuntimeWarning, match="made in inference mode"):
        out = flex_attention(*leaves, block_mask=mask)
    close(out.detach(), dense(*(leaf.detach() for leaf in leaves), visible_to(mask.mask_mod))[0])
    assert torch.autograd.grad(out.sum(), leaves[2])[0].any()


def test_numbers_that_wrap_are_divided_as_torch_divides_them():
    """A hash of positions, which have 32 bits, passes 2^31, and its remainder is that of a negative number."""
    def hashed(b, h, q, k):
        return (q * 73856093 + k * 19349663) % 100 < 30

    given, (rows, columns) = inputs(), (torch.arange(length, dtype=torch.int32) for length in (SQ, SK))
    states = torch.ones(2, 3, dtype=torch.int32)  # all blocks are asked
    mask = of_states(states, (128, 128), (SQ, SK), hashed)
    for backend in ("reference", "triton"):
        close(attention(*given, mask=traced_mask(mask), backend=backend),
              dense(*given, hashed(0, 0, rows[:, None], columns))[0])


def test_a_mask_mod_without_weak_references_serves_a_call():
    class Slotted:
        __slots__ = ()

        def __call__(self, b, h, q, k):
            return q >= k

    given, mask = inputs(), made("causal")
    mask.mask_mod = Slotted()
    close(flex_attention(*given, block_mask=mask), dense(*given, visible_to(causal))[0])


def test_a_mask_that_is_gone_leaves_nothing():
    """Though its mask_mod knows it."""
    ids, mask = DOCUMENTS.clone(), made("causal")
    mask.mask_mod = partial(lambda own, ids, b, h, q, k: (q >= k) & (ids[k] != own.seq_lengths[0]), mask, ids)
    flex_attention(*inputs(), block_mask=mask)
    assert mask in flex_masks._TRANSLATED
    gone = weakref.ref(mask), weakref.ref(ids)
    del mask, ids
    gc.collect()
    assert [own() for own in gone] == [None, None]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["traced", "seen_before", "in_the_graph"])
def test_compiled_calls(kind):
    torch._dynamo.reset()
    given, mask = inputs(), made("window")
    own = traced_mask(mask) if kind == "traced" else mask
    if kind == "seen_before":
        flex_attention(*given, block_mask=mask)
    compiled = torch.compile(lambda *qkv: flex_attention(*qkv, block_mask=own), fullgraph=True, backend="aot_eager")
    close(compiled(*given), dense(*given, visible_to(MODS["window"]))[0])
    torch._dynamo.reset()
