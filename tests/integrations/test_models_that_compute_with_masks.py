"""Models that compute with their mask, choose keys or have unusual arguments: logits, gradients and tokens are eager's.
"""

import copy
import importlib

import pytest
import torch

from integrations import models as plain
from integrations.models import transformers
from integrations.models_that_compute_with_masks import IDS, MODELS, PADDED, RIGHT, B, S, model
from integrations.test_transformers import same
from tilewise.integrations.model_masks import ModelMask
from tilewise.integrations.transformers import register

NEW_TOKENS = 8
# What each asks of its mask, or hands to attention.
SPARSE = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note")
COMPUTING = (*SPARSE, "deepseek_v4", "doge", "nllb_moe", "lasr", "siglip2", "informer", "pp_doclayout_v2", "t5gemma2",
             "lightglue")
GENERATING = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "deepseek_v4", "doge", "nllb_moe", "t5gemma2", "janus")


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


@pytest.fixture
def made(monkeypatch):
    """Count the masks that became tensors."""
    calls = []
    own = ModelMask.pairs
    monkeypatch.setattr(ModelMask, "pairs", lambda self: calls.append(self) or own(self))
    return calls


def has(name):
    """Skip where Transformers has no such model."""
    try:
        importlib.import_module(f"transformers.models.{name}")
    except ModuleNotFoundError:
        pytest.skip(f"this Transformers has no {name}")


def rows(name, found):
    """Leave out what padding holds, which is what it likes, and numbers that hide a pair of a result."""
    given = MODELS[name][3]
    marks = {"nllb_moe": RIGHT, "musicgen": RIGHT}.get(name, given.get("attention_mask"))
    if name == "musicgen":
        found = found.view(B, 4, S, -1).transpose(1, 2)
    found = found if marks is None or marks.shape[1] != found.shape[1] else found[marks.bool()]
    return found.clamp(min=-1000)


def outcome(name, implementation):
    net = model(name)
    net.set_attn_implementation(implementation)
    net.zero_grad()
    torch.manual_seed(3)  # Informer draws keys
    found = rows(name, net(**MODELS[name][3])[0])
    found.square().mean().backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_eager(name, made):
    has(name)
    found = outcome(name, "tilewise")
    assert not made or name in (*COMPUTING, "bridgetower")
    same(found, outcome(name, "eager"))


# Informer gets none without padding; PP-DocLayout-V2 left the addition to the attention function in later versions.
@pytest.mark.parametrize("name", [name for name in COMPUTING if name not in ("informer", "pp_doclayout_v2")])
def test_a_mask_is_made_a_tensor_once_for_all_layers(name, made):
    has(name)
    net = model(name)
    net.set_attn_implementation("tilewise")
    with torch.no_grad():
        net(**MODELS[name][3])
    assert len({id(mask) for mask in made}) == len(made)
    # A window's and a full mask, of encoder and decoder, are masks of their own.
    assert 1 <= len(made) <= 3


@pytest.mark.parametrize("name", ["mistral_window", "gpt2_heads_of_their_own", "bert", "t5_position_bias", "bart"])
def test_masks_that_no_model_computes_with_are_never_made(name, made):
    net = plain.model(name)
    net.set_attn_implementation("tilewise")
    given = {"input_ids": IDS, "attention_mask": PADDED}
    with torch.no_grad():
        net(**given, **({"decoder_input_ids": IDS} if name in plain.PAIRS else {}))
    assert made == []


