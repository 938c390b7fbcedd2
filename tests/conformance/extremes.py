"""Numbers at the ends of what a dtype holds, and rows of very different sizes, with the errors that are allowed there.

No budget is drawn from dense attention at the ends: its error of a mean of equal numbers is 0 by luck, and NaN where
its scores overflow.
"""

import math
from typing import NamedTuple

import torch

from tilewise.masks import Mask
from tilewise.testing import oracle

RESULTS = ("out", "lse", "dq", "dk", "dv")
HEADS, LENGTH, DIM = 2, 67, 64  # a length that fills no tile
SCALE = 0.1  # no power of two: a score is rounded where it is scaled


class Extreme(NamedTuple):
    """Inputs, and which gradients a backward pass can know.

    Attributes:
        q, k, v, dout: (1, 2, 67, 64).
        known: the gradients that are held to float64's in float32; the others are finite.
        known_in_16_bits: the same in 16 bits.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    known: tuple[str, ...]
    known_in_16_bits: tuple[str, ...]


def normal(*seeds: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def _constants(value: float) -> Extreme:
    """Equal keys far beyond 2^24: their lse does not say how many there are."""
    q = torch.full((1, HEADS, LENGTH, DIM), value)
    return Extreme(q, q, q, torch.ones_like(q), (), ())


def _either_sign(value: float) -> Extreme:
    """Scores of both signs, far beyond 2^24: a row has its greatest where k is q, and out copies a row of v."""
    q, v, dout = normal(0, 1, 2)
    q = value * q.sign()
    return Extreme(q, q.flip(2), v.bfloat16().float(), dout, ("dv",), ())


def _random(size: float) -> Extreme:
    """Rows whose every lse is rounded its own way: for some, P that is made of it would be infinite."""
    q, k, v, dout = normal(3, 4, 5, 6)
    return Extreme(size * q, size * k, size * v, dout, ("dv",), ())


def _denormal_values() -> Extreme:
    q, k, v, dout = normal(7, 8, 9, 10)
    return Extreme(q, k, 2.0**-129 * v, dout, ("dv",), ("dv",))


def _denormal_scores() -> Extreme:
    q, k, v, dout = normal(11, 12, 13, 14)
    return Extreme(2.0**-129 * q, 2.0**-129 * k, v, dout, ("dv",), ("dv",))


def _largest_values() -> Extreme:
    """Values whose sum over all keys float32 just holds, and scores of no more than ordinary size."""
    q, k, v, dout = normal(15, 16, 17, 18)
    return Extreme(q, k, v.sign() * 3e38 / LENGTH, 2.0**-100 * dout, ("dv",), ("dv",))


def _largest_queries() -> Extreme:
    """Queries whose products with ordinary keys overflow, of keys that are as small."""
    q, k, v, dout = normal(19, 20, 21, 22)
    return Extreme(q.clamp(-4, 4) * 2.0**120, k * 2.0**-120, v, dout, ("dv", "dq"), ("dv",))


EXTREMES = {
    "constants_of_30000": lambda: _constants(30000.0), "constants_of_133120": lambda: _constants(133120.0),
    "constants_of_1e6": lambda: _constants(1e6), "either_sign_of_30000": lambda: _either_sign(30000.0),
    "either_sign_of_1e6": lambda: _either_sign(1e6), "random_numbers_of_1e4": lambda: _random(1e4),
    "random_numbers_of_1e6": lambda: _random(1e6),
    "denormal_values": _denormal_values, "denormal_scores": _denormal_scores,
    "largest_values": _largest_values, "largest_queries": _largest_queries,
}
IN_FLOAT16 = ("constants_of_30000", "either_sign_of_30000", "random_numbers_of_1e4")  # the others end elsewhere
PAIRS = [(name, dtype) for name in EXTREMES for dtype in (torch.float32, torch.bfloat16, torch.float16)
         if dtype is not torch.float16 or name in IN_FLOAT16]


def inputs_of(name: str, dtype: torch.dtype, device: torch.device | str) -> Extreme:
    made = EXTREMES[name]()
    return made._replace(**{part: getattr(made, part).to(device, dtype) for part in ("q", "k", "v", "dout")})


def assert_as_float64(given: Extreme, got: dict[str, torch.Tensor], *, flushes: bool = False) -> None:
    """Hold all of ``got``, by :data:`RESULTS`, to float64's results, where these can be known.

    Args:
        flushes: whether what is below the smallest normal number may be taken for 0 on the way, a few times a sum.
    """
    tensors = (given.q, given.k, given.v, given.dout)
    exact = dict(zip(RESULTS, (*oracle.attend(*tensors[:3], Mask(), SCALE)[:2],
                               *oracle.gradients(*tensors, None, Mask(), SCALE)[:3]), strict=True))
    is_float32 = given.q.dtype is torch.float32
    held = ("out", "lse", *(given.known if is_float32 else given.known_in_16_bits))
    for name in RESULTS:
        assert exact[name].isfinite().all()
        assert got[name].isfinite().all(), f"{name} is not finite"
        if name not in held:
            continue
        info, largest = torch.finfo(got[name].dtype), exact[name].abs().max()
        # 16 units of float32, which sums 64 products and 67 keys; in 16 bits P and out are rounded to them.
        least = info.smallest_normal * info.eps
        allowed = (16 if info.dtype == "float32" else 2) * max(info.eps * largest, least)
        if flushes:
            allowed = max(allowed, 4 * info.smallest_normal)
        error = (got[name].double() - exact[name]).abs().max()
        assert error <= allowed, f"{name} errs by {error:.3g}; allowed are {allowed:.3g}, of {largest:.3g}"


def spread(seed: int, d: int, length: int, device: torch.device | str) -> list[torch.Tensor]:
    """Return q, k, v and dout, (1, 2, length, d), float32, whose rows' sizes span six decades."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1, HEADS, length, d, generator=generator) for _ in range(4)]
    sizes = [10.0 ** (6 * torch.rand(1, HEADS, length, 1, generator=generator) - 3) for _ in range(4)]
    return [(row * size).to(device) for row, size in zip(rows, sizes, strict=True)]


