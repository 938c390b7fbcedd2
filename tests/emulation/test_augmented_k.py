"""Extra columns hold lse, delta and ALiBi of queries as MMAs subtract them, and the dQ accumulator begins at 0."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Triton is not installed")
from emulation.backward_calls import call_of, with_slopes
from emulation.hopper_calls import bound_backward
from tilewise.errors import InvalidInput
from tilewise.kernels.enqueue import addresses_in
from tilewise.kernels.hopper.arguments import BackwardOperands, BackwardPointers, StridedRows
from tilewise.kernels.hopper.backward.augmented_k import HeadSlopes, hopper_augmented_k_kernel
from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
)
from tilewise.masks import Mask, causal
from tilewise.problem import padded_dim

SCALE, ACCUM = 0.125, 4096


def write(out, dout, lse, delta, columns, accum, ctas=None, zeroed=0, slopes=None):
    """Call the kernel for lse of (batch, heads, queries); slopes: of (batch, heads)."""
    batch, heads, sq = lse.shape
    blocks = -(-sq // 64)
    of_out, of_dout = (StridedRows(None) if rows is None else StridedRows(rows, *rows.stride()[:3])
                       for rows in (out, dout))
    dv = 1 if out is None else out.shape[3]
    hopper_augmented_k_kernel[(ctas or blocks * heads * batch,)](
        of_out, of_dout, lse, delta, HeadSlopes(slopes, *(() if slopes is None else slopes.stride())), columns, accum,
        sq, heads, blocks, SCALE, dv, padded_dim(dv), zeroed)


@pytest.mark.parametrize(("rows", "zeroed"), [(1, ACCUM), (64, 1), (1000, ACCUM), (1000, 0), (1000, 1)])
def test_three_numbers_add_up_to_a_float32_one(rows, zeroed, device):
    torch.manual_seed(0)
    lse, delta = torch.randn(2, 1, 2, rows) * torch.tensor([100.0, 1e-3]).view(2, 1, 1, 1)
    columns, ctas = torch.full((2 * rows + 1, 16), float("nan"), dtype=torch.bfloat16), 2 * -(-rows // 64)
    accum = torch.full(((ctas + 1) * ACCUM,), float("nan"))
    lse, delta, columns, accum = (tensor.to(device) for tensor in (lse, delta, columns, accum))
    write(None, None, lse, delta, columns, accum, ctas, zeroed)
    assert columns[2 * rows].isnan().all(), "past the last row"
    cleared = ctas * zeroed
    assert torch.equal(accum.isnan(), torch.arange(len(accum), device=device) >= cleared)
    assert not accum[:cleared].any()
    check(columns[:2 * rows], lse, delta)


@pytest.mark.parametrize(("sq", "dv"), [(64, 64), (100, 128), (130, 80)])
def test_delta_is_made_of_out_and_dout_where_it_is_not_there(sq, dv, device):
    torch.manual_seed(0)
    out = torch.randn(2, sq, 3, dv).half().to(device).transpose(1, 2)
    dout = torch.randn(3, 2, sq, dv + 8).half().to(device).transpose(0, 1)[..., :dv]
    lse, accum = torch.randn(2, 3, sq, device=device), torch.zeros(1, device=device)
    columns = torch.full((6 * sq, 16), float("nan"), dtype=torch.bfloat16, device=device)
    write(out, dout, lse, None, columns, accum)
    check(columns, lse, (out.double() * dout.double()).sum(3), rtol=1e-5, atol=1e-4)


EACH = torch.tensor([[0.3, -0.01, 2.5], [-0.7, 0.0, 1e-3]])


@pytest.mark.parametrize("slopes", [
    EACH, EACH[:1].expand(2, 3), EACH[:, :1].bfloat16().expand(2, 3), EACH.half().T.contiguous().T, EACH.double()],
    ids=["dense", "of_heads", "of_batches", "transposed", "float64"])
@pytest.mark.parametrize("sq", [64, 130])
def test_with_slopes_a_query_has_that_of_its_head_and_its_place_in_its_block_of_64(sq, slopes, device):
    """Queries past the last one see nothing: what a block's keys have in common may be larger than any float32."""
    torch.manual_seed(0)
    lse, delta, blocks = 50.0 * torch.randn(2, 3, sq, device=device), torch.randn(2, 3, sq, device=device), -(-sq // 64)
    lse[0, 1, 7] = float("-inf")
    columns = torch.full((6 * blocks * 64 + 1, 16), float("nan"), dtype=torch.bfloat16, device=device)
    write(None, None, lse, delta, columns, torch.zeros(1, device=device), slopes=slopes.to(device))
    assert columns[-1].isnan().all(), "past the last row"
    made = columns[:-1].unflatten(0, (2, 3, -1)).double().cpu()
    assert made.isfinite().all()
    wide = slopes.double()[..., None].expand(2, 3, blocks * 64)
    want = -(lse.double().cpu() + wide[..., :sq] * (torch.arange(sq) % 64)) / SCALE
    got, blind = made[:, :, :sq, :3].sum(3), want.isinf()
    torch.testing.assert_close(got[~blind], want[~blind], rtol=2.0**-22, atol=2.0**-12)  # of sums up to 2^12
    assert (got[blind] * 2.0**-40 < -1e16).all()
    assert (made[:, :, sq:, :3].sum(3) * 2.0**-40 < -1e16).all()
    torch.testing.assert_close(made[..., 6:9].sum(3), wide / SCALE, rtol=2.0**-23, atol=0.0)
    torch.testing.assert_close(made[:, :, :sq, 3:6].sum(3), -delta.double().cpu(), rtol=2.0**-24, atol=0.0)
    assert not made[:, :, sq:, 3:6].any()
    assert not made[..., 9:].any(), "what meets zeros must be finite"


def check(columns, lse, delta, **of_delta):
    made = columns.double()
    exactly = {"rtol": 2.0**-24, "atol": 0.0}
    for first, want, near in ((0, -lse / SCALE, exactly), (3, -delta, of_delta or exactly)):
        torch.testing.assert_close(made[:, first:first + 3].sum(1), want.double().flatten(), **near)
    assert not made[:, 6:].any(), "what meets zeros must be finite"


def test_a_query_that_sees_nothing_has_finite_numbers_that_make_its_probabilities_zero(device):
    """-inf would meet the zeros that select delta: 0 · inf is NaN."""
    lse = torch.tensor([[[float("-inf"), 1.0]]], device=device)
    columns, accum = torch.zeros(2, 16, dtype=torch.bfloat16, device=device), torch.zeros(ACCUM, device=device)
    write(None, None, lse, torch.ones_like(lse), columns, accum, zeroed=ACCUM)
    assert columns.isfinite().all()
    assert (columns[:, :3].float().sum(1) * 2.0**-40 < -1e16).tolist() == [True, False]


PLAIN = HopperD128AugmentedKConfig()
OWN_HEADS = HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.HEAD_PERSISTENT)
SHARED = HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2)
DETERMINISTIC = HopperD64Config(variant=D64Variant.DETERMINISTIC)
STRIDES = (1, 1, 1, 1), (2, 2, 2, 1)


