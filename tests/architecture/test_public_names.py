"""The public surface: small, documented, and with one list of names."""

import inspect
import re
import typing
from pathlib import Path

import pytest

import tilewise
from tilewise.integrations import (
    bert_padding,
    diffusers,
    flash_attn,
    flash_attn_cute,
    flash_attn_interface,
    flex,
    llmc,
    ring_flash_attn,
    rotary,
    sdpa_provider,
    torch_sdpa,
    transformers,
    transformers_context_parallel,
)

FACES = (flash_attn, bert_padding, flash_attn_interface, flash_attn_cute, torch_sdpa, sdpa_provider, flex, transformers,
         diffusers, llmc, rotary, ring_flash_attn, transformers_context_parallel)
DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_public_names_are_few_and_exist():
    assert len(tilewise.__all__) == len(set(tilewise.__all__)) <= 21
    assert [name for name in tilewise.__all__ if not hasattr(tilewise, name)] == []


def test_every_name_the_package_shows_is_listed():
    shown = {name for name, value in vars(tilewise).items()
             if not name.startswith("_") and not inspect.ismodule(value)}
    assert shown == set(tilewise.__all__)


def test_api_page_documents_exactly_the_public_names():
    page = (DOCS / "api.md").read_text("utf-8")
    documented = re.findall(r"^\.\. (?:auto(?:function|class|exception):: tilewise\.|data:: )(\w+)$", page,
                            re.MULTILINE)
    assert sorted(documented) == sorted(tilewise.__all__)


def test_api_page_names_every_kind_of_mask():
    page = (DOCS / "api.md").read_text("utf-8")
    kinds = re.search(r"^\.\. data:: AnyMask\n +:type: (.*)$", page, re.MULTILINE)[1]
    assert [kind.rpartition(".")[2] for kind in kinds.split(" | ")] == [
        kind.__name__ for kind in typing.get_args(tilewise.AnyMask)]


@pytest.mark.parametrize("name", tilewise.__all__)
def test_public_name_has_a_docstring(name):
    assert len(inspect.getdoc(getattr(tilewise, name)).split()) >= 5


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__.rpartition(".")[2])
def test_pages_document_exactly_the_names_of_a_face(face):
    pages = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    documented = re.findall(rf"auto(?:function|class):: {re.escape(face.__name__)}\.(\w+)$", pages, re.MULTILINE)
    assert sorted(documented) == sorted(face.__all__)


CALLS = (tilewise.attention, tilewise.attention_varlen, tilewise.attention_decode, flash_attn.flash_attn_func,
         flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache,
         torch_sdpa.scaled_dot_product_attention, torch_sdpa.varlen_attn, bert_padding.unpad_input,
         transformers.register, transformers_context_parallel.register, sdpa_provider.register, flex.flex_attention,
         flash_attn_interface.flash_attn_func,
         flash_attn_interface.flash_attn_varlen_func, flash_attn_interface.flash_attn_with_kvcache,
         flash_attn_cute.flash_attn_func,
         flash_attn_cute.flash_attn_varlen_func, diffusers.dispatch_attention_fn,
         llmc.packed_attention, rotary.apply_rotary_emb, rotary.apply_rotary_emb_qkv_, flash_attn.install,
         ring_flash_attn.ring_flash_attn_func, ring_flash_attn.ring_flash_attn_varlen_func,
         ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens, ring_flash_attn.llama3_flash_attn_varlen_func)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_arguments_of_a_call_are_all_described(call):
    arguments = re.split("Returns:|Raises:", call.__doc__.partition("Args:")[2])[0]
    described = re.findall(r"^ {8}(\w+(?:, \w+)*):", arguments, re.MULTILINE)
    assert {one for names in described for one in names.split(", ")} == set(inspect.signature(call).parameters)
