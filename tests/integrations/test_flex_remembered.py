"""Which functions are traced anew, and that nothing of an earlier one is read."""

import functools
import gc
import math
import sys
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tilewise import attention
from tilewise.integrations import flex_remembered, flex_tracing
from tilewise.integrations.flex import traced_mask, traced_score
from tilewise.support.caches import clear_caches, is_registered

TABLE, OTHER, FACTOR = torch.arange(4.0), torch.ones(4), 2.0
GIVEN = torch.randn(3, 1, 4, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.fixture
def traces(monkeypatch):
    """Return a list to which each trace adds what it traced."""
    clear_caches()
    made, of_scores, of_masks = [], flex_tracing._score_function, flex_tracing.mask_formula
    monkeypatch.setattr(flex_tracing, "_score_function", lambda mod: made.append(mod) or of_scores(mod))
    monkeypatch.setattr("tilewise.integrations.flex_masks.mask_formula",
                        lambda mod, device: made.append(mod) or of_masks(mod, device))
    yield made
    clear_caches()


def adding(table, factor=2.0):
    return lambda score, b, h, q, k: score * factor + table[h]


def double(score):
    return score * FACTOR


def out_of(mod):
    return attention(*GIVEN, score_function=traced_score(mod), backend="reference")


def test_a_function_like_another_is_not_traced_and_its_own_tensors_are_read(traces):
    first, second = traced_score(adding(TABLE)), traced_score(adding(OTHER))
    assert len(traces) == 1
    assert (first.tensors[0] is TABLE, second.tensors[0] is OTHER) == (True, True)
    assert first.code is second.code
    again = traced_score(adding(TABLE))
    assert again.tensors[0] is TABLE
    assert len(traces) == 1


@pytest.mark.parametrize("other", [
    lambda: adding(TABLE, 3.0), lambda: adding(TABLE, 2), lambda: adding(TABLE, True), lambda: adding(TABLE[:3]),
    lambda: adding(TABLE.double())], ids=["number", "integer", "truth", "shape", "dtype"])
def test_what_may_be_traced_to_something_else_is_traced(traces, other):
    traced_score(adding(TABLE))
    traced_score(other())
    assert len(traces) == 2


def test_tensors_that_were_one_and_are_two_are_traced(traces):
    def by(one, two):
        return lambda score, b, h, q, k: score + one[h] * two[h]

    traced_score(by(TABLE, TABLE))
    assert len(traced_score(by(TABLE, OTHER)).tensors) == 2
    assert len(traces) == 2


def test_a_global_that_is_replaced_is_seen(traces, monkeypatch):
    def mod(score, b, h, q, k):
        return double(score) + TABLE[h]

    before = out_of(mod)
    assert torch.equal(out_of(mod), before)
    assert len(traces) == 1
    monkeypatch.setattr(sys.modules[__name__], "TABLE", OTHER)
    assert traced_score(mod).tensors[0] is OTHER
    assert len(traces) == 1
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)  # a function's own global
    assert not torch.equal(out_of(mod), before)
    assert len(traces) == 2


def test_functions_inside_of_functions_defaults_and_partials_are_looked_at(traces):
    def plus(amount, score, b, h, q, k, *, table=TABLE):
        return (lambda own: own * FACTOR + table[h] + math.pi)(score) + amount

    for _ in range(2):
        for amount in (1.0, 2.0):
            traced_score(functools.partial(plus, amount))
    assert len(traces) == 2
    assert traced_score(functools.partial(plus, 1.0, table=OTHER)).tensors[0] is OTHER
    assert len(traces) == 3, "a tensor more that it finds, be it read or not"


class Settings:
    """What a function reads attributes of."""

    factor = 2.0


@pytest.mark.parametrize("holder", [lambda held: Settings, lambda held: held], ids=["attribute", "item"])
def test_what_may_change_unseen_is_traced_in_each_call(traces, holder, monkeypatch):
    held = [2.0]
    known = holder(held)

    def mod(score, b, h, q, k):
        return score * (known[0] if known is held else known.factor)

    before = out_of(mod)
    held[0] = 5.0
    monkeypatch.setattr(Settings, "factor", 5.0)
    assert not torch.equal(out_of(mod), before)
    assert len(traces) == 2


def of_attribute():
    def mod(score, b, h, q, k):
        return score * mod.factor

    mod.factor = 2.0
    return mod, lambda: setattr(mod, "factor", 5.0)


def of_import():
    def mod(score, b, h, q, k):
        from integrations import test_flex_remembered as settings
        return score * settings.FACTOR

    return mod, None


def of_globals():
    return (lambda score, b, h, q, k: score * globals()["FACTOR"]), None


