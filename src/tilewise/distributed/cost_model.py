"""Which schedule: an estimate of each one's time from what its slowest rank computes, sends and waits for.

    ring        max(compute, keys received / bandwidth) + merging of partial results + a latency a step with messages
    all_gather  max(compute, keys received / bandwidth) + the first group of heads' keys + a latency a group
    ulysses     compute + (q, k and v one way, out the other) / bandwidth + two latencies + copies before and behind

and for each call what it costs beside its work. A ring has one for each block of its plan, an all_gather one for each
group of heads and piece of a rank's queries, and ulysses one, and one more for each of the four tensors exchanged;
where its ranks share heads of keys and a mask has pieces, it has more than are counted.

``compute`` is of the rank with the most visible pairs: of its layout for ring and all_gather, all pairs divided by the
number of ranks for ulysses, whose ranks have the whole sequence. On a mesh of two dims, the exchange of heads
comes before ring and all_gather, which then have fewer heads and longer shards. Keys are those that the mask lets a
rank's queries see. The numbers are of the forward pass; the backward pass sends and computes more of each, in similar
proportions, but for the keys of a ring's last step, which are kept.
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
_SAMPLED_ROWS = 32  # of each block, from whose visible keys its pairs are estimated
GROUPS = 4  # of heads in an all_gather, where so many divide them


@dataclass(frozen=True)
class Links:
    """What a time is estimated with: round numbers of one GPU of the H100 class, assumed and not measured.

    Attributes:
        flops: of attention a second and rank.
        bandwidth: bytes that a rank receives a second.
        memory: bytes that a rank's memory moves a second.
        latency: seconds until a message arrives, however short.
        call: seconds that a call takes beside its work: the host's, small kernels beside the large one, and the last
            tiles, which do not fill a GPU.
    """

    flops: float = 500e12
    bandwidth: float = 350e9
    memory: float = 3e12
    latency: float = 15e-6
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


@dataclass(frozen=True)
class Estimate:
    """A schedule's forward pass on its slowest rank.

    Attributes:
        pairs: visible (query, key) pairs that the rank computes, of one head.
        bytes_received: by the rank.
        seconds: the model's time.
    """

    pairs: int
    bytes_received: int
    seconds: float


def groups_of(kv_heads: int) -> int:
    """Return how many groups of heads an all_gather walks through."""
    return max(count for count in range(1, GROUPS + 1) if kv_heads % count == 0)


@registered
@lru_cache(maxsize=256)
def estimates(problem: Problem, sizes: Sizes, links: Links) -> dict[str, Estimate]:
    """Estimate each schedule; whether it takes the call is another question."""
    ranks = problem.ranks
    pairs = [_pairs_of(problem, rank) for rank in range(ranks)]
    plans = [cached_ring_plan(problem, rank) for rank in range(ranks)]
    keys = max(_rows_received(steps, rank) for rank, steps in enumerate(plans))
    waits = max(sum(bool(step.received(rank)) for step in steps) for rank, steps in enumerate(plans))
    merged = max(_rows_merged(steps, problem.queries.shard_length(rank)) for rank, steps in enumerate(plans))
    blocks = max(sum(len(step.blocks) for step in steps) for steps in plans)
    pieces = max(map(len, problem.queries.pieces))
    of_key = sizes.b * sizes.hk * (sizes.d + sizes.dv) * sizes.itemsize
    of_pair = 2 * sizes.b * sizes.hq * (sizes.d + sizes.dv)
    longest = max(problem.queries.shard_length(rank) for rank in range(ranks))
    received, compute = keys * of_key, max(pairs) * of_pair / links.flops
    overlapped = max(compute, received / links.bandwidth)
    # A result is read and written in float32 and a part of it is read, or in float64.
    merging = merged * sizes.b * sizes.hq * sizes.dv * 3 * max(4, sizes.itemsize) / links.memory
    groups = groups_of(sizes.hk)
    first_group = received / groups / links.bandwidth
    moved = _exchanged(longest, sizes, ranks)
    exchange = _exchange_seconds(moved, longest, sizes, links)
    even = -(-sum(pairs) // ranks)
    return {
        "ring": Estimate(max(pairs), received, overlapped + merging + waits * links.latency + blocks * links.call),
        "all_gather": Estimate(max(pairs), received, overlapped + first_group
                               + groups * (links.latency + pieces * links.call)),
        "ulysses": Estimate(even, moved, even * of_pair / links.flops + exchange + links.call)}


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
    return {name: Estimate(own.pairs, moved + own.bytes_received, seconds + own.seconds)
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


def _rows_merged(steps: tuple[Step, ...], rows: int) -> int:
    """Return how many of the blocks' rows of results are added to others that came before."""
    return sum(len(segment.rows) for blocks in segments_of(steps, rows).of_blocks for segments in blocks
               for segment in segments if not segment.is_first)


def _pairs_of(problem: Problem, rank: int) -> int:
    return sum(_visible_pairs(one) for one in rectangles_of(problem, rank, Span(0, problem.keys.length)))


def _visible_pairs(block: Rectangle) -> int:
    """Estimate how many pairs a block shows, from rows at even distances; exactly, of as few rows or of a full one."""
    rows, columns = len(block.queries), len(block.keys)
    if not block.mask.is_bounded:
        return rows * columns
    count = min(rows, _SAMPLED_ROWS)
    band = block.mask.band(rows, columns)
    sampled = [(2 * number + 1) * rows // (2 * count) for number in range(count)]
    seen = sum(len(span) for row in sampled for span in band.key_spans(Span(row, row + 1), columns))
    return seen * rows // count