def allocate(sizes, strides, dtype):
    return torch.empty_strided(sizes, strides, dtype=dtype)


def launch_of(config, mask, lengths, d, incoming=STRIDES):
    problem, tensors = call_of(mask, lengths, (2, 2), (d, d))
    return bound_backward(problem, config, 132, incoming, allocate), tensors


@pytest.mark.parametrize(("config", "mask", "lengths", "incoming", "takes"), [
    (PLAIN, Mask(), (256, 256), STRIDES, True), (PLAIN, Mask(), (256, 256), None, False),
    (HopperD128Config(), Mask(), (256, 256), STRIDES, False),
    (PLAIN, causal("bottom_right"), (300, 256), STRIDES, False),  # the first queries see nothing, and are not read
])
def test_out_is_taken_where_extra_columns_are_made_of_all_queries(config, mask, lengths, incoming, takes):
    launch, _ = launch_of(config, mask, lengths, 128, incoming)
    assert launch.takes_out is takes


@pytest.mark.parametrize(("config", "d"), [(PLAIN, 128), (SHARED, 64), (DETERMINISTIC, 64)],
                         ids=["zeros", "semaphores of shared heads", "semaphores of tiles"])
@pytest.mark.parametrize("incoming", [STRIDES, None], ids=["out", "delta"])
def test_the_kernel_gets_what_it_makes_extra_columns_of_and_what_it_clears(config, d, incoming):
    launch, (_q, _k, _v, dout, lse, delta) = launch_of(config, Mask(), (1024, 1024), d, incoming)
    asked = []
    launch.enqueue_augmented_k = lambda addresses, arguments, alike: asked.append((addresses, arguments()))
    accum, columns = launch._begin(dout, lse, delta)
    (addresses, arguments), = asked
    cleared = accum[launch.accum_rows:] if config.deterministic else accum
    if incoming:
        assert arguments[:4] == (StridedRows(delta, 1, 1, 1), StridedRows(dout, 2, 2, 2), lse, None)
    else:
        assert arguments[:4] == (StridedRows(None), StridedRows(None), lse, delta)
    assert arguments[4] == HeadSlopes(None, None, None)
    assert [one.data_ptr() for one in arguments[5:]] == [columns.data_ptr(), cleared.data_ptr()]
    assert list(addresses) == addresses_in(arguments)


