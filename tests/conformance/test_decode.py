"""Decoding, by the reference and by the kernels: every way that a cache may lie, every option, and appending."""

import pytest
import torch

from conformance.cached import expected
from tilewise import InvalidInput, UnsupportedProblem, attention, attention_decode, causal, use_backend, window
from tilewise.testing.inputs import lay_out

BACKENDS = ("triton", "reference")
LENGTHS = (9, 0, 41)
# name: sizes that differ from the usual, and arguments
CALLS = {
    "lengths": ({}, {}),
    "full": ({"lengths": None}, {}),
    "causal": ({"sq": 3}, {"right": 0}),
    "window": ({"sq": 4}, {"left": 5, "right": 1}),
    "window_of_one_query": ({}, {"left": 7}),
    "pages_of_16": ({"page": 16}, {}),
    "pages_of_7": ({"page": 7, "sq": 2}, {"right": 0}),
    "pages_of_64": ({"page": 64}, {"left": 20, "right": 0}),
    "rows_by_index": ({"indexed": True}, {}),
    "left_padding": ({"leftpad": (3, 0, 40), "sq": 2}, {"right": 0}),
    "softcap": ({}, {"softcap": 2.0}),
    "slopes": ({"slopes": True, "sq": 2}, {"right": 0}),
    "sinks": ({"sinks": True}, {}),
    "scale": ({}, {"scale": 0.3}),
    "head_dims": ({"d": 24, "dv": 40}, {}),
    "one_key_head": ({"hq": 6, "hk": 1}, {}),
    "append": ({"new": 3, "sq": 3}, {"right": 0}),
    "append_past_the_end": ({"new": 8, "sq": 1, "capacity": 45}, {}),
    "append_to_pages": ({"new": 2, "page": 4}, {}),
    "append_by_index": ({"new": 2, "indexed": True}, {}),
    "rotary": ({"new": 2, "sq": 2, "rotary": 8}, {"right": 0}),
    "rotary_of_halves": ({"new": 2, "sq": 2, "rotary": 16}, {"left": 30, "rotary_interleaved": False}),
    "rotary_without_a_mask": ({"new": 1, "sq": 2, "rotary": 6}, {}),
    "everything": ({"new": 2, "sq": 3, "page": 8, "rotary": 12, "slopes": True, "sinks": True, "leftpad": (1, 0, 20)},
                   {"left": 25, "right": 0, "softcap": 3.0, "scale": 0.4}),
}


@pytest.fixture(params=BACKENDS)
def decoder(request):
    """Each backend that decodes, as the default of the calls inside."""
    with use_backend(request.param):
        yield request.param


