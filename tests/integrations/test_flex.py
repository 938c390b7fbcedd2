"""FlexAttention's call: compared with torch's own, which computes the whole score matrix when it is not compiled."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from integrations.calls import signature
from integrations.dense import close, dense
from tilewise import InvalidInput, UnsupportedProblem, causal, window
from tilewise.functions import ScoreFunction
from tilewise.integrations import flex_masks
from tilewise.integrations.flex import alibi, flex_attention, softcap

# torch says that it has not compiled its flex_attention, at every call.
pytestmark = [pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
              pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")]

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
DOCUMENTS = torch.tensor([0] * 70 + [1] * 100 + [2] * 130)


def causal_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def document_mod(b, h, q_idx, kv_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx >= kv_idx)


def by_head_mod(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 20 * (h + 1) + 30 * b


def nothing_for_the_first_mod(b, h, q_idx, kv_idx):
    return (q_idx > 5) & (kv_idx % 3 != 1)


MASKS = {
    "none": None,
    "causal": (causal_mod, None, None),
    "documents": (document_mod, None, None),
    "by_head_and_batch": (by_head_mod, 2, 4),
    "hides_some_queries": (nothing_for_the_first_mod, None, None),
}


def inputs(sq=300, sk=300, hk=4):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, sq, 16), (2, hk, sk, 16), (2, hk, sk, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def made(name, sq=300, sk=300, block=128):
    if MASKS[name] is None:
        return None
    mod, b, h = MASKS[name]
    return create_block_mask(mod, b, h, sq, sk, device="cpu", BLOCK_SIZE=block)


def same(given, mask, **options):
    close(flex_attention(*given, block_mask=mask, **options),
          torch_flex.flex_attention(*given, block_mask=mask, **options), 1e-9)


def test_arguments_are_torchs():
    assert signature(flex_attention) == signature(torch_flex.flex_attention) == (
        "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
        "kernel_options=None, return_aux=None")


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_torchs(name, block):
    same(inputs(), made(name, block=block))


@pytest.mark.parametrize(("sq", "sk"), [(150, 290), (290, 150)])
def test_lengths_may_differ(sq, sk):
    same(inputs(sq, sk), made("causal", sq, sk))


def test_fewer_heads_of_keys_and_a_scale():
    same(inputs(hk=2), made("causal"), enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("score_mod", [softcap(2.0), alibi(SLOPES)], ids=["softcap", "alibi"])
@pytest.mark.parametrize("name", ["none", "documents"])
def test_known_score_mods(name, score_mod):
    same(inputs(), made(name), score_mod=score_mod)


def test_distances_of_alibi_count_from_the_first_key_where_lengths_differ():
    same(inputs(150, 290), None, score_mod=alibi(SLOPES))


@pytest.mark.parametrize("score_mod", [None, softcap(2.0), alibi(SLOPES)], ids=["plain", "softcap", "alibi"])
def test_gradients_are_those_of_the_dense_formula(score_mod):
    """torch's own gives no gradients on CPUs."""
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    mask = made("documents")
    found = torch.autograd.grad(flex_attention(*leaves, score_mod, mask).square().sum(), leaves)
    positions = torch.arange(300)
    distances = (positions[:, None] - positions).abs()
    terms = {} if score_mod is None else {"softcap": 2.0} if "softcap" in score_mod.options else {
        "bias": -SLOPES[:, None, None] * distances}
    visible = document_mod(None, None, positions[:, None], positions)
    wanted = torch.autograd.grad(dense(*leaves, visible, **terms)[0].square().sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-9)


def test_one_batch_entry_of_keys_serves_all():
    q, k, v = inputs()
    same([q, k[:1], v[:1]], made("by_head_and_batch"))
    assert torch.equal(flex_attention(q, k[:1], v[:1])[1], flex_attention(q[1:], k[:1], v[:1])[0])


def test_blocks_that_are_not_listed_are_hidden_whatever_mask_mod_says():
    counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 0, 2]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, seq_lengths=(300, 300))
    blocks = torch.tensor([[True, False, False], [True, False, True], [False, True, False]])
    visible = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :300]
    close(flex_attention(*inputs(), block_mask=mask), dense(*inputs(), visible)[0], 1e-9)