@pytest.mark.parametrize("incoming", [STRIDES, None], ids=["out", "delta"])
@pytest.mark.parametrize(("config", "d"), [(OWN_HEADS, 128), (SHARED, 64)], ids=["d128", "d64"])
def test_the_kernel_gets_slopes_and_so_does_the_one_behind_it(config, d, incoming):
    problem, (q, k, v, dout, lse, delta) = call_of(causal("top_left"), (300, 300), (2, 1), (d, d))
    slopes = torch.tensor([[0.5, 0.25]])
    launch, asked = bound_backward(with_slopes(problem, slopes), config, 132, incoming, allocate), []
    launch.enqueue_augmented_k = lambda addresses, arguments, alike: asked.append((addresses, arguments()))
    launch.enqueue = launch.enqueue_augmented_k
    launch(q, k, v, dout, lse, delta, q.clone(), k.clone(), v.clone(),
           operands=BackwardOperands(slopes=slopes))
    (_, arguments), (_, of_kernel) = asked
    assert arguments[4] == HeadSlopes(slopes, 0, 1)
    assert arguments[5].shape == (2, 2, 320, 16)
    assert all(list(addresses) == addresses_in(given) for addresses, given in asked)
    pointers, = (argument for argument in of_kernel if isinstance(argument, BackwardPointers))
    assert pointers.slopes is slopes


@pytest.mark.parametrize("variant", [D128Variant.DQ_STAGED, D128Variant.DETERMINISTIC])
def test_without_extra_columns_torch_zeroes_the_accumulator_or_where_it_is_first_set_its_semaphores_alone(variant):
    problem, (_q, _k, _v, dout, lse, delta) = call_of(Mask(), (200, 200), (2, 2), (128, 128))
    nans = []

    def allocate_nan(sizes, strides, dtype):
        nans.append(allocate(sizes, strides, dtype).fill_(float("nan")))
        return nans[-1]

    launch = bound_backward(problem, HopperD128Config(variant=variant), 132, None, allocate_nan)
    accum, read = launch._begin(dout, lse, delta)
    assert read is lse
    assert accum is nans[0]
    assert accum[:launch.accum_rows].isnan().all() if variant == D128Variant.DETERMINISTIC else not accum.any()
    assert not accum[launch.accum_rows:].any()


def test_ctas_of_a_head_have_to_run_at_once():
    problem, _ = call_of(Mask(), (1024, 1024), (2, 2), (64, 64))
    with pytest.raises(InvalidInput, match=r"^ctas_per_head=2 for 1 multiprocessors; allowed are as many\.$"):
        bound_backward(problem, SHARED, 1)
