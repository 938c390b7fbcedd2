"""``install()``: code that imports flash_attn runs unchanged; and its padding, which that code uses."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from integrations.dense import bottom_right, close, dense
from tilewise import InvalidInput, TilewiseError
from tilewise.integrations import bert_padding, flash_attn_cute
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


@pytest.fixture
def without_flash_attn():
    """Whatever ``flash_attn`` this process knows is unknown in the test, and back behind it."""
    def known():
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flash_attn"}

    before = known()
    for name in before:
        del sys.modules[name]
    yield
    for name in known():
        del sys.modules[name]
    sys.modules.update(before)


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


@pytest.mark.usefixtures("without_flash_attn")
def test_installed_modules_look_like_a_package_of_that_version():
    face.install()
    import flash_attn

    assert flash_attn.__version__ == face.INTERFACE_VERSION
    assert importlib.util.find_spec("flash_attn").name == "flash_attn"
    assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn.flash_attn_func is face.flash_attn_func
    assert not hasattr(flash_attn, "install")


@pytest.mark.usefixtures("without_flash_attn")
@pytest.mark.parametrize("line", ["from flash_attn import flash_attn_gpu", "import flash_attn.layers.rotary"])
def test_what_is_not_there_is_an_import_error(line):
    face.install()
    with pytest.raises(ImportError):
        exec(line, {})


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


def test_rows_are_put_where_the_indices_say():
    values = torch.randn(2, 3)
    put = bert_padding.index_put_first_axis(values, torch.tensor([3, 0]), 4)
    assert torch.equal(put[[3, 0]], values)
    assert not put[1:3].any()