def test_a_mask_is_translated_once_and_not_kept_alive(monkeypatch):
    calls = []
    traced = flex_masks._traced
    monkeypatch.setattr(flex_masks, "_traced", lambda *given: calls.append(given) or traced(*given))
    mask, leaves = made("causal"), inputs()
    first = flex_attention(*leaves, block_mask=mask)
    assert torch.equal(flex_attention(*leaves, block_mask=mask), first)
    assert len(calls) == 1
    gone = weakref.ref(mask)
    calls.clear()
    del mask
    gc.collect()
    assert gone() is None


def test_a_mask_that_inference_translated_serves_training():
    mask, leaves = made("causal"), inputs()
    with torch.inference_mode():
        flex_attention(*(leaf.detach().clone() for leaf in leaves), block_mask=mask)
    out = flex_attention(*(leaf.detach().requires_grad_() for leaf in leaves), block_mask=mask)
    assert torch.autograd.grad(out.sum(), out)[0].shape == out.shape
    out.sum().backward()


def test_masks_and_score_functions_of_tilewise_are_taken():
    leaves = inputs()
    close(flex_attention(*leaves, block_mask=causal()), flex_attention(*leaves, block_mask=made("causal")), 1e-9)
    halved = ScoreFunction(torch=lambda score, b, h, q_idx, k_idx: score / 2)
    close(flex_attention(*leaves, halved), flex_attention(*leaves, scale=1 / 8), 1e-9)
    band = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 30), None, None, 300,
                             300, device="cpu")
    close(flex_attention(*leaves, alibi(SLOPES), window(30, 0, "top_left")),
          torch_flex.flex_attention(*leaves, alibi(SLOPES), band), 1e-9)


def test_lse_and_largest_scores_are_returned():
    leaves, mask = inputs(), made("hides_some_queries")
    out, lse = flex_attention(*leaves, block_mask=mask, return_lse=True)
    wanted = torch_flex.flex_attention(*leaves, block_mask=mask, return_lse=True)
    close(out, wanted[0], 1e-9)
    close(lse[:, :, 6:], wanted[1][:, :, 6:].double(), 1e-6)
    assert (lse[:, :, :6] == float("-inf")).all()
    _, aux = flex_attention(*leaves, block_mask=mask, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    seen = (leaves[0] @ leaves[1].mT / 4)[..., torch.arange(300) % 3 != 1].amax(-1)
    close(aux.max_scores[:, :, 6:], seen[:, :, 6:], 1e-6)
    _, aux = flex_attention(*leaves, return_aux=AuxRequest(lse=True))
    assert aux.max_scores is None
    assert aux.lse.shape == (2, 4, 300)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_without_lse_needs_no_gradient_through_it(monkeypatch):
    """It was asked for at every call, and a compiler hands a gradient of zeros to what nobody takes."""
    monkeypatch.setenv("TILEWISE_BACKEND", "torch")  # which has no gradient through lse
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    torch._dynamo.reset()
    torch.compile(lambda *t: flex_attention(*t, block_mask=causal()), backend="aot_eager")(q, k, v).sum().backward()
    torch._dynamo.reset()
    assert q.grad is not None


def test_what_cannot_be_translated_raises():
    leaves = inputs()
    with pytest.raises(UnsupportedProblem, match=r"score_mod <lambda> has what no Triton is made of: erf\(Symbol\)\."):
        flex_attention(*leaves, lambda score, b, h, q_idx, kv_idx: torch.erf(score))
    with pytest.raises(InvalidInput, match="score_mod is a float; allowed is a function, or None"):
        flex_attention(*leaves, 3.0)
    with pytest.raises(InvalidInput, match="of 300 queries and 300 keys, and query and key have 200 and 300: make one"):
        flex_attention(leaves[0][:, :, :200], *leaves[1:], block_mask=made("causal"))
    with pytest.raises(InvalidInput, match="block_mask is a list; allowed is a BlockMask, a mask of tilewise's"):
        flex_attention(*leaves, block_mask=[])
    with pytest.raises(InvalidInput, match="return_lse is True and return_aux is given; allowed is one of them"):
        flex_attention(*leaves, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(InvalidInput, match="key has 2 heads and query has 4, and enable_gqa is False"):
        flex_attention(*inputs(hk=2))
