"""``install(metadata=True)``: what clients ask of the package flash_attn has an answer; Transformers trains by it."""

import copy
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest
import torch

from integrations.calls import handed
from tilewise import InvalidInput, TilewiseError
from tilewise.integrations import bert_padding
from tilewise.integrations import flash_attn as face

SOURCE = Path(__file__).resolve().parents[2] / "src"
IDS = torch.randint(2, 61, (3, 13), generator=torch.Generator().manual_seed(1))
TOKENS = {
    "left_padded": torch.arange(13) >= torch.tensor([[0], [4], [7]]),
    "right_padded": torch.arange(13) < torch.tensor([[13], [9], [6]]),
    "with_a_hole": torch.arange(13) != torch.tensor([[0], [3], [12]]),
}
BATCHES = {
    "full": {"input_ids": IDS},
    **{name: {"input_ids": IDS, "attention_mask": tokens.long(), "position_ids": (tokens.cumsum(-1) - 1).clamp(min=0)}
       for name, tokens in TOKENS.items()},
    "packed": {"input_ids": IDS[:1], "position_ids": torch.cat([torch.arange(6), torch.arange(7)])[None]},
}


@pytest.fixture
def installed(flash_attn_nowhere):
    face.install(metadata=True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["flash_attn", "flash-attn", "Flash_Attn"])
def test_the_version_is_that_of_the_interface_by_every_spelling(name):
    assert importlib.metadata.version(name) == face.INTERFACE_VERSION
    assert importlib.import_module("flash_attn").__version__ == face.INTERFACE_VERSION


@pytest.mark.usefixtures("installed")
def test_the_distribution_says_who_it_is():
    found = importlib.metadata.distribution("flash_attn")
    assert found.metadata["Name"] == "flash_attn"
    assert "tilewise" in found.metadata["Summary"]
    assert found.read_text("INSTALLER").strip() == "tilewise"
    assert found.read_text("RECORD") is None
    assert found.files is None
    assert found.requires is None
    assert list(found.entry_points) == []
    assert found.locate_file("flash_attn.py").samefile(face.__file__)


@pytest.mark.usefixtures("installed")
def test_the_package_and_its_distribution_are_found_beside_all_others():
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
    assert "torch" in importlib.metadata.packages_distributions()
    assert [one.version for one in importlib.metadata.distributions(name="flash_attn")] == [face.INTERFACE_VERSION]
    assert importlib.util.find_spec("flash_attn").name == "flash_attn"
    importlib.metadata.entry_points(group="console_scripts")  # reads every distribution


@pytest.mark.usefixtures("installed")
def test_other_packages_and_other_folders_have_their_own_answers(tmp_path):
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("flash_attn_3")
    assert list(importlib.metadata.distributions(path=[str(tmp_path)])) == []


@pytest.mark.usefixtures("flash_attn_nowhere")
def test_it_is_answered_only_between_install_and_uninstall():
    face.install()
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    face.install(metadata=True)
    face.install()  # takes nothing back
    assert importlib.metadata.version("flash_attn") == face.INTERFACE_VERSION
    face.uninstall()
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    assert importlib.util.find_spec("flash_attn") is None


@pytest.mark.usefixtures("flash_attn_nowhere")
def test_a_switch_that_is_none_is_refused():
    with pytest.raises(InvalidInput, match="metadata is 'yes'"):
        face.install(metadata="yes")


@pytest.mark.usefixtures("flash_attn_nowhere")
@pytest.mark.parametrize("parts", [("module", "distribution"), ("module",), ("distribution",)], ids=" and ".join)
def test_beside_the_real_package_it_is_refused_and_the_names_alone_are_not(tmp_path, monkeypatch, parts):
    place = tmp_path / "flash_attn/__init__.py"
    told = []
    if "distribution" in parts:
        told.append("version 2.7.4")
        metadata = tmp_path / "flash_attn-2.7.4.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.7.4\n")
    if "module" in parts:
        told.append(f"at {place}")
        place.parent.mkdir()
        place.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for installed_already in (False, True):
        if installed_already:
            face.install()
        with pytest.raises(TilewiseError) as caught:
            face.install(metadata=True)
        assert str(caught.value) == (
            f"metadata is True and a flash_attn is installed ({', '.join(told)}): two would answer for its version; "
            "allowed is metadata=True where there is none. Uninstall it, or call install() without metadata=True: "
            "clients then see its version, and call tilewise.")
        assert ("flash_attn" in sys.modules) == installed_already
    assert importlib.import_module("flash_attn").flash_attn_func is face.flash_attn_func
    if "distribution" in parts:
        assert importlib.metadata.version("flash_attn") == "2.7.4"


@pytest.fixture
def transformers(flash_attn_nowhere, monkeypatch):
    """Return Transformers, which asked before flash_attn was there; of a GPU, which it asks for too, it hears yes."""
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: nobody to ask")
    asked = transformers.utils.import_utils
    assert not asked.is_flash_attn_2_available()
    if not torch.cuda.is_available():
        monkeypatch.setattr(asked, "is_torch_cuda_available", lambda: True)
    face.install(metadata=True)
    return transformers


