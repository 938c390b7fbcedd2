"""Providers of packed sequences."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.checking import Checker, Prepared
from tilewise.bench.grids import Cell
from tilewise.bench.options import make_tensors
from tilewise.bench.packed import DocumentsProvider, VarlenProvider, are_squares, sequence_numbers
from tilewise.bench.plan import blank_row
from tilewise.bench.provenance import provenance
from tilewise.bench.providers import TilewiseProvider
from tilewise.bench.shapes import FULL, packed_case, shape_case
from tilewise.masks import causal, chunk, window
from tilewise.testing.cases import Case, case_named

CPU = torch.device("cpu")
MASKS = [FULL, causal("top_left"), causal("bottom_right"), window(4, 2, "bottom_right")]


def packed(mask=FULL, dtype=torch.float32):
    return Cell("packed", packed_case((4, 2), (9, 1, 0, 21), 16, mask), dtype)


def of_case(name, dtype=torch.float32):
    return Cell("cases", case_named(name), dtype)


def test_rows_are_numbered_by_their_sequence():
    for dtype in (torch.int32, torch.int64):
        numbers = sequence_numbers(torch.tensor([0, 2, 2, 5], dtype=dtype))
        assert (numbers.tolist(), numbers.dtype) == ([0, 0, 2, 2, 2], dtype)


def test_sequences_are_squares_where_queries_and_keys_have_one_length():
    assert are_squares(packed().case)
    assert are_squares(shape_case(2, (1, 1), (5, 5), (8, 8), FULL))
    assert not are_squares(case_named("packed"))
    assert not are_squares(Case("padded", b=2, lengths_k=(64, 63)))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("provider", [TilewiseProvider("reference"), DocumentsProvider("reference")],
                         ids=lambda provider: provider.name)
def test_ours_is_right_on_packed_sequences_in_both_ways(provider, mask, direction):
    cell = packed(mask)
    row = blank_row(cell, provider.name, direction, "test", provenance(CPU, ""))
    row = Checker(cell, make_tensors(cell, CPU), CPU).checked(row, provider, direction)
    assert (row.status, row.reason, row.checked) == ("ok", "", "full")
    assert row.options == "packed sequences of 31 tokens"


@pytest.mark.parametrize("provider", [TilewiseProvider("reference"), DocumentsProvider("reference")],
                         ids=lambda provider: provider.name)
def test_ours_is_right_where_queries_and_keys_are_packed_unlike(provider):
    cell = of_case("packed", torch.float32)
    row = blank_row(cell, provider.name, "backward", "test", provenance(CPU, ""))
    assert Checker(cell, make_tensors(cell, CPU), CPU).checked(row, provider, "backward").status == "ok"


def test_ours_takes_rows_of_all_sequences_as_they_lie():
    cell = packed()
    tensors = make_tensors(cell, CPU)
    for provider, shape in ((TilewiseProvider("reference"), (31, 4, 16)),
                            (DocumentsProvider("reference"), (1, 4, 31, 16))):
        entry = Prepared(provider, cell, tensors, CPU)
        assert entry.forward().shape == shape
        assert entry.dout.data_ptr() == tensors.inputs.dout.data_ptr()
        assert entry.results("forward")["out"].shape == (1, 4, 31, 16)
        assert [tensor.shape for tensor in entry.results("backward").values()] == [
            (1, 4, 31, 16), (1, 2, 31, 16), (1, 2, 31, 16)]


@pytest.mark.parametrize(("name", "reason"), [
    ("packed", None), ("packed_causal_top_left", None), ("mha", "takes packed sequences alone"),
    ("packed_nothing", None), ("packed_zero_lengths", "takes packed sequences without gaps between them"),
    ("packed_bias", "takes no bias"), ("padded", "takes no padded sequences"), ("documents", "takes no documents")])
def test_documents_of_one_entry_stand_for_packed_sequences_alone(name, reason):
    assert DocumentsProvider("reference").reason_against(of_case(name), "forward", CPU) == reason


def test_documents_of_one_entry_know_no_alignment_of_each_sequence():
    unlike = replace(case_named("packed"), mask=causal("bottom_right"))
    assert DocumentsProvider("reference").reason_against(Cell("cases", unlike, torch.float32), "forward", CPU) == (
        "takes masks of sequences with as many queries as keys, got causal(alignment='bottom_right')")


@pytest.mark.parametrize("provider", [DocumentsProvider("reference"), VarlenProvider()],
                         ids=lambda provider: provider.name)
def test_positions_count_from_the_sequence_in_bands_alone(provider):
    cell = Cell("packed", packed_case((4, 2), (9, 21), 16, causal("top_left") & chunk(4)), torch.bfloat16)
    assert provider.reason_against(cell, "forward", CPU) == (
        "takes causal masks and windows, got causal(alignment='top_left') & chunk(4)")


def test_documents_of_one_entry_run_where_their_backend_does():
    assert DocumentsProvider("triton").name == "tilewise:triton:documents"
    assert DocumentsProvider("triton").missing(CPU) == TilewiseProvider("triton").missing(CPU) is not None


@pytest.mark.parametrize(("name", "dtype", "reason"), [
    ("packed", torch.bfloat16, None), ("packed_causal_top_left", torch.float16, None),
    ("packed", torch.float32, "computes in float16 and bfloat16, got torch.float32"),
    ("gqa", torch.bfloat16, "takes packed sequences alone"),
    ("packed_causal_bottom_right_gaps", torch.bfloat16, "takes packed sequences without gaps between them"),
    ("packed_softcap_alibi_of_sequences", torch.bfloat16, "takes no ALiBi slopes, no softcap")])
def test_torch_takes_packed_sequences_alone(name, dtype, reason):
    assert VarlenProvider().reason_against(of_case(name, dtype), "backward", CPU) == reason


def test_torch_packs_on_gpus_alone():
    assert VarlenProvider().missing(CPU) == "torch has this kernel for GPUs only"
    assert VarlenProvider().missing(torch.device("cuda")) is None


@pytest.mark.parametrize("knows_groups", [True, False])
@pytest.mark.parametrize(("mask", "sides"), list(zip(MASKS, [(-1, -1), (-1, 0), (-1, 0), (4, 2)], strict=True)),
                         ids=str)
def test_torch_gets_borders_longest_lengths_and_sides(mask, sides, knows_groups, monkeypatch):
    given = {}

    def old(q, k, v, *lengths, scale, window_size):
        given.update(lengths=lengths, scale=scale, sides=window_size, shapes=[q.shape, k.shape, v.shape])
        return q

    def new(q, k, v, *lengths, scale, window_size, enable_gqa=False):
        given["grouped"] = enable_gqa
        return old(q, k, v, *lengths, scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", new if knows_groups else old)
    cell = packed(mask, torch.bfloat16)
    Prepared(VarlenProvider(), cell, make_tensors(cell, CPU), CPU).forward()
    assert given["shapes"] == [(31, 4, 16), (31, 2, 16), (31, 2, 16)]
    assert [tensor.tolist() for tensor in given["lengths"][:2]] == [[0, 9, 10, 10, 31]] * 2
    assert {tensor.dtype for tensor in given["lengths"][:2]} == {torch.int32}
    assert (given["lengths"][2:], given["scale"], given["sides"]) == ((21, 21), None, sides)
    assert given.get("grouped") == (True if knows_groups else None)


def test_torch_is_told_of_groups_where_there_are_any(monkeypatch):
    given = []

    def function(q, k, v, *lengths, enable_gqa=False, **options):
        given.append(enable_gqa)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    for heads in ((4, 4), (4, 2)):
        cell = Cell("packed", packed_case(heads, (9, 21), 16, FULL), torch.bfloat16)
        Prepared(VarlenProvider(), cell, make_tensors(cell, CPU), CPU).forward()
    assert given == [False, True]


def test_torch_gets_borders_of_32_bits_whatever_they_were(monkeypatch):
    given = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn",
                        lambda q, k, v, *lengths, scale, window_size: given.append(lengths))
    cell = of_case("packed", torch.bfloat16)
    tensors = make_tensors(cell, CPU)
    assert tensors.operands.cu_seqlens_k.dtype is torch.int64
    Prepared(VarlenProvider(), cell, tensors, CPU).forward()
    ((queries, keys, *longest),) = given
    assert (queries.tolist(), keys.tolist(), longest) == ([0, 49, 66, 96], [0, 13, 79, 119], [49, 66])
    assert queries.dtype is keys.dtype is torch.int32


def test_torch_still_calls_its_arguments_so():
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    assert {"scale", "window_size"} <= set(signature(varlen_attn).parameters)