def generated(name, implementation, cache):
    net = model(name)
    net.set_attn_implementation(implementation)
    given = {n: v for n, v in MODELS[name][3].items() if n in ("input_ids", "attention_mask", "pixel_values")}
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    made = net.generate(**given, **options, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False,
                        pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    return made.sequences, torch.stack(made.logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generated_tokens_are_those_of_eager(name, cache):
    has(name)
    if name == "deepseek_v4" and cache == "static":
        pytest.skip("Transformers has no static cache for its compressed keys")
    tokens, logits = generated(name, "tilewise", cache)
    wanted, wanted_logits = generated(name, "eager", cache)
    assert torch.equal(tokens, wanted)
    same([logits], [wanted_logits])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta", "Ernie"])
def test_an_encoder_that_generates_from_a_cache_gives_eagers_tokens(kind, padded):
    """Its mask is of one query and one key while the cache holds more; it was refused for its lengths."""
    config = getattr(transformers, f"{kind}Config")(**plain.SIZES, type_vocab_size=2)
    maker = getattr(transformers, f"{kind}LMHeadModel", None) or getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    net = maker(config).eval()
    logits = {}
    for implementation in ("eager", "tilewise"):
        net.set_attn_implementation(implementation)
        given = {"attention_mask": PADDED} if padded else {}
        made = net.generate(input_ids=IDS, **given, min_new_tokens=4, max_new_tokens=4, do_sample=False,
                            return_dict_in_generate=True, output_logits=True)
        logits[implementation] = torch.stack(made.logits)
    same([logits["tilewise"]], [logits["eager"]])


@pytest.mark.parametrize("name", ["lasr", "parakeet"])
def test_what_generate_is_told_may_reach_the_attention(name):
    has(name)
    kind = name.capitalize()
    config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), f"{kind}CTCConfig")
    maker = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), f"{kind}ForCTC")
    torch.manual_seed(0)
    net = maker(config(vocab_size=61, encoder_config=MODELS["lasr"][2], pad_token_id=60)).eval()
    found = []
    for implementation in ("eager", "tilewise"):
        net.set_attn_implementation(implementation)
        found.append(net.generate(**MODELS["lasr"][3], num_beams=1, max_new_tokens=4, min_new_tokens=4,
                                  cache_implementation="static"))
    assert torch.equal(*found)


def test_with_the_average_a_whole_tensor_is_eagers_where_all_of_a_source_is_padding():
    """In a decoder whose source is all padding no query sees a key, and every row differs from eager's without it."""
    register("tilewise_average", rows_without_keys="average")
    marks = RIGHT.clone()
    marks[1] = 0
    for name, given in {"llama": {"attention_mask": PADDED, "use_cache": False},
                        "t5_position_bias": {"attention_mask": marks, "decoder_input_ids": IDS}}.items():
        net = plain.model(name)
        found = {}
        for implementation in ("eager", "tilewise", "tilewise_average"):
            net.set_attn_implementation(implementation)
            with torch.no_grad():
                found[implementation] = net(input_ids=IDS, **given)[0]
        same([found["tilewise_average"]], [found["eager"]])
        assert (found["tilewise"] - found["eager"]).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["doge", "deepseek_v32"])
def test_compiled_models_give_the_same(name):
    has(name)
    torch._dynamo.reset()
    wanted, _ = outcome(name, "eager")
    net = model(name)
    net.set_attn_implementation("tilewise")
    with torch.no_grad():
        found = rows(name, torch.compile(net, backend="aot_eager")(**MODELS[name][3])[0])
    same([found], [wanted])


def test_a_model_that_reads_the_mask_as_booleans_gets_them():
    """Its eager attention gets numbers, takes 0 for hidden, and gives NaN; tilewise once hid what it should show."""
    has("nemotron_asr_streaming")
    home = "transformers.models.nemotron_asr_streaming"
    config = importlib.import_module(f"{home}.configuration_nemotron_asr_streaming").NemotronAsrStreamingEncoderConfig
    maker = importlib.import_module(f"{home}.modeling_nemotron_asr_streaming").NemotronAsrStreamingEncoder
    found = []
    for implementation in ("sdpa", "tilewise"):
        torch.manual_seed(0)
        net = maker._from_config(config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                        intermediate_size=48, subsampling_conv_channels=8, num_mel_bins=16),
                                 attn_implementation=implementation).eval()
        marks = (torch.arange(128) < torch.tensor([[128], [80]])).long()
        features = torch.randn(2, 128, 16, generator=torch.Generator().manual_seed(1))
        out = net(input_features=features, attention_mask=marks, num_lookahead_tokens=0).last_hidden_state
        out = torch.cat([out[0], out[1, :10]])  # a row is of 8 frames
        out.square().mean().backward()
        found.append((out.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])))
    assert all(part.isfinite().all() for part in found[0])
    same(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_of_models_in_half_precision_hide_the_same(dtype):
    """The least number is that of the model's dtype: another one's would be rounded to -inf, or show what is hidden."""
    net = copy.deepcopy(model("doge")).to(dtype)
    found = {}
    for implementation in ("eager", "tilewise"):
        net.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = rows("doge", net(**MODELS["doge"][3])[0]).float()
    error = (found["tilewise"] - found["eager"]).abs().max() / found["eager"].abs().max()
    assert error < 8 * torch.finfo(dtype).eps
