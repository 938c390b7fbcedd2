"""Lengths, tables and indices that lead elsewhere: what a CPU call refuses, and what a GPU call says one call late."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tilewise import InvalidInput, attention_decode, attention_varlen, causal, explain
from tilewise.problem import length_checks

GPU = {"device": "cuda"}
LATE = "An earlier call of {} was wrong (TILEWISE_CHECK=1): "
_LENGTHS_SAID = (" Its entries add up to the 9 rows of {}, as lengths do: pass "
                 "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) instead.")
_BORDERS = {"cu_seqlens_q": [0, 3, 3, 9]}
# name: arguments of a call with 9 rows of q, k and v, lists standing for tensors, and what it is told.
PACKED = {
    "lengths": ({"cu_seqlens_q": [3, 0, 6]},
                "cu_seqlens_q begins with 3; allowed is 0, followed by the end of each sequence."
                + _LENGTHS_SAID.format("q")),
    "lengths_that_begin_with_0": (
        {"cu_seqlens_q": [0, 5, 4]},
        "cu_seqlens_q has 5 at [1] and 4 at [2]: sequence 1 would end before it begins; allowed is 5 or more."
        + _LENGTHS_SAID.format("q")),
    "lengths_of_keys": ({**_BORDERS, "cu_seqlens_k": [2, 2, 4, 1]},
                        "cu_seqlens_k begins with 2; allowed is 0, followed by the end of each sequence."
                        + _LENGTHS_SAID.format("k")),
    "no_leading_0": ({"cu_seqlens_q": [3, 3, 9]},
                     "cu_seqlens_q begins with 3; allowed is 0, followed by the end of each sequence."),
    "descending": ({"cu_seqlens_q": [0, 3, 2, 9]},
                   "cu_seqlens_q has 3 at [1] and 2 at [2]: sequence 1 would end before it begins; allowed is 3 or "
                   "more."),
    "past_the_last_query": ({"cu_seqlens_q": [0, 3, 10], "cu_seqlens_k": [0, 3, 9]},
                            "cu_seqlens_q ends sequence 1 at 10 and q has 9 rows; allowed are ends up to 9."),
    "past_the_last_key": ({**_BORDERS, "cu_seqlens_k": [0, 3, 8, 12]},
                          "cu_seqlens_k ends sequence 2 at 12 and k has 9 rows; allowed are ends up to 9."),
    "more_queries_in_use": ({**_BORDERS, "seqused_q": [3, 1, 6]},
                            "seqused_q is 1 at [1] and cu_seqlens_q gives sequence 1 a length of 0; allowed are 0 to "
                            "0."),
    "more_keys_in_use": ({**_BORDERS, "cu_seqlens_k": [0, 2, 4, 9], "seqused_k": [2, 2, 7]},
                         "seqused_k is 7 at [2] and cu_seqlens_k gives sequence 2 a length of 5; allowed are 0 to 5."),
    "longest_query": ({**_BORDERS, "max_seqlen_q": 5},
                      "max_seqlen_q is 5 and sequence 2 has a length of 6; allowed is the longest one's or more."),
    "longest_key": ({**_BORDERS, "max_seqlen_k": [5]},
                    "max_seqlen_k is 5 and sequence 2 has a length of 6; allowed is the longest one's or more."),
}


def packed_call(arguments, *, rows_k=9, device="cpu", call=attention_varlen):
    q, k = (torch.randn(rows, 2, 8, device=device) for rows in (9, rows_k))
    given = {name: torch.tensor(value, device=device) if isinstance(value, list) else value
             for name, value in arguments.items()}
    return call(q, k, k, **given)


def cached_call(*, lengths=(3, 8), new=0, capacity=8, device="cpu", **arguments):
    q, cache = torch.randn(2, 2, 1, 8, device=device), torch.randn(2, 2, capacity, 8, device=device)
    keys = {"k": torch.randn(2, 2, new, 8, device=device), "v": torch.randn(2, 2, new, 8, device=device)} if new else {}
    lengths = lengths if isinstance(lengths, int) else torch.tensor(lengths, device=device)
    moved = {name: torch.tensor(value, device=device) for name, value in arguments.items()}
    return attention_decode(q, cache, cache.clone(), cache_seqlens=lengths, **keys, **moved)


# name: arguments of a call with two sequences in caches of 8 positions, or pages, and what it is told.
CACHED = {
    "above_the_capacity": ({"lengths": (3, 9)},
                           "cache_seqlens has 9 at [1]; allowed are numbers up to 8, the positions that the cache has "
                           "for a sequence."),
    "above_the_table": ({"lengths": (3, 17), "block_table": [[0, 1], [1, 0]]},
                        "cache_seqlens has 17 at [1]; allowed are numbers up to 16, the positions that the block_table "
                        "covers."),
    "a_row": ({"cache_batch_idx": [0, 2]}, "cache_batch_idx has 2 at [1]; allowed are 0 to 1, for k_cache has 2 rows."),
    "a_page": ({"block_table": [[0, 7], [1, -1]], "lengths": (3, 9)},
               "block_table has -1 at [1, 1]; allowed are 0 to 1, for k_cache has 2 pages."),
}
NO_ROOM = ({"lengths": (3, 7), "new": 2},
           "cache_seqlens has 7 at [1] and k has 2 positions to append: there is no room for them in the 8 that the "
           "cache has for a sequence; allowed with TILEWISE_CHECK=1 are numbers up to 6.")
LEFT_OUT = ("k has 12 rows and its sequences end at 9, as those of q do, since cu_seqlens_k is left out; allowed with "
            "TILEWISE_CHECK=1 are 9 rows, or as many as q has.")


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    length_checks._pending.clear()
    yield
    length_checks._pending.clear()


@pytest.fixture
def as_on_a_gpu(monkeypatch, switched_on):
    """Let CPU tensors be looked at as those of a GPU are; a copy arrives when the list says so."""
    arrived = [True]
    monkeypatch.setattr(length_checks, "_is_on_host", lambda _: False)
    monkeypatch.setattr(length_checks, "_copied_to_host", lambda found: (found.clone(), lambda: arrived[0]))
    return arrived


def told(function, *arguments, **more):
    with pytest.raises(InvalidInput) as caught:
        function(*arguments, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", PACKED)
def test_wrong_lengths_of_packed_sequences_raise_on_a_cpu(name):
    arguments, message = PACKED[name]
    assert told(packed_call, arguments) == message
    assert told(packed_call, arguments, call=explain) == message


def test_fewer_keys_than_the_borders_that_they_share_raise_on_a_cpu():
    assert told(packed_call, _BORDERS, rows_k=8) == (
        "cu_seqlens_q ends sequence 2 at 9 and k has 8 rows: keys have the borders of queries, since cu_seqlens_k is "
        "left out; allowed are ends up to 8.")


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_wrong_places_in_a_cache_raise_on_a_cpu(name, backend, monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", backend)
    arguments, message = CACHED[name]
    assert told(cached_call, **arguments) == message


@pytest.mark.parametrize(("arguments", "message"), [
    ({"lengths": 9}, "cache_seqlens is 9; allowed are 0 to 8, the positions that the cache has for a sequence."),
    ({"lengths": 17, "block_table": [[0, 1], [1, 0]]},
     "cache_seqlens is 17; allowed are 0 to 16, the positions that the block_table covers.")])
def test_a_length_that_is_a_number_raises_on_every_device(arguments, message, device):
    assert told(cached_call, **arguments, device=device) == message


def test_a_cache_without_room_for_new_keys_raises_where_the_variable_asks_for_it(switched_on):
    assert told(cached_call, **NO_ROOM[0]) == NO_ROOM[1]
    cached_call(lengths=(-3, 6), new=2)


def test_keys_behind_shared_borders_raise_where_the_variable_asks_for_it(switched_on):
    assert told(packed_call, _BORDERS, rows_k=12) == LEFT_OUT


@pytest.mark.parametrize("arguments", [
    {"cu_seqlens_q": [0, 3, 7]}, {"cu_seqlens_q": [0]}, {"cu_seqlens_q": [0, 0, 0]},
    {**_BORDERS, "seqused_q": [-1, 0, 6], "max_seqlen_q": 6}, {**_BORDERS, "seqused_k": [3, 0, 4], "max_seqlen_k": 4}],
    ids=["padding_behind", "no_sequence", "empty_ones", "below_0_in_use", "longest_in_use"])
@pytest.mark.parametrize("switch", ["0", "1"])
def test_what_the_docstring_allows_is_taken(arguments, switch, monkeypatch):
    monkeypatch.setenv("TILEWISE_CHECK", switch)
    packed_call(arguments)


def test_without_the_variable_keys_may_be_left_out():
    packed_call(_BORDERS, rows_k=12)
    cached_call(**NO_ROOM[0])
    cached_call(lengths=(-1, 8), new=1)


@pytest.mark.parametrize("name", PACKED)
def test_wrong_lengths_of_packed_sequences_raise_one_call_late_on_a_gpu(name, as_on_a_gpu):
    arguments, message = PACKED[name]
    packed_call(arguments)
    assert told(packed_call, _BORDERS) == LATE.format("attention_varlen") + message
    packed_call(_BORDERS)


@pytest.mark.parametrize("name", [*CACHED, "no_room"])
def test_wrong_places_in_a_cache_raise_one_call_late_on_a_gpu(name, as_on_a_gpu):
    arguments, message = {**CACHED, "no_room": NO_ROOM}[name]
    try:
        cached_call(**arguments)
    except IndexError:  # of torch, which looks on a CPU
        assert name == "a_row"
    assert told(packed_call, _BORDERS) == LATE.format("attention_decode") + message
    cached_call()


def test_findings_that_have_not_arrived_are_waited_for_by_nobody(as_on_a_gpu):
    as_on_a_gpu[0] = False
    packed_call({"cu_seqlens_q": [3, 6]})
    packed_call(_BORDERS)
    as_on_a_gpu[0] = True
    assert told(packed_call, _BORDERS).startswith(LATE.format("attention_varlen") + "cu_seqlens_q begins with 3")


def test_nothing_is_asked_of_a_gpu_without_the_variable(monkeypatch):
    """A CPU tensor that says that it is on a GPU stands in for one: its values must stay unread."""
    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(length_checks, "_Tensor", OnGpu)
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    assert not length_checks._may_look(torch.tensor([3, 6]).as_subclass(OnGpu))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    assert length_checks._may_look(torch.tensor([3, 6]).as_subclass(OnGpu))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not length_checks._may_look(torch.tensor([3, 6]).as_subclass(OnGpu))


def test_nothing_is_looked_at_that_has_no_values(switched_on):
    with FakeTensorMode():
        packed_call({"cu_seqlens_q": [3, 6]})
    packed_call({"cu_seqlens_q": torch.empty(3, dtype=torch.int32, device="meta"), "backend": "reference"},
                device="meta")
    assert not length_checks._pending


def test_nothing_is_looked_at_inside_a_transform(monkeypatch):
    seen = []
    torch.func.vmap(lambda borders: seen.append(length_checks._may_look(borders)) or borders)(torch.zeros(2, 3))
    assert seen == [False]


# torch.compile instantiates autograd.Function inside, and warns of that; see torch/_dynamo/side_effects.py.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_compiled_call_stays_one_graph_and_looks_when_it_runs(needs_gradient):
    """It looked at nothing, and wrong borders gave results that mean nothing."""
    torch._dynamo.reset()
    q = torch.randn(9, 2, 8, requires_grad=needs_gradient)
    compiled = torch.compile(lambda q, borders: attention_varlen(q, q, q, cu_seqlens_q=borders, mask=causal()),
                             backend="aot_eager", fullgraph=True)
    assert compiled(q, torch.tensor([0, 4, 9])).shape == q.shape
    with pytest.raises(InvalidInput, match="cu_seqlens_q begins with 3; allowed is 0"):
        compiled(q, torch.tensor([3, 6, 9]))
    torch._dynamo.reset()


def test_a_call_that_is_differentiated_twice_looks_in_a_map_too():
    q, options = torch.randn(2, 9, 2, 8), {"double_backward": True}
    for call in (torch.func.vmap, torch.func.grad):
        for end in (9, 10):
            mapped = call(lambda q, end=end: attention_varlen(q, q, q, cu_seqlens_q=torch.tensor([0, end]),
                                                              **options).sum())
            given = q if call is torch.func.vmap else q[0]
            if end == 9:
                assert mapped(given).isfinite().all()
                continue
            with pytest.raises(InvalidInput, match="cu_seqlens_q ends sequence 0 at 10 and q has 9 rows"):
                mapped(given)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_gpu_is_not_waited_for_and_the_next_call_raises(switched_on):
    packed_call(_BORDERS, **GPU)  # whatever a first call has to do
    q, borders = torch.randn(9, 2, 8, **GPU), torch.tensor([3, 0, 6], **GPU)
    right = torch.tensor(_BORDERS["cu_seqlens_q"], **GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        length_checks.packed_lengths(q, q, (borders, None, None, None), (6, None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert told(attention_varlen, q, q, q, cu_seqlens_q=right) == (
        LATE.format("attention_varlen") + PACKED["lengths"][1])
    cached_call(lengths=(3, 9), **GPU)
    torch.cuda.synchronize()
    assert told(cached_call, **GPU) == LATE.format("attention_decode") + CACHED["above_the_capacity"][1]
