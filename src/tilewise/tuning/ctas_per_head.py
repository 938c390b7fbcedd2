"""How many CTAs of the Hopper backward kernel own a head and all of its keys, as timed on an H200."""

import math

from tilewise.kernels.hopper.backward.config import BLOCK_N
from tilewise.problem import AttentionProblem

# By the columns of a tile: the share of all SMs' time that such CTAs must keep busy, and the bytes of their heads that
# may be resident at once, of 50 MiB of L2.
_LEAST_BUSY = {64: 0.95, 128: 0.8}
_RESIDENT_BYTES = {64: 40 * 2**20, 128: 45 * 2**20}


def choose_ctas_per_head(problem: AttentionProblem, num_sms: int) -> int:
    """Return how many CTAs share the KV tiles of a head, and take no others; 0: CTAs take tiles of any head.

    Without a mask as many as do not wait for one another: each has at least two KV tiles, and for each of them at least
    4 steps by which it is behind the CTA before it. On an H200 2, 4 and 4 CTAs at lengths 512, 1024 and 2048 were 1.10,
    1.04 and 1.01 times as fast as CTAs that take tiles of any head. Where the diagonal hides half, later tiles are
    shorter, and with more than two CTAs one waits for another: 1 at 512 was 1.26 times as fast, 2 at 1024 the same, 4
    at 2048 0.88 times. In windows of 128 keys 1 at 512, 2 at 1024 to 8192 and 4 at 16384 were 1.24 and 1.16 to 1.27
    times as fast, of 256 keys 1.20 and 1.08 to 1.12, of 512 1.23 and 0.98 to 1.05. Under other masks only 1 CTA was
    timed. At head dims above 64 one CTA owns a head: 1.19 with 512 causal queries, 1.30 with 256 and 1.77 with 128, in
    waves that were 81 % full 1.07 and 1.17 with the first two; 1.05 with 320 queries without a mask and 0.99 with 384.
    """
    if not problem.is_banded:  # dQ's order follows from the mask's bounds
        return 0
    candidates: tuple[int, ...] = (1,)
    if max(problem.d, problem.dv) <= 64:
        if problem.mask.left is None and problem.mask.right is None:
            candidates = (4, 2, 1)
        elif problem.mask.left is None and _is_halved(problem):
            candidates = (1, 2)
        elif _window(problem) <= 256:
            candidates = (1, 2, 4)
    shortest = min(problem.sq, problem.sk)
    return next((ctas for ctas in candidates if ctas <= num_sms and (ctas == 1 or shortest >= 256 * ctas)
                 and _fill_the_device(problem, num_sms, ctas)), 0)


def _is_halved(problem: AttentionProblem) -> bool:
    """Whether a diagonal hides half, or more in a window."""
    return problem.mask.right == 0 and problem.sq == problem.sk


def _window(problem: AttentionProblem) -> float:
    """How many keys a query sees between two bounds."""
    lower, upper = problem.band.lower, problem.band.upper
    return math.inf if lower is None or upper is None else upper - lower + 1


def _fill_the_device(problem: AttentionProblem, num_sms: int, ctas: int) -> bool:
    """Whether so many CTAs for each head keep the SMs busy, and L2 holds the rows that they read and write meanwhile.

    These are q, dout and the dQ accumulator of a group's heads. Where the diagonal hides half, two thirds of them are
    resident on average: a tile needs the rows behind its first key, and the first tiles take the longest. Several CTAs
    in a narrow window need the rows that their tiles see.
    """
    in_window = ctas > 1 and _window(problem) < math.inf
    heads, at_once = problem.b * problem.hk, num_sms // ctas
    width = 64 if max(problem.d, problem.dv) <= 64 else 128
    tiles = math.ceil(problem.sk / BLOCK_N)
    busy = heads * ctas / (num_sms * math.ceil(heads / at_once))
    if in_window or not _is_halved(problem):
        busy *= tiles / (ctas * math.ceil(tiles / ctas))
    rows: float = problem.sq
    if in_window:
        rows = min(rows, _window(problem) + ctas * BLOCK_N)
    elif _is_halved(problem):
        rows *= 2 / 3
    rows *= at_once * problem.group
    resident = rows * width * (4 + 2 * problem.dtype.itemsize)
    return busy >= _LEAST_BUSY[width] and resident <= _RESIDENT_BYTES[width]
