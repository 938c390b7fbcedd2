"""``install()``: code that imports flash_attn runs unchanged; and its padding, which that code uses."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from integrations.dense import bottom_right, close, dense
from tilewise import InvalidInput, TilewiseError
from tilewise.integrations import bert_padding, flash_attn_cute, flash_attn_interface, rotary
from tilewise.integrations import flash_attn as face

# As code is found in models: nothing here names tilewise.
CONSUMER = """
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_varlen_func as same
import flash_attn.bert_padding

def attend(q, k, v, mask):
    b, s = mask.shape
    q, indices, cu_seqlens, longest, _ = unpad_input(q, mask)
    k, v = (index_first_axis(tensor.reshape(b * s, *tensor.shape[2:]), indices) for tensor in (k, v))
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    return flash_attn.bert_padding.pad_input(out, indices, b, s)
"""


@pytest.mark.usefixtures("without_flash_attn")
def test_code_that_imports_flash_attn_runs_unchanged():
    face.install()
    consumer = {}
    exec(CONSUMER, consumer)
    q, k, v = (torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    out = consumer["attend"](q, k, v, mask)
    visible = bottom_right(5, 5, -1, 0) & mask.bool()[:, None, None, :]
    wanted, _ = dense(*(tensor.transpose(1, 2) for tensor in (q, k, v)), visible)
    wanted = wanted.transpose(1, 2) * mask[..., None, None]
    close(out, wanted)
    for one, other in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(
            wanted.square().sum(), (q, k, v)), strict=True):
        close(one, other.double())
    assert consumer["same"] is face.flash_attn_varlen_func
    assert consumer["_flash_attn_forward"] is face._flash_attn_forward
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        assert getattr(sys.modules["flash_attn.flash_attn_interface"], f"_wrapped_flash_attn_{name}") is getattr(
            face, f"_flash_attn_{name}")


@pytest.mark.usefixtures("without_flash_attn")
def test_installed_modules_look_like_a_package_of_that_version():
    face.install()
    import flash_attn

    assert flash_attn.__version__ == face.INTERFACE_VERSION
    assert importlib.util.find_spec("flash_attn").name == "flash_attn"
    assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn.flash_attn_func is face.flash_attn_func
    assert not hasattr(flash_attn, "install")
    assert not hasattr(flash_attn, "uninstall")


@pytest.mark.usefixtures("without_flash_attn")
@pytest.mark.parametrize(("line", "name", "instead"), [
    ("from flash_attn.losses.cross_entropy import CrossEntropyLoss", "losses",
     " torch.nn.functional.cross_entropy takes the place of its loss."),
    ("from flash_attn import losses", "losses", " torch.nn.functional.cross_entropy takes the place of its loss."),
    ("from flash_attn.ops.triton.layer_norm import rms_norm_fn", "ops",
     " torch.nn.functional has linear, layer_norm, rms_norm, gelu and silu."),
    ("import flash_attn.modules.mha", "modules",
     " Build such a module of torch.nn's, and call flash_attn_func in it."),
    ("import flash_attn.models.gpt", "models", " Transformers has such models, and calls tilewise for "
     "attn_implementation='flash_attention_2' after install(metadata=True)."),
    ("import flash_attn.cute", "cute",
     " tilewise.integrations.flash_attn_cute.install() enters the functions of flash-attn 4."),
    ("import flash_attn.layers.patch_embed", "layers.patch_embed", ""),
    ("from flash_attn import flash_attn_gpu", "flash_attn_gpu", ""),
    ("import flash_attn.utils.benchmark", "utils", ""),
])
def test_what_is_not_there_is_an_import_error_that_says_what_is(line, name, instead):
    face.install()
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(line, {})
    assert str(caught.value) == (
        f"flash_attn.{name} is not there: tilewise.integrations.flash_attn.install() replaces flash_attn, "
        "flash_attn.flash_attn_interface, flash_attn.bert_padding and flash_attn.layers.rotary, and no other module of "
        f"flash-attn.{instead} If the code needs it, install flash-attn itself, and do not call install().")


@pytest.mark.usefixtures("without_flash_attn")
def test_rotary_is_found_by_every_way_to_import_it():
    face.install()
    import flash_attn.layers.rotary
    from flash_attn.layers import rotary as same
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    assert flash_attn.layers.rotary is same is rotary
    assert (RotaryEmbedding, apply_rotary_emb) == (rotary.RotaryEmbedding, rotary.apply_rotary_emb)
    assert importlib.util.find_spec("flash_attn.layers").name == "flash_attn.layers"


@pytest.mark.usefixtures("flash_attn_nowhere")
@pytest.mark.parametrize("name", ["losses.cross_entropy", "ops.rms_norm", "modules.mha"])
def test_only_what_is_installed_refuses_in_its_own_words(name):
    face.install()
    face.uninstall()
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flash_attn'$"):
        importlib.import_module(f"flash_attn.{name}")


@pytest.mark.usefixtures("flash_attn_nowhere")
def test_uninstalling_leaves_what_was_there_before():
    finders = list(sys.meta_path)
    face.uninstall()
    face.install()
    flash_attn_cute.install()
    import flash_attn.bert_padding
    import flash_attn.cute

    face.uninstall()
    assert [name for name in sys.modules if name.partition(".")[0] == "flash_attn"] == []
    assert importlib.util.find_spec("flash_attn") is None
    assert sys.meta_path == finders
    assert flash_attn.flash_attn_func is face.flash_attn_func  # of who imported it
    face.install()
    assert sys.modules["flash_attn"].flash_attn_func is face.flash_attn_func


@pytest.mark.usefixtures("flash_attn_nowhere")
def test_uninstalling_flash_attn_4_leaves_flash_attn_2():
    flash_attn_cute.uninstall()
    flash_attn_cute.install()
    assert importlib.util.find_spec("flash_attn.cute").name == "flash_attn.cute"
    flash_attn_cute.uninstall()
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn_cute\.install"):
        importlib.import_module("flash_attn.cute")
    assert sys.modules["flash_attn"].flash_attn_func is face.flash_attn_func
    assert not hasattr(sys.modules["flash_attn"], "cute")


def test_uninstalling_flash_attn_3_leaves_what_was_there_before(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    flash_attn_interface.uninstall()
    flash_attn_interface.install()
    assert importlib.import_module("flash_attn_interface") is flash_attn_interface
    flash_attn_interface.uninstall()
    assert "flash_attn_interface" not in sys.modules


@pytest.mark.parametrize("module", [face, flash_attn_interface, flash_attn_cute], ids=lambda module: module.__name__)
@pytest.mark.usefixtures("without_flash_attn")
def test_a_real_one_is_not_uninstalled(monkeypatch, module):
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    before = dict(sys.modules)
    module.uninstall()
    assert sys.modules == before


@pytest.mark.usefixtures("without_flash_attn")
def test_installing_twice_is_as_good_as_once():
    face.install()
    face.install()
    assert sys.modules["flash_attn"].flash_attn_func is face.flash_attn_func


@pytest.mark.usefixtures("without_flash_attn")
def test_installing_behind_flash_attn_4_leaves_it_there():
    flash_attn_cute.install()
    face.install()
    assert sys.modules["flash_attn"].cute.flash_attn_func is flash_attn_cute.flash_attn_func


@pytest.mark.usefixtures("without_flash_attn")
def test_a_real_flash_attn_that_is_imported_already_is_left_alone():
    real = ModuleType("flash_attn")
    real.__file__ = "site-packages/flash_attn/__init__.py"
    sys.modules["flash_attn"] = real
    with pytest.raises(TilewiseError) as caught:
        face.install()
    assert str(caught.value) == (
        "flash_attn is imported already, from site-packages/flash_attn/__init__.py: code that holds its functions "
        "would go on calling them. Call install() before anything imports it.")
    assert sys.modules["flash_attn"] is real
    assert "flash_attn.bert_padding" not in sys.modules


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_is_taken_out_and_put_back(dtype):
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=dtype)
    hidden = torch.randn(3, 4, 2, 5, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask)
    assert torch.equal(rows, hidden[mask.bool()])
    assert indices.tolist() == [0, 1, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 2, 2, 5]
    assert cu_seqlens.dtype is used.dtype is torch.int32
    assert longest == 3
    assert used.tolist() == [2, 0, 3]
    back = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(back, hidden * mask[..., None, None])
    gradient, = torch.autograd.grad(back.sum(), hidden)
    assert torch.equal(gradient, mask[..., None, None].expand_as(hidden).float())


@pytest.mark.parametrize("name", ["attention_mask", "unused_mask"])
@pytest.mark.parametrize("shape", [(2, 4), (5,), (2, 5, 1)])
def test_a_mask_of_other_lengths_is_refused_by_name(name, shape):
    """Rows were taken where a shorter mask would have put them, which are other tokens than it marks."""
    given = {"attention_mask": torch.ones(2, 5)} | {name: torch.ones(shape)}
    with pytest.raises(InvalidInput) as caught:
        bert_padding.unpad_input(torch.zeros(2, 5, 3), **given)
    assert str(caught.value) == (f"{name} has shape {shape} and hidden_states (2, 5, 3); allowed is (b, s), the first "
                                 "two dims.")


def test_any_number_but_zero_marks_a_token():
    _, _, cu_seqlens, longest, used = bert_padding.unpad_input(torch.randn(1, 4, 2), torch.tensor([[1, 1, 2, 0]]))
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3], 3, [3])


def test_tokens_that_are_kept_and_not_used_get_rows():
    mask, unused = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[0, 0, 1], [0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(torch.randn(2, 3, 4), mask, unused)
    assert rows.shape == (4, 4)
    assert indices.tolist() == [0, 1, 2, 3]
    assert cu_seqlens.tolist() == [0, 3, 4]
    assert longest == 3
    assert used.tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_put_where_the_indices_say(dtype):
    """Transformers' indices are int32 where it generates one token."""
    values = torch.randn(2, 3)
    put = bert_padding.index_put_first_axis(values, torch.tensor([3, 0], dtype=dtype), 4)
    assert torch.equal(put[[3, 0]], values)
    assert not put[1:3].any()
