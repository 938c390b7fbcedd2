"""Models of Transformers: logits, gradients and generated tokens are those of its own eager attention."""

import copy
import inspect

import pytest
import torch

from integrations.models import DECODERS, ENCODERS, PAIRS, WINDOW, model, transformers
from tilewise.integrations.transformers import register

LENGTH = 13
NEW_TOKENS = 12
IDS = torch.randint(2, 61, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def marked(is_token):
    return is_token(torch.arange(LENGTH)).long()


BATCHES = {
    "full": {},
    "all_tokens_marked": {"attention_mask": torch.ones_like(IDS)},
    "left_padded": {"attention_mask": marked(lambda position: position >= torch.tensor([[0], [4], [7]]))},
    "right_padded": {"attention_mask": marked(lambda position: position < torch.tensor([[LENGTH], [9], [6]]))},
    "with_a_hole": {"attention_mask": marked(lambda position: position != torch.tensor([[-1], [3], [LENGTH - 1]]))},
    "packed": {"position_ids": torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])[None].expand(3, -1)},
}
PADDED = ("all_tokens_marked", "left_padded", "right_padded", "with_a_hole")
MODELS = [*DECODERS, *ENCODERS, *PAIRS]


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()
    register("tilewise_reading", read_padding=True)


def batch(name, kind):
    """Return the arguments of a call and which rows of its result count: padding's hold whatever they like."""
    if name == "vit_without_a_mask":
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(2))}, ...
    given = dict(BATCHES[kind])
    keep = given.get("attention_mask", torch.ones_like(IDS)).bool()
    if "attention_mask" in given and name in DECODERS:
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(2)),
                "decoder_input_ids": IDS} | {f"decoder_{n}": v for n, v in given.items()}, keep
    if name in PAIRS:
        decoder_ids = IDS.flip(0)[:, :9]
        return {"input_ids": IDS, "decoder_input_ids": decoder_ids} | given, torch.ones(3, 9, dtype=torch.bool)
    return {"input_ids": IDS} | given, keep


def outcome(name, implementation, given, keep):
    """Return what a model, or that of a name, computes, and the gradients of its parameters in a row."""
    net = model(name) if isinstance(name, str) else name
    net.set_attn_implementation(implementation)
    net.zero_grad()
    options = {} if isinstance(name, str) and name in ENCODERS else {"use_cache": False}
    found = net(**given, **options)[0][keep]
    found.square().mean().backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def takes(name, kind):
    return (name in DECODERS or kind != "packed") and (name != "vit_without_a_mask" or kind == "full")


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in MODELS for kind in BATCHES if takes(name, kind)])
def test_results_and_gradients_are_those_of_eager(name, kind):
    given, keep = batch(name, kind)
    same(outcome(name, "tilewise", given, keep), outcome(name, "eager", given, keep))


@pytest.mark.parametrize("kind", PADDED)
def test_padding_that_is_read_gives_the_same(kind):
    given, keep = batch("mistral_window", kind)
    same(outcome("mistral_window", "tilewise_reading", given, keep), outcome("mistral_window", "eager", given, keep))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen2_some_layers_windowed", "gpt_oss_sinks", "t5_position_bias"])
def test_checkpointed_gradients_are_those_of_eager(name, reentrant):
    given, keep = batch(name, "left_padded")
    net = copy.deepcopy(model(name)).train()
    enable = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    net.enable_input_require_grads()
    same(outcome(net, "tilewise", given, keep), outcome(name, "eager", given, keep))


def generated(name, implementation, cache, given):
    net = model(name)
    net.set_attn_implementation(implementation)
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    made = net.generate(**given, **options, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False,
                        return_dict_in_generate=True, output_logits=True)
    return made.sequences, torch.stack(made.logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["full", "left_padded"])
@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_generated_tokens_are_those_of_eager(name, kind, cache):
    if name == "llama4_chunks" and cache == "static" and "block_sequence_ids" not in inspect.signature(
            transformers.masking_utils.create_chunked_causal_mask).parameters:
        pytest.skip("this Transformers calls a function of its own with an argument that it does not have")
    given, _ = batch(name, kind)
    given = {n: v for n, v in given.items() if n in ("input_ids", "input_features", "attention_mask")}
    tokens, logits = generated(name, "tilewise", cache, given)
    wanted, wanted_logits = generated(name, "eager", cache, given)
    assert torch.equal(tokens, wanted)
    same([logits], [wanted_logits])


def test_prompts_longer_than_the_window_fill_a_static_cache():
    """A window's static cache holds less than the prompt: then keys begin past position 0."""
    given = {"input_ids": IDS[:, :WINDOW + 2]}
    for cache in ("static", "dynamic"):
        assert torch.equal(generated("mistral_window", "tilewise", cache, given)[0],
                           generated("mistral_window", "eager", cache, given)[0])


def test_packed_lengths_are_those_of_a_flattening_collator():
    lengths = torch.tensor([0, 6, LENGTH], dtype=torch.int32)
    given = {"input_ids": IDS[:1], "position_ids": BATCHES["packed"]["position_ids"][:1]}
    marked = given | {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 7, "max_length_k": 7}
    for name in ("llama", "mistral_window"):
        same(outcome(name, "tilewise", marked, ...), outcome(name, "eager", given, ...))


def test_a_mask_of_four_dims_of_the_users_own_is_taken():
    visible = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    wanted = outcome("llama", "eager", {"input_ids": IDS, "attention_mask": added}, ...)
    for mask in (visible, added, added.masked_fill(~visible, float("-inf"))):
        same(outcome("llama", "tilewise", {"input_ids": IDS, "attention_mask": mask}, ...), wanted)


def test_dropout_of_a_model_in_training_is_drawn_from_torchs_seed():
    net = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                 num_attention_heads=4, attention_dropout=0.5), attn_implementation="tilewise").train()

    def logits(seed):
        torch.manual_seed(seed)
        return net(IDS).logits

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["full", "left_padded"])
def test_compiled_models_give_the_same(kind):
    torch._dynamo.reset()
    given, keep = batch("mistral_window", kind)
    net = model("mistral_window")
    wanted, _ = outcome("mistral_window", "eager", given, keep)
    net.set_attn_implementation("tilewise")
    with torch.no_grad():
        found = torch.compile(net, backend="aot_eager")(**given, use_cache=False).logits[keep]
    same([found], [wanted])


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_decoding_from_a_static_cache_compiles_into_one_graph(monkeypatch):
    """Transformers compiles such steps by itself, on accelerators alone; the mask is made before, and handed over."""
    torch._dynamo.reset()
    given, _ = batch("mistral_window", "left_padded")
    del given["position_ids"]
    wanted, _ = generated("mistral_window", "eager", "static", given)
    net = copy.deepcopy(model("mistral_window"))
    net.set_attn_implementation("tilewise")
    monkeypatch.setattr(net, "_valid_auto_compile_criteria", lambda *_: True)
    compiling = transformers.CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    found = net.generate(**given, cache_implementation="static", compile_config=compiling, min_new_tokens=NEW_TOKENS,
                         max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(found, wanted)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # eager's own: the second has symbols