def far(seed: int, d: int, length: int, device: torch.device | str) -> list[torch.Tensor]:
    """Return q, k, v and dout, (1, 2, length, d), float32, that SCALE gives scores of -1000 and a few more or less.

    All keys have the same large number in their first dim: dq has -5000 times the sum of a row's dS there, which is 0.
    Tensor cores cut sums off, so that those of "cuda" err all in one direction: lse by 1e-7 of itself, out not at all.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, HEADS, length, d, generator=generator) for _ in range(4))
    q[..., 0], k[..., 0] = 2.0, -500 / SCALE
    return [tensor.to(device) for tensor in (q, k, v, dout)]


# How the rows are drawn, and which results are held to dense attention.
HARD_ROWS = {"sizes_over_six_decades": (spread, RESULTS), "scores_of_minus_1000": (far, ("out", "dq", "dk", "dv"))}


def assert_errors_at_most_three_times_dense(compute, rows: str, d: int, length: int, device: torch.device | str,
                                            seeds: int) -> None:
    """Hold the errors of ``compute(q, k, v, dout)``, of SCALE, to 3 times those of dense float32 attention.

    ``rows``: of HARD_ROWS. The largest error and the mean one, as geometric means over seeds: of one seed a few
    elements decide the largest.
    """
    draw, held = HARD_ROWS[rows]
    logs: dict[str, list[float]] = {}
    for seed in range(seeds):
        tensors = draw(seed, d, length, device)
        exact = (*oracle.attend(*tensors[:3], Mask(), SCALE)[:2], *oracle.gradients(*tensors, None, Mask(), SCALE)[:3])
        dense = oracle.dense(*tensors, None, Mask(), SCALE)
        got = compute(*tensors)
        for name, true in zip(RESULTS, exact, strict=True):
            if name not in held:
                continue
            own, its = ((values.double() - true).abs() for values in (got[name], getattr(dense, name)))
            logs.setdefault(f"{name} (largest)", []).append(math.log(own.max() / its.max()))
            logs.setdefault(f"{name} (mean)", []).append(math.log(own.mean() / its.mean()))
    ratios = {name: round(math.exp(sum(values) / seeds), 2) for name, values in logs.items()}
    assert all(ratio <= 3 for ratio in ratios.values()), ratios