def made(sizes, dtype, device, seed=0):
    """q, the caches and the tensors of a call; caches and rows hold NaN wherever nobody may look."""
    own = {"hq": 4, "hk": 2, "sq": 1, "d": 16, "dv": 16, "capacity": 64, "lengths": LENGTHS} | sizes
    generator = torch.Generator().manual_seed(seed)
    b, hk, capacity, lengths = 3, own["hk"], own["capacity"], own["lengths"]

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    call = {}
    page, rows = own.get("page"), 5 if own.get("indexed") else b
    if page:
        count = -(-capacity // page)
        call["block_table"] = torch.randperm(b * count + 2, generator=generator)[:b * count].view(b, count).int()
        rows, capacity = b * count + 2, page
    k_cache, v_cache = (random(rows, capacity, hk, own[name]).transpose(1, 2) for name in ("d", "dv"))
    if own.get("indexed"):
        call["cache_batch_idx"] = torch.tensor([4, 1, 0])
    if lengths is not None:
        call["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    if "leftpad" in own:
        call["cache_leftpad"] = torch.tensor(own["leftpad"], dtype=torch.int32)
    if own.get("new"):
        call["k"], call["v"] = (random(b, own["new"], hk, own[name]).transpose(1, 2) for name in ("d", "dv"))
    if own.get("rotary"):
        angles = torch.rand(80, own["rotary"] // 2, generator=generator) * 6
        call["rotary_cos"], call["rotary_sin"] = angles.cos().to(dtype), angles.sin().to(dtype)
    if own.get("slopes"):
        call["alibi_slopes"] = torch.rand(b, own["hq"], generator=generator)
    if own.get("sinks"):
        call["sinks"] = torch.randn(own["hq"], generator=generator)
    q = random(b, own["sq"], own["hq"], own["d"]).transpose(1, 2)
    moved = {name: tensor.to(device) for name, tensor in call.items()}
    return q.to(device), k_cache.to(device), v_cache.to(device), moved, own


def in_float64(tensors):
    return [tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu() for tensor in tensors]


def hide(k_cache, v_cache, call, own):
    """Put NaN where no key is, which must not matter: behind the longest sequence, without pages or indices."""
    if own["lengths"] is not None and "block_table" not in call and "cache_batch_idx" not in call:
        for n, length in enumerate(own["lengths"]):
            stop = length + own.get("new", 0)
            k_cache[n, :, stop:], v_cache[n, :, stop:] = torch.nan, torch.nan


WAYS = [("triton", None, torch.float32), ("triton", 1, torch.float16), ("triton", 3, torch.float16),
        ("reference", None, torch.float32)]


@pytest.mark.parametrize(("backend", "splits", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_out_lse_and_caches_are_those_of_the_formula(name, backend, splits, dtype, device):
    sizes, options = CALLS[name]
    q, k_cache, v_cache, call, own = made(sizes, dtype, device)
    hide(k_cache, v_cache, call, own)
    wide = [t.clone() for t in in_float64((q, k_cache, v_cache))]
    more = dict(zip(call, in_float64(call.values()), strict=True)) | options
    wanted, wanted_lse = expected(*wide, **more, hk=own["hk"], dv=own["dv"])
    options = dict(options)
    mask = window(options.pop("left", None), options.pop("right", None))
    out, lse = attention_decode(q, k_cache, v_cache, **call, **options, mask=mask, num_splits=splits,
                                return_aux=("lse",), backend=backend)
    tolerance = 3e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=tolerance, atol=tolerance)
    for cache, right in zip((k_cache, v_cache), wide[1:], strict=True):
        torch.testing.assert_close(cache.cpu().double(), right, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("length", "mask"), [(9, causal()), (10, causal()), (10, None)], ids=str)
def test_angles_behind_the_table_are_not_read(length, mask, decoder, device):
    """A query may stand behind the cache's last position: then it is turned as one that stands there."""
    whole = torch.full((2, 20, 4), torch.nan, device=device)
    whole[:, :10] = torch.rand(2, 10, 4)
    q, k_cache, v_cache = (torch.randn(1, 1, rows, 16, device=device) for rows in (2, 10, 10))
    call = {name: torch.randn(1, 1, 1, 16, device=device) for name in ("k", "v")}
    out = attention_decode(q, k_cache, v_cache, **call, mask=mask, rotary_cos=whole[0, :10], rotary_sin=whole[1, :10],
                           cache_seqlens=torch.tensor([length], device=device))
    assert out.isfinite().all()


def test_a_length_below_zero_counts_as_zero(decoder, device):
    made = [torch.randn(2, 2, rows, 16, device=device) for rows in (1, 12, 12, 1, 1)]
    results = []
    for lengths in ([-1, 4], [0, 4]):
        q, k_cache, v_cache, k, v = (tensor.clone() for tensor in made)
        out = attention_decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=torch.tensor(lengths, device=device))
        results.append((out, k_cache, v_cache))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_gives_queries_and_new_keys_the_dtype_of_the_caches(dtype, decoder, device):
    """Models hand what autocast has made of a projection; the caches are written in place and stay what they are."""
    q, k_cache, v_cache, call, _ = made({"new": 2, "sinks": True}, torch.float32, device)
    own, others = ([cache.to(dtype, copy=True) for cache in (k_cache, v_cache)] for _ in range(2))
    with torch.autocast(device.type, torch.bfloat16):
        found = attention_decode(q.bfloat16(), *own, **call, return_aux=("lse",))
    call |= {name: call[name].to(dtype) for name in ("k", "v")}
    wanted = attention_decode(q.bfloat16().to(dtype), *others, **call, return_aux=("lse",))
    assert (found.out.dtype, found.lse.dtype) == (dtype, torch.float32)
    for got, right in zip((*found, *own), (*wanted, *others), strict=True):
        assert torch.equal(got, right)


def test_autocast_leaves_float64_alone(device):
    q, k_cache, v_cache, call, _ = made({}, torch.float64, device)
    with torch.autocast(device.type, torch.bfloat16):
        assert attention_decode(q, k_cache, v_cache, **call).dtype is torch.float64
        for wrong in ((q.float(), k_cache, v_cache), (q, k_cache.float(), v_cache.float())):
            with pytest.raises(InvalidInput, match=r"k_cache has dtype .* and q has .*: cast them to one dtype"):
                attention_decode(*wrong, **call)


# name: entries of the third sequence's table, pages of 8, and what the call has; None = it is computed.
_FREE = 99  # what a table may hold for a page that nobody reads
TABLES = {
    "past_the_end": ([4, 5, _FREE, -1], {}, None),
    "before_the_window": ([_FREE, 5, 0, 0], {"mask": window(1, 0)}, None),
    "before_the_keys": ([-1, 5, 0, 0], {"cache_leftpad": torch.tensor([0, 0, 8])}, None),
    "read": ([4, 6, 0, 0], {}, "block_table has 6 at [2, 1]; allowed are 0 to 5, for k_cache has 6 pages."),
    "below_0": ([-1, 5, 0, 0], {}, "block_table has -1 at [2, 0]; allowed are 0 to 5, for k_cache has 6 pages."),
    "in_the_window": ([4, _FREE, 0, 0], {"mask": window(1, 0)},
                      "block_table has 99 at [2, 1]; allowed are 0 to 5, for k_cache has 6 pages."),
    "written": ([4, 5, -1, 0], {"new": 4},
                "block_table has -1 at [2, 2]; allowed are 0 to 5, for k_cache has 6 pages."),
}


@pytest.mark.parametrize("name", TABLES)
def test_on_a_cpu_a_page_that_the_caches_have_not_is_refused_where_it_is_used(name):
    """The reference read another page for it, or torch raised an index error, or -1 was the last page."""
    pages, options, message = TABLES[name]
    options = dict(options)
    if count := options.pop("new", 0):
        options["k"] = options["v"] = torch.randn(3, 2, count, 16)
    q, caches = torch.randn(3, 4, 1, 16), [torch.randn(6, 2, 8, 16) for _ in range(2)]
    lengths, table = torch.tensor([3, 0, 14]), torch.tensor([[0, _FREE, -1, -1], [3, -1, -1, -1], pages])

    def call(table):
        own = [cache.clone() for cache in caches]
        return attention_decode(q, *own, block_table=table, cache_seqlens=lengths, backend="reference", **options), *own
    if message is None:
        for got, wanted in zip(call(table), call(table.where((table >= 0) & (table < 6), 0)), strict=True):
            assert torch.equal(got, wanted)
        return
    with pytest.raises(InvalidInput) as caught:
        call(table)
    assert str(caught.value) == message


@pytest.mark.parametrize("row", [-1, 5])
def test_on_a_cpu_a_row_that_the_caches_have_not_is_refused(row):
    q, cache = torch.randn(2, 4, 1, 16), torch.randn(5, 2, 8, 16)
    with pytest.raises(InvalidInput) as caught:
        attention_decode(q, cache, cache, cache_batch_idx=torch.tensor([0, row]), backend="reference")
    assert str(caught.value) == f"cache_batch_idx has {row} at [1]; allowed are 0 to 4, for k_cache has 5 rows."


def test_a_graph_that_saved_the_cache_notices_what_is_appended(decoder, device):
    cache, values, new = (torch.randn(1, 1, rows, 16, device=device) for rows in (8, 8, 1))
    weight = torch.ones_like(cache).requires_grad_()
    product = (weight * cache).sum()
    attention_decode(new, cache, values, k=new, v=new, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_nothing_seen_gives_zero_and_minus_infinity_or_the_sink(decoder, device):
    q, k_cache, v_cache, call, _ = made({}, torch.float32, device)
    out, lse = attention_decode(q, k_cache, v_cache, **call, return_aux=("lse",))
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    sinks = torch.randn(4, device=device)
    out, lse = attention_decode(q, k_cache, v_cache, **call, sinks=sinks, return_aux=("lse",))
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1, :, 0], sinks)


@pytest.mark.parametrize("splits", [1, 3])
def test_sink_of_minus_infinity_is_none(splits, decoder, device):
    q, k_cache, v_cache, call, _ = made({}, torch.float32, device)
    sinks = torch.full((4,), -torch.inf, device=device)
    results = [attention_decode(q, k_cache, v_cache, **call, **given, num_splits=splits, return_aux=("lse",))
               for given in ({}, {"sinks": sinks})]
    assert (results[0].lse[1] == -torch.inf).all()
    torch.testing.assert_close(*results)


def test_a_softcap_far_beyond_the_scores_changes_nothing(decoder, device):
    q, k_cache, v_cache, call, _ = made({}, torch.float16, device)
    out, capped = (attention_decode(q, k_cache, v_cache, **call, softcap=softcap) for softcap in (None, 1e9))
    torch.testing.assert_close(capped, out)


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_a_key_that_is_seen_is_seen(splits, decoder, device):
    q, k_cache, v_cache, call, _ = made({}, torch.float32, device)
    k_cache[2, :, 30], v_cache[0, 0, 4] = torch.nan, torch.nan
    out, lse = attention_decode(q, k_cache, v_cache, **call, num_splits=splits, return_aux=("lse",))
    assert out[2].isnan().all()
    assert lse[2].isnan().all()
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()


def test_a_full_cache_is_plain_attention(decoder, device):
    q, k_cache, v_cache, _, _ = made({"sq": 5}, torch.float32, device)
    out = attention_decode(q, k_cache, v_cache, mask=causal())
    torch.testing.assert_close(out, attention(q, k_cache, v_cache, mask=causal("bottom_right"), backend="reference"),
                               rtol=2e-5, atol=2e-5)


def test_out_lies_in_memory_as_q_does(decoder, device):
    q, k_cache, v_cache, _, _ = made({"sq": 2}, torch.float32, device)
    wanted = attention_decode(q, k_cache, v_cache)
    for layout in ("bhsd", "bshd", "sbhd", "shbd", "hbsd", "hsbd"):
        laid = lay_out(q, layout)
        out = attention_decode(laid, k_cache, v_cache)
        assert out.stride() == laid.stride()
        assert torch.equal(out, wanted)


def test_an_integer_is_the_length_of_every_sequence(decoder, device):
    q, k_cache, v_cache, _, _ = made({}, torch.float32, device)
    lengths = torch.full((3,), 11, device=device)
    assert torch.equal(attention_decode(q, k_cache, v_cache, cache_seqlens=11),
                       attention_decode(q, k_cache, v_cache, cache_seqlens=lengths))


@pytest.mark.parametrize("sizes", [{}, {"page": 8}], ids=["flat", "pages"])
def test_a_deterministic_result_is_no_affair_of_the_batch_or_the_capacity(sizes, device):
    with use_backend("triton"):
        q, k_cache, v_cache, call, own = made(sizes | {"capacity": 1400, "lengths": (600, 0, 1100)}, torch.float16,
                                              device)
        together = attention_decode(q, k_cache, v_cache, **call, deterministic=True)
        assert torch.equal(together, attention_decode(q, k_cache, v_cache, **call, deterministic=True))
        for n in range(3):
            alone = {name: tensor[n:n + 1] for name, tensor in call.items()}
            if own.get("page"):
                alone["block_table"] = alone["block_table"][:, :1104 // 8].contiguous()
                caches = k_cache, v_cache
            else:
                caches = k_cache[n:n + 1, :, :1100], v_cache[n:n + 1, :, :1100]
            assert torch.equal(together[n:n + 1], attention_decode(q[n:n + 1], *caches, **alone, deterministic=True))


def test_torch_asks_for_determinism(device):
    with use_backend("triton"):
        q, k_cache, v_cache, call, _ = made({"capacity": 1400, "lengths": (600, 5, 1100)}, torch.float16, device)
        wanted = attention_decode(q, k_cache, v_cache, **call, deterministic=True)
        assert not torch.equal(wanted, attention_decode(q, k_cache, v_cache, **call, num_splits=7))
        torch.use_deterministic_algorithms(True)
        try:
            found = attention_decode(q, k_cache, v_cache, **call)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"sq": 0}, {"capacity": 0}], ids=["batch", "queries", "capacity"])
