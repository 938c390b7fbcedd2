"""How many programs of the Hopper backward pass have all keys of a head, as was timed on an H200 (docs/hopper.md)."""

import math

from tilewise.problem import AttentionProblem
from tilewise.tuning.backward_configs import BLOCK_N

# By the columns of a tile: how full rounds of such programs must be, in all, and what may be in hand at once, of 50 MiB
# of L2.
_EVEN = {64: 0.95, 128: 0.8}
_ALONE_BYTES = {64: 40 * 2**20, 128: 45 * 2**20}


def programs_of_head(problem: AttentionProblem, multiprocessors: int) -> int:
    """How many programs have a head's tiles of keys to themselves, 0 where programs draw tiles of any head.

    Without a mask as many as keep apart: each has two tiles of keys or more, of 4 steps for each of them, in which it
    is behind the one before. On an H200 2, 4 and 4 at lengths 512, 1024 and 2048 were 1.10, 1.04 and 1.01 times as fast
    as programs that draw tiles. Where the diagonal hides half, tiles get shorter, and of more than two one waits for
    another: 1 at 512 was 1.26 times as fast, 2 at 1024 the same, 4 at 2048 0.88 times. In windows of 128 keys 1 at 512,
    2 at 1024 to 8192 and 4 at 16384 were 1.24 and 1.16 to 1.27 times as fast, of 256 keys 1.20 and 1.08 to 1.12, of 512
    1.23 and 0.98 to 1.05. Other masks were timed with one alone. At head dims above 64 one has a head: 1.19 with 512
    causal queries, 1.30 with 256 and 1.77 with 128, in rounds that were 81 % full 1.07 and 1.17 with the first two;
    1.05 with 320 in full and 0.99 with 384.
    """
    candidates: tuple[int, ...] = (1,)
    if max(problem.d, problem.dv) <= 64:
        if problem.mask.left is None and problem.mask.right is None:
            candidates = (4, 2, 1)
        elif problem.mask.left is None and _is_halved(problem):
            candidates = (1, 2)
        elif _window(problem) <= 256:
            candidates = (1, 2, 4)
    shortest = min(problem.sq, problem.sk)
    return next((programs for programs in candidates if programs <= multiprocessors
                 and (programs == 1 or shortest >= 256 * programs)
                 and _fill_alone(problem, multiprocessors, programs)), 0)


def _is_halved(problem: AttentionProblem) -> bool:
    """Whether a diagonal hides half, or more in a window."""
    return problem.mask.right == 0 and problem.sq == problem.sk


def _window(problem: AttentionProblem) -> float:
    """How many keys a query sees between two bounds."""
    lower, upper = problem.band.lower, problem.band.upper
    return math.inf if lower is None or upper is None else upper - lower + 1


def _fill_alone(problem: AttentionProblem, multiprocessors: int, programs: int) -> bool:
    """Whether so many programs a head keep all multiprocessors busy, and L2 holds what they have in hand.

    That is q, dout and the sums for dq of a group's heads. Where the diagonal hides half it is two thirds on average: a
    tile needs what is behind its first key, and the first tiles take the longest. Several programs in a narrow window
    need what their tiles see.
    """
    in_window = programs > 1 and _window(problem) < math.inf
    heads, at_once = problem.b * problem.hk, multiprocessors // programs
    width = 64 if max(problem.d, problem.dv) <= 64 else 128
    tiles = math.ceil(problem.sk / BLOCK_N)
    busy = heads * programs / (multiprocessors * math.ceil(heads / at_once))
    if in_window or not _is_halved(problem):
        busy *= tiles / (programs * math.ceil(tiles / programs))
    rows: float = problem.sq
    if in_window:
        rows = min(rows, _window(problem) + programs * BLOCK_N)
    elif _is_halved(problem):
        rows *= 2 / 3
    rows *= at_once * problem.group
    return busy >= _EVEN[width] and rows * width * (4 + 2 * problem.dtype.itemsize) <= _ALONE_BYTES[width]
