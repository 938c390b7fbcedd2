"""Which schedule: an estimate of each one's time from what its slowest rank computes, sends and waits for.

Of the forward pass:

    ring        max(compute, keys received / bandwidth) + merging of partial results + a latency a step with messages
    all_gather  max(compute, keys received / bandwidth) + the first group of heads' keys + copies + a latency a group
    ulysses     compute + (q, k and v one way, out the other) / bandwidth + two latencies + copies before and behind

and of the backward pass, whose ``compute`` is 2.5 times that of the forward pass:

    ring        max(compute, (keys and their gradients) / bandwidth) + sums + a latency a step with messages
    all_gather  max(compute, the same / bandwidth) + the first group's keys + the last group's gradients + copies + sums
                + a latency a group
    ulysses     as forward

and for each call what it costs beside its work. A ring has one for each block of its plan, an all_gather one for each
group of heads and piece of a rank's queries, and ulysses one, and one more for each of the four tensors exchanged;
where its ranks share heads of keys and a mask has pieces, it has more than are counted.

``compute`` is of the rank with the most visible pairs: of its layout for ring and all_gather, all pairs divided by the
number of ranks for ulysses, whose ranks have the whole sequence. On a mesh of two dims, the exchange of heads
comes before ring and all_gather, which then have fewer heads and longer shards. Keys are those that the mask lets a
rank's queries see. Their gradients travel in float32. A ring keeps its last step's keys for the backward pass, and an
all_gather of one group all keys where it may (:func:`keeps_gathered`): those do not travel again.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from tilewise.distributed.layouts import Layout
from tilewise.distributed.plan import Problem, Rectangle, cached_ring_plan, rectangles_of
from tilewise.distributed.segments import segments_of
from tilewise.distributed.steps import Step
from tilewise.masks import Span
from tilewise.support.caches import registered

SCHEDULES = ("ring", "all_gather", "ulysses")
_SAMPLED_ROWS = 32  # of a block whose mask has exceptions, from whose visible keys its pairs are estimated
GROUPS = 4  # of heads in an all_gather, at most
BACKWARD = 2.5  # times the operations of the forward pass: five products of matrices for two


@dataclass(frozen=True)
class Links:
    """What a time is estimated with: round numbers of one GPU of the H100 class.

    What was measured of each is beside it: on two GPUs of one host, by NCCL, and written down in
    benchmarks/journal/context-parallel.md (H100) and benchmarks/results/nvidia-h200/context-parallel.csv (H200).

    Attributes:
        flops: of attention a second and rank. A causal call of 256k tokens on one H200 has 649e12 in both passes. It
            says how much an uneven layout costs, and what messages travel beside.
        bandwidth: bytes that a rank receives a second while it sends as many. Of messages of 32 to 128 MB 303e9 between
            two ranks; NVLink has 450e9 in a direction.
        memory: bytes that a rank's memory moves a second. Nine tenths of the 3.35e12 of the H100's data sheet: merging
            4096 rows of 32 heads, 201e6 bytes, took 61e-6 seconds (3.3e12).
        latency: seconds until a message arrives, however short. NCCL's all_gather of 1 KB takes 46e-6 to 56e-6, one
            behind another.
        call: seconds that a call takes beside its work: the host's, small kernels beside the large one, and the last
            tiles, which do not fill a GPU. A local call took the host 115e-6 forward, under a profiler.
    """

    flops: float = 650e12
    bandwidth: float = 300e9
    memory: float = 3e12
    latency: float = 50e-6
    call: float = 100e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: batch entries, heads of queries and keys, head dims of q and v, bytes of an element."""

    b: int
    hq: int
    hk: int
    d: int
    dv: int
    itemsize: int

    @property
    def of_key(self) -> int:
        """Bytes of the keys and values of a position."""
        return self.b * self.hk * (self.d + self.dv) * self.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum: float32, or float64."""
        return max(4, self.itemsize)

    @property
    def of_key_gradient(self) -> int:
        """Bytes of dk and dv of a position, as parts of sums."""
        return self.b * self.hk * (self.d + self.dv) * self.wide

    @property
    def of_pair(self) -> int:
        """Operations of the forward pass for a pair of positions, in all heads."""
        return 2 * self.b * self.hq * (self.d + self.dv)


@dataclass(frozen=True)
class Estimate:
    """A schedule on its slowest rank.

    Attributes:
        pairs: visible (query, key) pairs that the rank computes, of one head.
        bytes_received: by the rank, in the forward pass.
        seconds: the model's time of the forward pass.
        backward_seconds: that of the backward pass.
        groups: of heads, which an all_gather walks through; 1 of the others.
    """

    pairs: int
    bytes_received: int
    seconds: float
    backward_seconds: float
    groups: int = 1

    def total(self, *, with_backward: bool) -> float:
        """Return the seconds of the forward pass, or of both passes."""
        return self.seconds + (self.backward_seconds if with_backward else 0.0)


def groups_of(received: int, kv_heads: int, pieces: int, links: Links) -> int:
    """Return how many groups of heads an all_gather walks through: a divisor of the heads of keys, at most 4.

    The keys of the first group are waited for, and each group costs a message and a call for each piece of queries: it
    is the count with the least ``received / count / bandwidth + count · (latency + pieces · call)``.

    Args:
        received: bytes of keys and values that the rank receives which receives most.
        kv_heads: heads of keys.
        pieces: most that a rank's queries have.
        links: what a time is estimated with.
    """
    counts = [count for count in range(1, GROUPS + 1) if kv_heads % count == 0]
    return min(counts, key=lambda count: received / count / links.bandwidth
               + count * (links.latency + pieces * links.call))


def keeps_gathered(groups: int, most_received: int, keys: Layout) -> bool:
    """Return whether an all_gather keeps what it received for the backward pass; the same on every rank.

    It does where all heads are one group and a rank has at most as many keys of others as the shortest shard has: then
    a call holds twice its own keys at most.

    Args:
        groups: of heads.
        most_received: rows of keys that the rank receives which receives most.
        keys: their layout.
    """
    return groups == 1 and most_received <= min(keys.shard_length(rank) for rank in range(len(keys.pieces)))


@dataclass(frozen=True)
class _Counts:
    """What the plans of a ring say, each of the rank that has most of it; an all_gather moves the same keys.

    Attributes:
        pairs: visible ones of a head.
        received: rows of keys that come from others; ``again``: those that a ring's backward pass asks for again.
        held: rows of keys of all steps, the own ones among them.
        results: how often a row of results is read or written in float32 (float64) beside the call that made it: three
            times where it is added to others, twice where it is the only one and is rounded.
        waits, blocks: steps with messages, and local calls.
        pieces: ranges of positions of a rank's queries.
    """

    pairs: int
    received: int
    again: int
    held: int
    results: int
    waits: int
    blocks: int
    pieces: int

    @classmethod
    def of(cls, problem: Problem, pairs: list[int], *, rounds: bool) -> "_Counts":
        """Count in the plans of all ranks; ``rounds``: whether results have fewer bits than sums."""
        plans = list(enumerate([cached_ring_plan(problem, rank) for rank in range(problem.ranks)]))
        return cls(
            max(pairs), max(_rows_received(steps, rank) for rank, steps in plans),
            max(_rows_received(steps[:-1], rank) for rank, steps in plans),
            max(sum(step.length for step in steps) for _, steps in plans),
            max(_results(steps, problem.queries.shard_length(rank), rounds=rounds) for rank, steps in plans),
            max(sum(bool(step.received(rank)) for step in steps) for rank, steps in plans),
            max(sum(len(step.blocks) for step in steps) for _, steps in plans), max(map(len, problem.queries.pieces)))


@registered
@lru_cache(maxsize=256)
def estimates(problem: Problem, sizes: Sizes, links: Links) -> dict[str, Estimate]:
    """Estimate each schedule; whether it takes the call is another question."""
    ranks = problem.ranks
    pairs = [_pairs_of(problem, rank) for rank in range(ranks)]
    counts, even = _Counts.of(problem, pairs, rounds=sizes.itemsize < sizes.wide), -(-sum(pairs) // ranks)
    longest = max(problem.queries.shard_length(rank) for rank in range(ranks))
    moved = _exchanged(longest, sizes, ranks)
    exchange, compute = _exchange_seconds(moved, longest, sizes, links) + links.call, even * sizes.of_pair / links.flops
    return {"ring": _ring(counts, sizes, links), "all_gather": _all_gather(problem, counts, sizes, links),
            "ulysses": Estimate(even, moved, compute + exchange, BACKWARD * compute + exchange)}


def _ring(counts: _Counts, sizes: Sizes, links: Links) -> Estimate:
    compute, received = counts.pairs * sizes.of_pair / links.flops, counts.received * sizes.of_key
    travelling = counts.again * sizes.of_key + counts.received * sizes.of_key_gradient
    calls = counts.waits * links.latency + counts.blocks * links.call
    of_row = counts.results * sizes.b * sizes.hq * sizes.wide / links.memory
    merging, sums = of_row * sizes.dv, of_row * sizes.d + counts.received * 3 * sizes.of_key_gradient / links.memory
    return Estimate(counts.pairs, received, max(compute, received / links.bandwidth) + merging + calls,
                    max(BACKWARD * compute, travelling / links.bandwidth) + sums + calls)


def _all_gather(problem: Problem, counts: _Counts, sizes: Sizes, links: Links) -> Estimate:
    compute, received = counts.pairs * sizes.of_pair / links.flops, counts.received * sizes.of_key
    groups = groups_of(received, problem.heads_apart, counts.pieces, links)
    again = 0 if keeps_gathered(groups, counts.received, problem.keys) else received
    gradients = counts.received * sizes.of_key_gradient
    calls = groups * (links.latency + counts.pieces * links.call)
    # Own and received keys are read and written where there are both.
    copies = 2 * counts.held * sizes.of_key / links.memory if received else 0.0
    summed = counts.received + (counts.held if counts.pieces > 1 else 0)  # dk and dv of each piece, and what arrives
    rounding = 0
    if received and sizes.itemsize < sizes.wide:  # of dq, which comes in the dtype of dk and dv
        longest = max(problem.queries.shard_length(rank) for rank in range(problem.ranks))
        rounding = 2 * longest * sizes.b * sizes.hq * sizes.d * sizes.wide
    return Estimate(
        counts.pairs, received,
        max(compute, received / links.bandwidth) + received / groups / links.bandwidth + copies + calls,
        max(BACKWARD * compute, (again + gradients) / links.bandwidth) + (again + gradients) / groups / links.bandwidth
        + copies + (summed * 3 * sizes.of_key_gradient + rounding) / links.memory + calls, groups)


def estimates_of_rows(rows: Problem, queries: Layout, sizes: Sizes, links: Links) -> dict[str, Estimate]:
    """Estimate each schedule of a mesh of two dims, whose rows exchange heads first.

    Args:
        rows: the problem in which rows of the mesh are ranks.
        queries: layout over all ranks.
        sizes: of the call, before the exchange.
        links: what a time is estimated with.
    """
    ranks = len(queries.pieces) // rows.ranks
    longest = max(queries.shard_length(rank) for rank in range(len(queries.pieces)))
    moved = _exchanged(longest, sizes, ranks)
    seconds = _exchange_seconds(moved, longest, sizes, links)
    kv_heads = max(1, sizes.hk // ranks)
    found = estimates(replace(rows, kv_heads=kv_heads), replace(sizes, hq=sizes.hq // ranks, hk=kv_heads), links)
    return {name: Estimate(own.pairs, moved + own.bytes_received, seconds + own.seconds,
                           seconds + own.backward_seconds, own.groups)
            for name, own in found.items() if name != "ulysses"}


def _exchanged(longest: int, sizes: Sizes, ranks: int) -> int:
    """Return the bytes that a rank receives to exchange such a shard for heads, and back."""
    of_row = sizes.b * (sizes.d + sizes.dv) * sizes.itemsize * (sizes.hq + max(sizes.hk, ranks)) // ranks
    return of_row * (longest * (ranks - 1))


def _exchange_seconds(moved: int, longest: int, sizes: Sizes, links: Links) -> float:
    """Return the seconds in which a rank receives so many bytes, and copies q, k, v and out before and behind that."""
    copied = 4 * longest * sizes.b * (sizes.hq + sizes.hk) * (sizes.d + sizes.dv) * sizes.itemsize
    return moved / links.bandwidth + 2 * links.latency + copied / links.memory + 4 * links.call


def _rows_received(steps: tuple[Step, ...], rank: int) -> int:
    return sum(len(part.rows) for step in steps for part in step.parts if part.rank != rank)


def _results(steps: tuple[Step, ...], rows: int, *, rounds: bool) -> int:
    """Return how often rows of the blocks' results are read and written, see :class:`_Counts`."""
    segments = [segment for blocks in segments_of(steps, rows).of_blocks for own in blocks for segment in own]
    merged = sum(len(segment.rows) for segment in segments if not segment.is_first)
    alone = sum(len(segment.rows) for segment in segments if segment.is_first and segment.is_last)
    return 3 * merged + (2 * alone if rounds and merged else 0)


def _pairs_of(problem: Problem, rank: int) -> int:
    return sum(_visible_pairs(one) for one in rectangles_of(problem, rank, Span(0, problem.keys.length)))


def _visible_pairs(block: Rectangle) -> int:
    """Return how many pairs a block shows; with exceptions an estimate from rows at even distances."""
    rows, columns = len(block.queries), len(block.keys)
    if not block.mask.is_bounded:
        return rows * columns
    band = block.mask.band(rows, columns)
    if not block.mask.has_exceptions:
        return band.visible_pairs(rows, columns)
    count = min(rows, _SAMPLED_ROWS)
    sampled = [(2 * number + 1) * rows // (2 * count) for number in range(count)]
    seen = sum(len(span) for row in sampled for span in band.key_spans(Span(row, row + 1), columns))
    return seen * rows // count