def test_transformers_finds_flash_attention_2_and_no_other(transformers):
    asked = transformers.utils.import_utils
    assert asked.is_flash_attn_2_available()
    assert asked.is_flash_attn_greater_or_equal("2.8.0")
    assert not asked.is_flash_attn_greater_or_equal("2.9.0")
    assert not asked.is_flash_attn_3_available()
    assert not asked.is_flash_attn_4_available()
    face.uninstall()
    assert not asked.is_flash_attn_2_available()
    assert not asked.is_flash_attn_greater_or_equal("2.0.0")


@pytest.mark.usefixtures("flash_attn_nowhere")
def test_the_table_of_packages_that_earlier_transformers_made_at_import_is_kept_true(monkeypatch):
    """5.17 never asks again: it went on saying that the package was not installed."""
    asked = ModuleType("transformers.utils.import_utils")
    asked.PACKAGE_DISTRIBUTION_MAPPING = table = {"torch": ["torch"]}
    monkeypatch.setitem(sys.modules, asked.__name__, asked)
    face.install()
    assert table == {"torch": ["torch"]}
    face.install(metadata=True)
    assert table == {"torch": ["torch"], "flash_attn": ["flash_attn"]}
    face.uninstall()
    assert table == {"torch": ["torch"]}


def models(transformers, device):
    """Return two Llamas of the same random weights, whose attention is flash-attn's and eager."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    ours = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2").to(device)
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    assert ours.config._attn_implementation == "flash_attention_2"
    return ours, theirs


def results(model, batch):
    """Return the logits of tokens, and the gradients of all parameters in a row."""
    model.zero_grad()
    keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    logits = model(**batch, use_cache=False).logits[keep]
    logits.square().mean().backward()
    return logits.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", BATCHES)
def test_logits_and_gradients_are_those_of_eager(transformers, device, kind):
    ours, theirs = models(transformers, device)
    batch = {name: tensor.to(device) for name, tensor in BATCHES[kind].items()}
    for one, other in zip(results(ours, batch), results(theirs, batch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    q, _, _ = handed(lambda: ours(**batch, use_cache=False))
    tokens = int(batch["attention_mask"].sum()) if kind in TOKENS else 13
    assert q.shape == (3 if kind == "full" else 1, 4, tokens, 8)  # padding was taken out


def test_it_calls_tilewises_functions_until_it_is_uninstalled(transformers):
    loaded = transformers.modeling_flash_attention_utils
    loaded.lazy_import_flash_attention("flash_attention_2")
    assert (loaded._flash_fn, loaded._flash_varlen_fn) == (face.flash_attn_func, face.flash_attn_varlen_func)
    assert (loaded._pad_fn, loaded._unpad_fn) == (bert_padding.pad_input, bert_padding.unpad_input)
    face.uninstall()
    assert loaded._loaded_implementation is None


def test_training_takes_the_steps_of_eager(transformers, device):
    losses = []
    for model in models(transformers, device):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for given in [*BATCHES.values(), BATCHES["full"]]:
            batch = {name: tensor.to(device) for name, tensor in given.items()}
            keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            # What a row of padding predicts is 0 behind flash-attn, and an average of values behind eager.
            labels = batch["input_ids"].masked_fill(~(keep & keep.roll(1, 1)), -100)
            loss = model(**batch, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["full", "left_padded"])
def test_generated_tokens_are_those_of_eager(transformers, device, kind, cache):
    """A batch with padding, one query each: its rows were put back by int32 indices, which was an error."""
    given = {name: BATCHES[kind][name].to(device) for name in ("input_ids", "attention_mask") if name in BATCHES[kind]}
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    ours, theirs = (model.eval().generate(**given, **options, min_new_tokens=6, max_new_tokens=6, do_sample=False)
                    for model in models(transformers, device))
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU hears; this one has one")
@pytest.mark.usefixtures("installed")
def test_without_a_gpu_transformers_refuses_for_that_reason_alone():
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: nobody to ask")
    assert transformers.utils.import_utils.is_flash_attn_greater_or_equal(face.INTERFACE_VERSION)
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4)
    with pytest.raises(ImportError, match="FlashAttention2 is not available on CPU"):
        transformers.LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")


@pytest.mark.slow
@pytest.mark.usefixtures("flash_attn_nowhere")
def test_diffusers_takes_its_flash_backend():
    """It asks while it is imported, so in a process of its own."""
    pytest.importorskip("diffusers", reason="Diffusers is not installed: nobody to ask")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", """
import torch
from tilewise.integrations import flash_attn
flash_attn.install(metadata=True)
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn, flash_attn_func
assert flash_attn_func is flash_attn.flash_attn_func
q, k, v = torch.randn(3, 2, 9, 4, 8).unbind()
out, wanted = (dispatch_attention_fn(q, k, v, backend=AttentionBackendName(name)) for name in ("flash", "native"))
torch.testing.assert_close(out, wanted)
print("served")
"""], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    assert done.stdout.strip() == "served", done.stderr