def test_empty_sizes_give_empty_or_zero_results(sizes, decoder, device):
    b, sq, capacity = sizes.get("b", 2), sizes.get("sq", 1), sizes.get("capacity", 10)
    q, cache = torch.randn(b, 4, sq, 16, device=device), torch.randn(b, 2, capacity, 16, device=device)
    out, lse = attention_decode(q, cache, cache, return_aux=("lse",))
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert (out == 0).all() or capacity


def test_float64_is_the_references(device):
    q, k_cache, v_cache, call, own = made({}, torch.float64, device)
    out, lse = attention_decode(q, k_cache, v_cache, **call, return_aux=("lse",))
    wanted, _ = expected(*in_float64((q, k_cache, v_cache)), **dict(zip(call, in_float64(call.values()), strict=True)),
                         hk=own["hk"], dv=own["dv"])
    assert lse.dtype is torch.float64
    torch.testing.assert_close(out.cpu(), wanted)
    with pytest.raises(UnsupportedProblem, match="triton: computes in float16, bfloat16 and float32, got float64"):
        attention_decode(q, k_cache, v_cache, backend="triton")


def test_wide_heads_are_the_references(device):
    q, cache = torch.randn(1, 2, 1, 300, device=device), torch.randn(1, 1, 8, 300, device=device)
    assert attention_decode(q, cache, cache).shape == (1, 2, 1, 300)
    with pytest.raises(UnsupportedProblem, match="triton: decodes head dims up to 256, got 300 and 300"):
        attention_decode(q, cache, cache, backend="triton")


@pytest.mark.parametrize("name", ["gluon", "torch"])
def test_backends_that_do_not_decode_say_so(name, device):
    q, k_cache, v_cache, _, _ = made({}, torch.float32, device)
    with pytest.raises(UnsupportedProblem) as caught:
        attention_decode(q, k_cache, v_cache, backend=name)
    assert caught.value.reasons == {name: "does not decode; backend='triton' and 'reference' do"}
    with pytest.raises(InvalidInput, match="backend is 'none'; allowed are"):
        attention_decode(q, k_cache, v_cache, backend="none")
