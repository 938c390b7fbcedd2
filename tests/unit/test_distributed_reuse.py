"""What a context parallel call works out once for all layers of a step: counted on one rank, without messages."""

import pickle
from collections import Counter

import pytest
import torch

import tilewise as tw
from tilewise.autograd import fast_path
from tilewise.distributed import arguments, balanced, blocks, call_plan, context_parallel, function
from tilewise.distributed.exchange import Transfer
from tilewise.distributed.layouts import named_layout
from tilewise.distributed.schedules import explain_schedule, run_steps
from tilewise.distributed.tensor_cache import TensorCache
from tilewise.masks import Span
from tilewise.support.caches import clear_caches

RANKS, LENGTH = 4, 64
CAUSAL = tw.causal("top_left")
SCATTERED = torch.arange(LENGTH) // 13 % 3  # documents that do not stand together


@pytest.fixture
def counted(monkeypatch):
    """Count what is planned and read; messages arrive as zeros."""
    counts = Counter()

    def count(module, name):
        made = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **named: counts.update([name]) or made(*given, **named))

    for module, name in ((call_plan, "ring_plan"), (call_plan, "cached_ring_plan"), (call_plan, "all_gather_plan"),
                         (call_plan, "summed_of"), (blocks, "documents_of"), (arguments, "packed_lengths")):
        count(module, name)
    monkeypatch.setattr(function, "start", lambda *_: Transfer((), (), {}))
    empty = function.empty_message
    monkeypatch.setattr(function, "empty_message", lambda *given: tuple([own.zero_() for own in empty(*given)]))
    clear_caches()
    return counts


def given_of(layout, **options):
    """Return the arguments of a call on rank 1."""
    rows = layout.shard_length(1)
    q, k, v = (torch.randn(1, heads, rows, 8, requires_grad=True) for heads in (4, 2, 2))
    given = context_parallel._OPTIONS | {"q": q, "k": k, "v": v, "layout": layout, "lengths": (LENGTH, LENGTH),
                                         "seed": None, "backend": "reference"} | options
    if "cu_seqlens_q" in options:
        packed = dict.fromkeys(("cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"))
        return packed | given | {name: given[name][0].transpose(0, 1) for name in "qkv"}
    return given


def layer(schedule, given):
    """Run both passes of one layer."""
    check = arguments.packed_arguments_of if "cu_seqlens_q" in given else arguments.arguments_of
    out, *_ = run_steps(schedule, check(given, 1, RANKS), None, 1)
    out.sum().backward()


