"""What a caller of another library's function gives it acts, is refused by name, or is known to change nothing."""

import ast
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from integrations.calls import signature
from integrations.dense import alibi, bottom_right, close, dense
from tilewise import InvalidInput, UnsupportedProblem, causal
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_cute as fa4
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.integrations import flex, sdpa_provider, torch_sdpa
from tilewise.integrations import transformers as face

B, S, H, D = 2, 6, 2, 8
Q, K, V = (torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
CU = torch.tensor([0, S, 2 * S], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": S, "max_seqlen_k": S}
SINKS = torch.tensor([50.0, -50.0])  # the first head sees next to nothing, the second what it saw
CAP, SCALE = 1e-2, 20.0
SLOPES = torch.tensor([30.0, 5.0])


def rows(tensor):
    return tensor.flatten(0, 1)


def first(found):
    return found[0] if isinstance(found, tuple) else found


def of_batch(function):
    return lambda **options: first(function(Q, K, V, **options))


def of_rows(function):
    return lambda **options: first(function(rows(Q), rows(K), rows(V), **LENGTHS, **options)).unflatten(0, (B, S))


def of_cache(function):
    return lambda **options: first(function(Q, K.clone(), V.clone(), cache_seqlens=S, **options))



def two_alone(window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None):
    return fa2._flash_attn_forward(Q, K, V, 0.0, softmax_scale, False, *window_size, softcap, alibi_slopes, False)[0]


def two_alone_of_rows(window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None):
    return fa2._flash_attn_varlen_forward(rows(Q), rows(K), rows(V), *LENGTHS.values(), 0.0, softmax_scale, False,
                                          *window_size, softcap, alibi_slopes)[0].unflatten(0, (B, S))


def of_provider(window_size):
    left, right = window_size
    return sdpa_provider._forward(Q, K, V, None, None, S, S, 0.0, False, False, window_size_left=left,
                                  window_size_right=right)[0]


def of_provider_in_rows(window_size):
    left, right = window_size
    return sdpa_provider._forward(rows(Q), rows(K), rows(V), CU, CU, S, S, 0.0, False, False, window_size_left=left,
                                  window_size_right=right)[0].unflatten(0, (B, S))


def of_flex(**options):
    return flex.flex_attention(*(t.transpose(1, 2) for t in (Q, K, V)), **options).transpose(1, 2)


def of_torch_in_rows(**options):
    return torch_sdpa.varlen_attn(rows(Q), rows(K), rows(V), CU, CU, S, S, **options).unflatten(0, (B, S))


class Layer(torch.nn.Module):
    is_causal = False


def of_models(**options):
    return face.attention_forward(Layer(), *(t.transpose(1, 2) for t in (Q, K, V)), None, **options)[0]


def of_models_in_rows(**options):
    tensors = (rows(t)[None].transpose(1, 2) for t in (Q, K, V))
    return face.attention_forward(Layer(), *tensors, None, cu_seq_lens_q=CU, cu_seq_lens_k=CU,
                                  **options)[0].unflatten(1, (B, S))[0]


QKV, KV = torch.stack((Q, K, V), 2), torch.stack((K, V), 2)
FUNCTIONS = {
    "2": of_batch(fa2.flash_attn_func),
    "2_kvpacked": lambda **o: fa2.flash_attn_kvpacked_func(Q, KV, **o),
    "2_qkvpacked": lambda **o: fa2.flash_attn_qkvpacked_func(QKV, **o),
    "2_varlen": of_rows(fa2.flash_attn_varlen_func),
    "2_varlen_kvpacked": lambda **o: fa2.flash_attn_varlen_kvpacked_func(rows(Q), rows(KV), *LENGTHS.values(),
                                                                         **o).unflatten(0, (B, S)),
    "2_varlen_qkvpacked": lambda **o: fa2.flash_attn_varlen_qkvpacked_func(rows(QKV), CU, S,
                                                                           **o).unflatten(0, (B, S)),
    "2_cache": of_cache(fa2.flash_attn_with_kvcache),
    "2_pass": two_alone, "2_varlen_pass": two_alone_of_rows,
    "3": of_batch(fa3.flash_attn_func), "3_varlen": of_rows(fa3.flash_attn_varlen_func),
    "3_qkvpacked": lambda **o: fa3.flash_attn_qkvpacked_func(QKV, **o),
    "3_cache": of_cache(fa3.flash_attn_with_kvcache),
    "4": of_batch(fa4.flash_attn_func), "4_varlen": of_rows(fa4.flash_attn_varlen_func),
    "varlen_attn": of_torch_in_rows, "provider": of_provider, "provider_varlen": of_provider_in_rows,
    "flex": of_flex, "models": of_models, "models_packed": of_models_in_rows,
}
ONE_KEY = bottom_right(S, S, 0, 0)
CHUNKS = torch.arange(S)[:, None] // 2 == torch.arange(S) // 2
FLASH = [name for name in FUNCTIONS if name[0].isdigit()]
CAPPED = {"softcap": CAP, "scale": SCALE}
# Functions, what is given, what it means to the dense formula, and the sinks.
CASES = [
    *((name, {"window_size": (0, 0)}, {"visible": ONE_KEY}, None)
      for name in (*FLASH, "varlen_attn", "provider", "provider_varlen")),
    *((name, {"softcap": CAP, "softmax_scale": SCALE}, CAPPED, None) for name in FLASH),
    *((name, {"alibi_slopes": SLOPES}, {"bias": alibi(SLOPES, S, S)}, None) for name in FLASH if name[0] == "2"),
    *((name, {"attention_chunk": 2}, {"visible": CHUNKS}, None) for name in ("3", "3_varlen", "3_qkvpacked")),
    *((name, {"learnable_sink": SINKS}, {}, SINKS) for name in ("4", "4_varlen")),
    ("flex", {"score_mod": flex.softcap(CAP), "scale": SCALE}, CAPPED, None),
    ("flex", {"score_mod": flex.alibi(SLOPES)}, {"bias": alibi(SLOPES, S, S)}, None),
    *((name, given, means, sinks) for name in ("models", "models_packed") for given, means, sinks in (
        ({"sliding_window": 1}, {"visible": ONE_KEY}, None),
        ({"softcap": CAP, "scaling": SCALE}, CAPPED, None),
        ({"s_aux": SINKS}, {}, SINKS),
        ({"is_causal": True}, {"visible": bottom_right(S, S, right=0)}, None))),
    ("models", {"indices": torch.arange(S, dtype=torch.int32).expand(B, S)[..., None]}, {"visible": ONE_KEY}, None),
    ("models", {"sinks": SINKS[:, None].expand(B, H, S)}, {}, SINKS),
    ("models", {"position_bias": alibi(SLOPES, S, S).float()[None]}, {"bias": alibi(SLOPES, S, S)}, None),
]


@pytest.mark.parametrize(("name", "given", "means", "sinks"), CASES,
                         ids=[f"{name}-{'-'.join(given)}" for name, given, *_ in CASES])
def test_what_changes_the_result_acts(name, given, means, sinks):
    """Each is so large, or so narrow, that a call which dropped it would be off by far."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (Q, K, V))
    wanted, lse = dense(q, k, v, **means)
    if sinks is not None:
        wanted = wanted * torch.sigmoid(lse - sinks[:, None])[..., None]
    dropped, _ = dense(q, k, v, scale=means.get("scale"))
    assert (wanted - dropped).abs().max() > 0.3
    close(FUNCTIONS[name](**given), wanted.transpose(1, 2))


@pytest.mark.parametrize("attends", [of_models, of_models_in_rows])
@pytest.mark.parametrize(("name", "value", "reason"), [
    ("head_mask", torch.ones(2, H), "the probabilities are never in memory to be multiplied by it"),
    *((name, torch.zeros(1), "caches in pages, of continuous batching, are not read here")
      for name in ("cache", "block_table", "k_cache", "v_cache", "read_index", "write_index")),
    ("window_of_the_future", 3, "tilewise does not know what it would change"),
    ("flag_of_the_future", False, "tilewise does not know what it would change"),
])
def test_what_would_change_a_models_result_is_refused_by_name(attends, name, value, reason):
    """A flag that was False went unseen."""
    said = re.escape(f"{name} is given, a {type(value).__name__}; allowed is None: {reason}")
    with pytest.raises(UnsupportedProblem, match=f"^{said}"):
        attends(**{name: value})
    attends(**{name: None})


def test_a_model_that_asks_for_equal_bits_gets_them(monkeypatch):
    asked = []
    monkeypatch.setattr(face, "attention", lambda q, *_, deterministic, **__: asked.append(deterministic) or q)
    for given in (True, False, None):
        of_models(deterministic=given)
    assert asked == [True, None, None]


def test_an_unknown_argument_of_a_mask_is_refused_by_name():
    with pytest.raises(UnsupportedProblem, match=r"^skip is given to the mask function, a bool; allowed is None: "
                                                 r"tilewise does not know"):
        face.attention_mask(1, S, S, skip=False)


def test_results_that_torch_may_come_to_ask_for_are_refused_by_name():
    request = namedtuple("AuxRequest", "lse max_scores entropy", defaults=3 * (False,))
    for call, allowed in ((of_torch_in_rows, "is lse"), (of_flex, "are lse, max_scores")):
        with pytest.raises(UnsupportedProblem) as caught:
            call(return_aux=request(entropy=True))
        assert str(caught.value).startswith(f"return_aux asks for entropy; allowed {allowed}: leave entropy out of the "
                                            "AuxRequest.")
    with pytest.raises(UnsupportedProblem, match="return_aux asks for max_scores; allowed is lse"):
        of_torch_in_rows(return_aux=request(max_scores=True))


@pytest.mark.parametrize("function", [
    *(getattr(module, name) for module in (fa2, fa3, fa4, torch_sdpa, flex) for name in module.__all__
      if name.startswith(("flash_attn", "scaled", "varlen", "flex")))], ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_names_that_a_function_does_not_have_are_pythons_to_refuse(function):
    assert "kwargs" not in signature(function)
    with pytest.raises(TypeError, match="window_of_the_future"):
        function(window_of_the_future=3)


def calls_of(name, text):
    """Return the keywords of each call of a function of this name in a module's text."""
    for found in re.finditer(rf"(?<![\w.]){name}\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        made = re.sub(r"#[^\n]*", "", text[found.start():end])
        yield [keyword.arg for keyword in ast.parse(made).body[0].value.keywords if keyword.arg]


def known_to(function, *more):
    return {*(part.partition("=")[0] for part in signature(function).split(", ")), *(name for m in more for name in m)}


def test_every_keyword_that_models_of_the_installed_version_give_is_known():
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: no models to read")
    given = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text("utf-8")
        for keywords in calls_of("attention_interface", text):
            given.update((keyword, path.name) for keyword in keywords)
    assert {"scaling", "sliding_window", "softcap", "s_aux", "position_bias"} <= set(given)
    known = known_to(face.attention_forward, face._WITHOUT_EFFECT, face._REFUSED,
                     ("cu_seq_lens_q", "cu_seq_lens_k", "output_attentions"))
    assert {keyword: of for keyword, of in given.items() if keyword not in known} == {}


def test_what_the_installed_version_hands_to_every_layer_is_taken():
    pytest.importorskip("transformers", reason="Transformers is not installed: nothing to read")
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils.generic import TransformersKwargs

    handed = {*FlashAttentionKwargs.__annotations__, *TransformersKwargs.__annotations__, "use_cache", "cache_position",
              "logits_to_keep"}
    acting = {"cu_seq_lens_q", "cu_seq_lens_k", "is_causal", "output_attentions"}
    assert {"num_items_in_batch", "max_length_q", "position_ids"} <= handed - acting <= face._WITHOUT_EFFECT


@pytest.mark.parametrize("name", sorted(face._WITHOUT_EFFECT))
def test_what_is_listed_as_without_an_effect_has_none(name):
    wanted = of_models(is_causal=True)
    for value in (torch.ones(B, S), 3, True, False, None):
        assert torch.equal(of_models(is_causal=True, **{name: value}), wanted)


def test_every_keyword_that_the_installed_version_gives_a_mask_function_is_known():
    masking_utils = pytest.importorskip("transformers.masking_utils", reason="Transformers is not installed")
    given = {keyword for keywords in calls_of("mask_interface", Path(masking_utils.__file__).read_text("utf-8"))
             for keyword in keywords}
    assert "mask_function" in given
    assert given <= known_to(face.attention_mask, face._OF_MASKS_WITHOUT_EFFECT)


TAKEN_FOR_CAUSAL = ((127, 0), 0.125, 1, None, "no")


@pytest.mark.parametrize("given", TAKEN_FOR_CAUSAL, ids=str)
@pytest.mark.parametrize("call", [
    of_batch(fa2.flash_attn_func), of_rows(fa2.flash_attn_varlen_func), of_cache(fa2.flash_attn_with_kvcache),
    of_batch(fa3.flash_attn_func), of_rows(fa3.flash_attn_varlen_func), of_cache(fa3.flash_attn_with_kvcache),
    of_batch(fa4.flash_attn_func), of_rows(fa4.flash_attn_varlen_func)], ids=range(8))
def test_what_is_no_switch_does_not_make_a_flash_attn_call_causal(call, given):
    """A window or a scale one place too early in the row of arguments made it causal."""
    assert call(causal=True).shape == Q.shape
    with pytest.raises(InvalidInput) as caught:
        call(causal=given)
    assert str(caught.value) == f"causal is {given!r}; allowed are True and False."


@pytest.mark.parametrize("given", TAKEN_FOR_CAUSAL, ids=str)
def test_what_is_no_switch_does_not_make_torchs_call_causal(given):
    attend = torch_sdpa.scaled_dot_product_attention
    for name, call in (("is_causal", lambda: attend(Q, K, V, None, 0.0, given)),
                       ("enable_gqa", lambda: attend(Q, K, V, enable_gqa=given))):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert str(caught.value) == f"{name} is {given!r}; allowed are True and False."


@pytest.mark.parametrize("mask", [causal(), True, [[True]]], ids=["Mask", "bool", "list"])
def test_a_mask_that_is_no_tensor_is_refused_by_torchs_call(mask):
    with pytest.raises(InvalidInput) as caught:
        torch_sdpa.scaled_dot_product_attention(Q, K, V, mask)
    assert str(caught.value) == (f"attn_mask is a {type(mask).__name__}; allowed is a torch.Tensor, a CausalBias of "
                                 "torch's, or None. A mask of tilewise's goes to tilewise.attention(mask=).")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_may_find_out_whether_it_is_causal():
    """As models do by the number of queries, which is open in a graph for every length."""
    def call(q, k):
        return torch_sdpa.scaled_dot_product_attention(q, k, k, is_causal=q.shape[2] > 2)
    compiled = torch.compile(call, dynamic=True, backend="eager", fullgraph=True)
    for length in (5, 6, 2):
        q = torch.randn(2, 2, length, 8)
        torch.testing.assert_close(compiled(q, q), call(q, q))