@pytest.mark.parametrize("make", [of_attribute, of_import, of_globals])
def test_what_no_closure_or_global_name_shows_is_read_in_each_call(traces, make, monkeypatch):
    mod, change = make()
    before = out_of(mod)
    if change is None:
        monkeypatch.setattr(sys.modules[mod.__module__], "FACTOR", 5.0)
        monkeypatch.setattr("integrations.test_flex_remembered.FACTOR", 5.0)
    else:
        change()
    assert not torch.equal(out_of(mod), before)


def test_a_function_that_says_it_is_torchs_is_looked_at(traces):
    """As one does that was made by functools.wraps of one of torch's."""
    factor = 2.0

    @functools.wraps(torch.nn.functional.softplus)
    def helper(score):
        return score * factor

    before = out_of(lambda score, b, h, q, k: helper(score))
    factor = 5.0
    assert not torch.equal(out_of(lambda score, b, h, q, k: helper(score)), before)


def test_a_number_that_a_tensor_has_as_an_attribute_is_read_in_each_call(traces):
    table = torch.arange(4.0)
    table.factor = 2.0

    def mod(score, b, h, q, k):
        return score * table.factor + table[h]

    before = out_of(mod)
    table.factor = 5.0
    assert not torch.equal(out_of(mod), before)


@pytest.mark.parametrize("ask", [lambda tensor: tensor.item(), lambda tensor: float(tensor), lambda tensor: tensor * 2,
                                 lambda tensor: 3.0 if tensor > 2 else 1.0], ids=["item", "float", "product", "truth"])
def test_what_a_tensor_holds_is_asked_in_each_call(traces, ask):
    factor = torch.tensor(2.0)

    def mod(score, b, h, q, k):
        return score * ask(factor)

    before = out_of(mod)
    factor.fill_(5.0)
    assert not torch.equal(out_of(mod), before)
    assert len(traces) == 2


def test_the_shape_of_a_tensor_may_be_asked(traces):
    def by(table):
        return lambda score, b, h, q, k: score * table.shape[0] + table.size(0) * len(table) + table[h]

    for table in (TABLE, OTHER):
        traced_score(by(table))
    assert len(traces) == 1
    assert not torch.equal(out_of(by(torch.ones(4))), out_of(by(torch.ones(5))))


def test_a_tensor_that_is_made_on_the_way_is_made_in_each_call(traces):
    def mod(score, b, h, q, k):
        return score + torch.ones(4)[h]

    assert traced_score(mod).tensors[0] is not traced_score(mod).tensors[0]
    assert len(traces) == 2


def test_a_function_that_calls_itself_or_finds_nothing_yet_is_traced(traces):
    def down(score, times):
        return score if times == 0 else down(score * FACTOR, times - 1)

    def mod(score, b, h, q, k):
        return down(score, 3) if TABLE is not None else later

    for _ in range(2):
        traced_score(mod)
    assert len(traces) == 2, "a cell without a value may get one"
    later = down
    for _ in range(2):
        traced_score(mod)
    assert len(traces) == 3


def test_a_method_of_an_object_is_traced_in_each_call(traces):
    class Model:
        factor = 2.0

        def mod(self, score, b, h, q, k):
            return score * self.factor

    model = Model()
    for model.factor in (2.0, 3.0):
        traced_score(model.mod)
    assert len(traces) == 2


def test_masks_are_remembered_too(traces):
    def masks_mod(ids):
        return lambda b, h, q, k: ids[q] == ids[k]

    def made(ids):
        return create_block_mask(masks_mod(ids), None, None, 9, 9, device="cpu")

    first, second = torch.arange(9) // 3, torch.arange(9) // 4
    masks = [traced_mask(made(ids)) for ids in (first, second)]
    assert len(traces) == 1
    for mask, ids in zip(masks, (first, second), strict=True):
        assert torch.equal(mask.visible(9, 9)[0, 0], ids[:, None] == ids)
    traced_mask(create_block_mask(masks_mod(first), None, None, 9, 9, device="cpu", BLOCK_SIZE=4))
    assert len(traces) == 2


def test_nothing_is_kept_alive(traces):
    table = torch.zeros(4)
    mod = adding(table)
    traced_score(mod)
    gone = weakref.ref(table), weakref.ref(mod)
    traces.clear()
    del table, mod
    gc.collect()
    assert [own() for own in gone] == [None, None]


def test_few_are_remembered(traces, monkeypatch):
    monkeypatch.setattr(flex_remembered, "MOST", 2)
    for factor in (1.0, 2.0, 3.0):
        traced_score(adding(TABLE, factor))
        assert len(flex_remembered._known) <= 2
    traced_score(adding(TABLE, 3.0))
    assert len(traces) == 3
    assert is_registered(flex_remembered._known)