def balanced_over(ids):
    return balanced(CAUSAL & tw.documents(ids), LENGTH, RANKS)


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
def test_layers_with_the_same_documents_plan_and_number_them_once(counted, schedule):
    mask, layout = CAUSAL & tw.documents(SCATTERED), balanced_over(SCATTERED)
    layer(schedule, given_of(layout, mask=mask))
    first = dict(counted)
    assert first["documents_of"] > 0
    assert first["summed_of"] == first[f"{schedule}_plan"] == 1
    for _ in range(2):
        layer(schedule, given_of(layout, mask=mask))
    assert dict(counted) == first


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
def test_layers_with_the_same_cu_seqlens_read_and_plan_once(counted, schedule):
    borders = torch.tensor([0, 13, 14, 40, 64])
    layout = balanced_over(torch.arange(LENGTH) // 13)
    for _ in range(3):
        layer(schedule, given_of(layout, mask=CAUSAL, cu_seqlens_q=borders))
    assert counted["packed_lengths"] == counted["summed_of"] == 1
    assert counted["cached_ring_plan"] + counted["all_gather_plan"] == 1


def test_lengths_that_were_changed_in_place_are_read_anew(counted):
    borders, layout = torch.tensor([0, 13, 14, 40, 64]), balanced_over(torch.arange(LENGTH) // 13)

    def sequences():
        return arguments.packed_arguments_of(given_of(layout, mask=CAUSAL, cu_seqlens_q=borders), 1, RANKS).sequences

    assert [own[1] for own in sequences()] == [13, 14, 40, 64]
    borders[2] = 20
    assert [own[1] for own in sequences()] == [13, 20, 40, 64]
    assert counted["packed_lengths"] == 2


def test_lengths_of_the_whole_sequences_go_to_the_device_once():
    """As ranks that exchange heads need them."""
    borders, layout = torch.tensor([0, 13, 14, 40, 64]), balanced_over(torch.arange(LENGTH) // 13)
    first, again = (arguments.packed_arguments_of(given_of(layout, mask=CAUSAL, cu_seqlens_q=borders), 1, RANKS)
                    .packed_lengths for _ in range(2))
    assert [first[name].tolist() for name in arguments.PACKED_NAMES[:2]] == [borders.tolist()] * 2
    assert all(first[name] is again[name] for name in arguments.PACKED_NAMES)
    assert [first[name] for name in arguments.PACKED_NAMES[2:]] == [None, None]


@pytest.mark.parametrize("used", [[13, 1, 26, 24], [13, 0, 20, 24]], ids=["all", "some"])
def test_lengths_in_use_go_on_where_they_are_given(used):
    """Whatever they are: the kernels of one kind of call are those of the next batch."""
    borders, layout = torch.tensor([0, 13, 14, 40, 64]), balanced_over(torch.arange(LENGTH) // 13)
    given = given_of(layout, mask=CAUSAL, cu_seqlens_q=borders, seqused_q=torch.tensor(used),
                     seqused_k=torch.tensor(used))
    lengths = arguments.packed_arguments_of(given, 1, RANKS).packed_lengths
    assert lengths["seqused_q"].tolist() == lengths["seqused_k"].tolist() == used


@pytest.mark.parametrize(("device", "deterministic", "packs"), [
    ("cpu", False, True), ("cpu", True, True), ("meta", False, True), ("meta", True, False)])
def test_documents_are_packed_for_one_call_of_all_but_where_the_hopper_kernels_take_a_mask_alone(device, deterministic,
                                                                                                packs):
    ids = torch.arange(LENGTH) // 13
    layout = balanced_over(ids)
    given = given_of(layout, mask=CAUSAL & tw.documents(ids), deterministic=deterministic)
    given |= {name: given[name].to(device) for name in "qkv"}
    packed = call_plan.with_packed_documents(arguments.arguments_of(given, 1, RANKS))
    assert (packed.sequences is not None, packed.documents is None) == (packs, packs)


def test_documents_that_were_changed_in_place_are_planned_anew(counted):
    mask, layout = CAUSAL & tw.documents(SCATTERED), balanced_over(SCATTERED)
    layer("ring", given_of(layout, mask=mask))
    before = counted["documents_of"]
    mask.documents.q.zero_()
    layer("ring", given_of(layout, mask=mask))
    assert counted["ring_plan"] == 2
    assert counted["documents_of"] > before


def test_another_mask_or_layout_is_planned_anew(counted):
    borders = torch.tensor([0, 13, 14, 40, 64])
    for mask, layout in ((CAUSAL, balanced_over(torch.arange(LENGTH) // 13)),
                         (CAUSAL & tw.window(3, 0), balanced_over(torch.arange(LENGTH) // 13)),
                         (CAUSAL, balanced_over(torch.arange(LENGTH) // 30))):
        layer("ring", given_of(layout, mask=mask, cu_seqlens_q=borders))
    assert counted["summed_of"] == 3
    assert counted["packed_lengths"] == 1


def test_an_entry_goes_with_its_tensor_and_the_oldest_goes_first():
    cache, made = TensorCache(2), []

    def get(tensor, key="key"):
        return cache.get((tensor, None), key, lambda: made.append(key) or len(made))

    first, second = torch.zeros(2), torch.zeros(2)
    assert [get(first), get(second), get(first), get(first, "other"), get(first), get(second)] == [1, 2, 1, 3, 1, 4]
    assert len(cache) == 2
    del second
    assert len(cache) == 1
    first.add_(1.0)
    assert get(first) == 5
    first.set_(torch.ones(2).untyped_storage())
    assert get(first) == 6
    cache.clear()
    assert len(cache) == 0


def test_nothing_is_kept_of_tensors_without_a_version_nor_of_what_is_made_in_inference_mode():
    cache, plain = TensorCache(2), torch.zeros(2)
    with torch.inference_mode():
        tensor = torch.zeros(2)
        assert [cache.get((plain,), "key", lambda number=number: number) for number in (1, 2)] == [1, 2]
    assert [cache.get((tensor,), "key", lambda number=number: number) for number in (1, 2)] == [1, 2]
    assert len(cache) == 0


def test_what_is_written_past_autograd_is_seen_on_the_host():
    """As broadcast writes what it receives: the version stays."""
    cache, tensor = TensorCache(2), torch.zeros(2)
    assert [cache.get((tensor,), "key", lambda number=number: number) for number in (1, 2)] == [1, 1]
    tensor.numpy()[0] = 3.0
    assert tensor._version == 0
    assert cache.get((tensor,), "key", lambda: 3) == 3


def test_numbers_of_a_mask_are_not_compared(counted, monkeypatch):
    """Nobody writes them; two comparisons of 16384 ids were an eighth of the host's time of a forward pass."""
    compared, equal = [], torch.equal
    layout, mask = named_layout("contiguous", LENGTH, RANKS), CAUSAL & tw.documents(torch.arange(LENGTH) // 16)
    layer("ring", given_of(layout, mask=mask))
    monkeypatch.setattr(torch, "equal", lambda *given: compared.append(1) or equal(*given))
    layer("ring", given_of(layout, mask=mask))
    assert compared == []
    cache, tensor = TensorCache(2), torch.zeros(2)
    assert [cache.get((tensor,), "key", lambda number=number: number, compares=False) for number in (1, 2)] == [1, 1]
    tensor.add_(1.0)
    assert cache.get((tensor,), "key", lambda: 3, compares=False) == 3


def test_documents_with_a_bias_beside_them_are_not_packed_as_they_are_without_one():
    """One mask, of which a plan of packed sequences is known; a bias is read at positions in front of all of it."""
    layout, ids = named_layout("contiguous", LENGTH, RANKS), torch.arange(LENGTH) // 16
    mask = CAUSAL & tw.documents(ids)
    for _ in range(2):
        for bias, packs in ((None, True), (torch.zeros(1, 4, layout.shard_length(1), LENGTH), False)):
            given = arguments.arguments_of(given_of(layout, mask=mask, bias=bias), 1, RANKS)
            assert call_plan.call_plan("ring", given, 1).packs_documents == packs


def test_a_message_that_the_next_step_sends_too_is_packed_once(counted, monkeypatch):
    packed, pack = [], function.pack
    monkeypatch.setattr(function, "pack", lambda tensors: packed.append(1) or pack(tensors))
    layout = named_layout("zigzag", LENGTH, RANKS)
    q, k, v = (torch.randn(1, heads, LENGTH // RANKS, 8) for heads in (4, 2, 2))
    given = given_of(layout, mask=CAUSAL) | {"q": q, "k": k, "v": v}
    run_steps("ring", arguments.arguments_of(given, 1, RANKS), None, 1)
    # Two later ranks see the first half of rank 1's keys, one before it sees them all.
    assert len(packed) == 2


def test_a_whole_shard_of_a_zigzag_is_one_part_of_a_message():
    layout = named_layout("zigzag", LENGTH, RANKS)
    checked = arguments.arguments_of(given_of(layout, mask=CAUSAL), 1, RANKS)
    first, *others = call_plan.call_plan("ring", checked, 1).steps
    assert all(len(step.parts) == 1 for step in (first, *others))
    assert [len(step.parts[0].rows) for step in others] == [8, 16, 16]


@pytest.mark.parametrize("is_watched", [False, True])
def test_local_backward_passes_go_past_the_dispatcher_unless_somebody_watches(counted, monkeypatch, is_watched):
    through = []
    operator = fast_path.backward_op
    monkeypatch.setattr(fast_path, "backward_op", lambda *given: through.append(1) or operator(*given))
    monkeypatch.setattr(fast_path, "_is_watched", lambda: is_watched)
    layer("ring", given_of(named_layout("zigzag", LENGTH, RANKS), mask=CAUSAL))
    assert len(through) == (RANKS if is_watched else 0)


def test_a_layout_is_counted_and_hashed_once(monkeypatch):
    layout = named_layout("zigzag", LENGTH, RANKS)
    again = pickle.loads(pickle.dumps(layout))
    asked = []
    monkeypatch.setattr(Span, "__len__", lambda own: asked.append(own) or own.stop - own.start)
    monkeypatch.setattr(Span, "__hash__", lambda own: asked.append(own) or own.start)
    assert (layout.length, layout.shard_length(1), hash(layout) == hash(again)) == (LENGTH, 16, True)
    assert asked == []
    assert layout == again


def test_each_stream_has_tensors_of_its_own_and_a_captured_graph_too(monkeypatch):
    """Another stream would read what the first one has not written yet, and a graph what was freed meanwhile."""
    mask, layout = CAUSAL & tw.documents(SCATTERED), balanced_over(SCATTERED)

    def plan():
        return call_plan.call_plan("ring", arguments.arguments_of(given_of(layout, mask=mask), 1, RANKS), 1)

    first = plan()
    assert plan() is first
    monkeypatch.setattr(call_plan, "stream_of", lambda device: 7)
    second = plan()
    assert second.tensors is not first.tensors
    monkeypatch.setattr(call_plan, "is_capturing", lambda device: True)
    captured, again = plan(), plan()
    assert captured.steps is again.steps is second.steps
    assert len({id(own.tensors) for own in (first, second, captured, again)}) == 4


def test_documents_that_stand_together_are_one_call_for_each_pair_of_ranks():
    ids = torch.arange(LENGTH) // 13
    layout = balanced_over(ids)

    def plan(ids=ids, mask=CAUSAL, batch=1, **options):
        given = given_of(layout, mask=mask & tw.documents(ids), **options)
        given |= {name: given[name].expand(batch, -1, -1, -1) for name in "qkv"}
        return call_plan.call_plan("ring", arguments.arguments_of(given, 1, RANKS), 1)

    packed = plan()
    assert packed.packs_documents
    assert max(len(step.blocks) for step in packed.steps) == 1
    others = [plan(ids % 2), plan(mask=tw.window(9, 0, alignment="top_left") & tw.sink_tokens(2)), plan(batch=2),
              plan(alibi_slopes=torch.ones(4)), plan(backend="torch"), plan(dropout_p=0.5, seed=torch.zeros(
                  1, dtype=torch.int64))]
    assert [one.packs_documents for one in others] == [False] * len(others)


def test_ranks_compare_what_decides_how_documents_are_sent():
    mask, layout = CAUSAL & tw.documents(torch.arange(LENGTH) // 13), balanced_over(SCATTERED)
    texts = [arguments.arguments_of(given_of(layout, mask=mask, backend=name), 1, RANKS).description("ring")
             for name in ("torch", "reference")]
    assert "operands documents on cpu for backend 'torch'" in texts[0]
    assert "operands documents on cpu for backend 'reference'" in texts[1]


def test_a_schedule_is_chosen_for_documents_by_the_keys_that_their_plan_receives():
    """It was chosen as for a causal mask of the whole sequence, of which no key was left out."""
    ids = torch.arange(LENGTH) // (LENGTH // RANKS)
    own = arguments.arguments_of(given_of(named_layout("contiguous", LENGTH, RANKS), mask=CAUSAL & tw.documents(ids)),
                                 1, RANKS)
    found = explain_schedule(own, None, (RANKS,)).estimates
    assert {name: one.bytes_received for name, one in found.items() if name != "ulysses"} == {
        "ring": 0, "all_gather": 0}
