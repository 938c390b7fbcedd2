"""What of the Hopper backward kernels is chosen: of a closed set a kernel with its variant, and a schedule."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from tilewise.errors import InvalidInput
from tilewise.kernels.hopper import SHARED_MEMORY
from tilewise.problem import AttentionProblem

BLOCK_N = 128  # keys a tile, but for D256
LEAST_SCALE = 2.0**-40  # of scores whose lse comes in extra columns: lse / scale is a number, and far from the largest


class BackwardKernel(StrEnum):
    """The kernels, by head dim: ``D128_AUGMENTED_K`` and ``D128`` are two ways of hopper_backward_kernel."""

    D64 = "d64"
    D128_AUGMENTED_K = "d128_augmented_k"
    D128 = "d128"
    D192 = "d192"
    D256 = "d256"


class D64Variant(StrEnum):
    """What a CTA computes at head dims up to 64, and in which order dQ is accumulated.

    DYNAMIC_TILES: the tiles that the dynamic scheduler gives to a persistent CTA, which loads the next one's keys and
    values while dK and dV of the last are written; dQ in any order.
    DETERMINISTIC: one tile of keys; dQ in a fixed order, by dedicated warps, with two blocks in flight.
    HEAD_PERSISTENT: all tiles of a head, or every n-th tile with the other CTAs that share it; dQ stays in L2, in a
    fixed order.
    """

    DYNAMIC_TILES = "dynamic_tiles"
    DETERMINISTIC = "deterministic"
    HEAD_PERSISTENT = "head_persistent"


class D128AugmentedKVariant(StrEnum):
    """What a CTA computes at head dims of 65 to 128 with augmented K: it is persistent, and dQ passes shared memory.

    DYNAMIC_TILES: the tiles that the dynamic scheduler gives it. It loads the next one's keys and values while dK and
    dV of the last are written, by way of what dS and dQ are staged in; dQ in any order.
    HEAD_PERSISTENT: likewise all tiles of a head, whose dQ stays in L2.
    """

    DYNAMIC_TILES = "dynamic_tiles"
    HEAD_PERSISTENT = "head_persistent"


class D128Variant(StrEnum):
    """Where dQ is accumulated from at head dims up to 128 without augmented K.

    DQ_FROM_REGISTERS, DQ_STAGED: from registers, or through shared memory; in any order.
    DETERMINISTIC: through shared memory in a fixed order, by dedicated warps, with two blocks in flight.
    """

    DQ_FROM_REGISTERS = "dq_from_registers"
    DQ_STAGED = "dq_staged"
    DETERMINISTIC = "deterministic"


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig:
    """What the kernels' configs have in common; its subclasses are the closed set.

    Attributes:
        q_stages, dout_stages: tiles of q and of dout in flight, 64 queries each; powers of two, since every block
            divides by them.
    """

    kernel: ClassVar[BackwardKernel]
    _allowed: ClassVar[dict[str, tuple[Any, ...]]] = {"q_stages": (2, 4), "dout_stages": (1, 2, 4)}

    q_stages: int = 2
    dout_stages: int = 2

    def __post_init__(self) -> None:
        for name, allowed in self._allowed.items():
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")

    @property
    def block_n(self) -> int:
        """Keys of a tile: 64 a warpgroup."""
        return BLOCK_N

    @property
    def kv_stages(self) -> int:
        """Tiles of keys and values in flight."""
        return 1

    @property
    def s_ahead(self) -> bool:
        """Whether S of the next block is computed while dQ and dK of this one are."""
        return False

    @property
    def dq_from_registers(self) -> bool:
        """Whether dQ is accumulated from registers."""
        return False

    @property
    def deterministic(self) -> bool:
        """Whether dQ is accumulated in a fixed order: every bit is then the same on every run."""
        return False

    @property
    def augmented_k(self) -> bool:
        """Whether the tensor cores subtract lse and delta, which come as extra columns of the queries."""
        return False

    @property
    def dynamic_tiles(self) -> bool:
        """Whether CTAs are persistent, and the dynamic tile scheduler gives them their tiles."""
        return False

    @property
    def head_persistent(self) -> bool:
        """Whether a CTA has all keys of a head, or ``ctas_per_head`` of them do, and no other CTA adds to its dQ."""
        return False

    @property
    def ctas_per_head(self) -> int:
        """CTAs that share a head, if they are head-persistent."""
        return 1

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of q and k inside the tiles, and of v and dout, in chunks that are powers of two; 64 at least.

        Raises:
            InvalidInput: the kernel does not compute the problem.
        """
        raise NotImplementedError

    def bias_stages(self, problem: AttentionProblem) -> int:
        """Tiles of the bias in flight, 64 queries by a tile's keys each: two, one where two do not fit; 0 without one.

        Where not even one fits, :meth:`shared_bytes` is more than a CTA may have.
        """
        stage = _bias_bytes(problem)
        if stage == 0:
            return 0
        return 2 if self._bytes_without_bias(problem) + 2 * stage <= SHARED_MEMORY else 1

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: k, v, q, dout, dS twice, row stats, staged dQ, the bias; barriers take under a KiB."""
        return self._bytes_without_bias(problem) + self.bias_stages(problem) * _bias_bytes(problem)

    def fits(self, problem: AttentionProblem) -> bool:
        """Whether a CTA may have the shared memory that the kernel needs for the problem."""
        return self.shared_bytes(problem) <= SHARED_MEMORY

    def _bytes_without_bias(self, problem: AttentionProblem) -> int:
        (d, dv), size = map(sum, self.columns(problem)), problem.dtype.itemsize
        tiles = size * (self.kv_stages * BLOCK_N * (d + dv) + 64 * (self.q_stages * d + self.dout_stages * dv))
        # A block's extra columns, and those that select them; or lse and delta.
        row_stats = 64 * (64 + 32 * self.q_stages) if self.augmented_k else 8 * 64 * self.q_stages
        return tiles + size * 4 * 64 * 64 + row_stats + 64 * d * self._dq_bytes(size) + 1024

    def _dq_bytes(self, size: int) -> int:
        """Bytes that an element of a block's dQ takes where it is staged. size: of an element of the result."""
        if self.dq_from_registers:
            return 0
        return 8 if self.deterministic else 4

    def _refusal(self, problem: AttentionProblem, allowed: str) -> InvalidInput:
        return InvalidInput(f"kernel={self.kernel} for {problem}; allowed are {allowed}.")


@dataclass(frozen=True, slots=True)
class HopperD64Config(HopperBackwardConfig):
    """hopper_backward_d64_kernel, for calls with augmented K at head dims up to 64: a third warpgroup computes dQ.

    Attributes:
        q_stages, dout_stages: as of every kernel; dout has 2 at least, since two blocks are in flight.
        variant: what a CTA computes, and in which order dQ is accumulated.
        ctas_per_head: of HEAD_PERSISTENT, CTAs that share a head: they take its tiles of keys by turns, and add to a
            block of dQ in their order. With more of them fewer heads' dQ is in flight.
    """

    kernel: ClassVar[BackwardKernel] = BackwardKernel.D64
    _allowed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "q_stages": (2, 4), "dout_stages": (2, 4), "variant": tuple(D64Variant), "ctas_per_head": (1, 2, 4)}

    q_stages: int = 4
    dout_stages: int = 4
    variant: D64Variant = D64Variant.DYNAMIC_TILES
    ctas_per_head: int = 1

    def __post_init__(self) -> None:
        HopperBackwardConfig.__post_init__(self)
        if self.ctas_per_head > 1 and not self.head_persistent:
            raise InvalidInput(f"ctas_per_head={self.ctas_per_head} with variant={self.variant}; allowed is 1, or "
                               f"variant={D64Variant.HEAD_PERSISTENT}.")

    @property
    def kv_stages(self) -> int:
        """Two of persistent CTAs."""
        return 1 if self.variant == D64Variant.DETERMINISTIC else 2

    @property
    def deterministic(self) -> bool:
        """Whether dQ is accumulated in a fixed order."""
        return self.variant == D64Variant.DETERMINISTIC or self.head_persistent

    @property
    def augmented_k(self) -> bool:
        """Always."""
        return True

    @property
    def dynamic_tiles(self) -> bool:
        """Whether the dynamic tile scheduler gives CTAs their tiles."""
        return self.variant == D64Variant.DYNAMIC_TILES

    @property
    def head_persistent(self) -> bool:
        """Whether CTAs have all keys of a head."""
        return self.variant == D64Variant.HEAD_PERSISTENT

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """64 columns each."""
        if max(problem.d, problem.dv) > 64 or not augmented_k_fits(problem):
            raise self._refusal(problem, f"head dims up to 64, {_FOR_AUGMENTED_K}")
        return (64,), (64,)

    def _dq_bytes(self, size: int) -> int:
        """Two blocks in order, but for one CTA a head, which has one, and another as it is written."""
        if not self.head_persistent:
            return HopperBackwardConfig._dq_bytes(self, size)
        return (8 if self.ctas_per_head > 1 else 4) + size


@dataclass(frozen=True, slots=True)
class HopperD128AugmentedKConfig(HopperBackwardConfig):
    """hopper_backward_kernel with augmented K, at head dims of 65 to 128: two warpgroups have 64 keys each.

    Attributes:
        q_stages, dout_stages: as of every kernel.
        variant: what a CTA computes.
    """

    kernel: ClassVar[BackwardKernel] = BackwardKernel.D128_AUGMENTED_K
    _allowed: ClassVar[dict[str, tuple[Any, ...]]] = HopperBackwardConfig._allowed | {
        "variant": tuple(D128AugmentedKVariant)}

    variant: D128AugmentedKVariant = D128AugmentedKVariant.DYNAMIC_TILES

    @property
    def augmented_k(self) -> bool:
        """Always."""
        return True

    @property
    def dynamic_tiles(self) -> bool:
        """Whether the dynamic tile scheduler gives CTAs their tiles."""
        return self.variant == D128AugmentedKVariant.DYNAMIC_TILES

    @property
    def head_persistent(self) -> bool:
        """Whether CTAs have all keys of a head."""
        return self.variant == D128AugmentedKVariant.HEAD_PERSISTENT

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """128 columns each."""
        if not 64 < max(problem.d, problem.dv) <= 128 or not augmented_k_fits(problem):
            raise self._refusal(problem, f"head dims of 65 to 128, {_FOR_AUGMENTED_K}")
        return (128,), (128,)


@dataclass(frozen=True, slots=True)
class HopperD128Config(HopperBackwardConfig):
    """hopper_backward_kernel without augmented K, at head dims up to 128: what ``augmented_k_fits`` refuses.

    Attributes:
        q_stages, dout_stages: as of every kernel.
        s_ahead: whether S of the next block is computed while dQ and dK of this one are.
        variant: where dQ is accumulated from, and in which order.
    """

    kernel: ClassVar[BackwardKernel] = BackwardKernel.D128
    _allowed: ClassVar[dict[str, tuple[Any, ...]]] = HopperBackwardConfig._allowed | {
        "s_ahead": (False, True), "variant": tuple(D128Variant)}

    s_ahead: bool = False
    variant: D128Variant = D128Variant.DQ_STAGED

    @property
    def dq_from_registers(self) -> bool:
        """Whether dQ is accumulated from registers."""
        return self.variant == D128Variant.DQ_FROM_REGISTERS

    @property
    def deterministic(self) -> bool:
        """Whether dQ is accumulated in a fixed order."""
        return self.variant == D128Variant.DETERMINISTIC

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """64 or 128 columns each."""
        if max(problem.d, problem.dv) > 128:
            raise self._refusal(problem, "head dims up to 128")
        if problem.scores.bias is not None and problem.sequences.are_data:
            raise self._refusal(problem, "a bias where lengths are no data")
        return ((max(64, problem.width),),) * 2


@dataclass(frozen=True, slots=True)
class HopperD192Config(HopperBackwardConfig):
    """hopper_backward_d192_kernel, at head dims up to 192 of q and k and 128 of v: dQ is accumulated from registers.

    Each of two warpgroups has 64 keys, and in its registers all columns of their dK and dV.
    """

    kernel: ClassVar[BackwardKernel] = BackwardKernel.D192

    @property
    def dq_from_registers(self) -> bool:
        """Always."""
        return True

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """128 + 64 columns of q and k, 128 of v and dout."""
        if problem.d <= 128 or not dk_dv_fit(problem):
            raise self._refusal(problem, "head dims of 129 to 192 of q and k, and up to 128 of v")
        if problem.scores.bias is not None:
            raise self._refusal(problem, _NO_BIAS)
        if not owns_keys(problem):
            raise self._refusal(problem, "causal masks and windows, no softcap, dropout or lengths that are data")
        return (128, 64), (128,)


@dataclass(frozen=True, slots=True)
class HopperD256Config(HopperBackwardConfig):
    """hopper_backward_d256_kernel and hopper_dq_d256_kernel, at any head dims up to 256, without a bias.

    In the former two warpgroups share 64 keys, one makes P and dV and the other dS and dK; in the latter 64 queries a
    warpgroup stay. Nothing is accumulated in global memory, and every bit is the same on every run.
    """

    kernel: ClassVar[BackwardKernel] = BackwardKernel.D256

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return 64

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """64, 128, 128 + 64 or 256 columns of q and k, and of v and dout."""
        if problem.scores.bias is not None:
            raise self._refusal(problem, _NO_BIAS)
        return _chunks_of(problem.d), _chunks_of(problem.dv)

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of the kernel that takes more; barriers take under a KiB.

        For dK and dV k, v, q, dout, lse, delta and P in float32; for dQ 128 rows of q and dout, two tiles of k and one
        of v.
        """
        (d, dv), size = map(sum, self.columns(problem)), problem.dtype.itemsize
        of_keys = 64 * (size * (d + dv + self.q_stages * d + self.dout_stages * dv) + 4 * 64 + 8 * self.q_stages)
        return max(of_keys, size * 64 * (4 * d + 3 * dv)) + 1024


@dataclass(frozen=True, slots=True)
class HopperBackwardSchedule:
    """In which order the kernels go through a call's heads.

    Attributes:
        kv_heads_per_swizzle: kv heads whose tiles are scheduled together, so that q, dout and the dQ accumulator of
            their query heads stay in L2; 1 where CTAs own heads.
        dq_heads_per_swizzle: of hopper_dq_d256_kernel, query heads whose keys and values stay in L2.
        group_splits: among how many tiles of the same keys the query heads of a group are split, a divisor of their
            number. Each counts as a kv head above, and writes dk and dv in float32; their sums follow.
    """

    kv_heads_per_swizzle: int
    dq_heads_per_swizzle: int = 1
    group_splits: int = 1

    def __post_init__(self) -> None:
        for name in ("kv_heads_per_swizzle", "dq_heads_per_swizzle", "group_splits"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed is 1 or more.")

    @property
    def kv_head_divisor(self) -> int | None:
        """By what a kernel divides a head of dk and dv to find its head of k; None: they are the same."""
        return None if self.group_splits == 1 else self.group_splits


@dataclass(frozen=True, slots=True)
class HopperDbiasConfig:
    """The kernel that sums dS of entries that share a bias: a tile of 128 x 128 pairs stays; entries stream.

    Attributes:
        q_stages: entries whose q and dout are in flight.
        stages: blocks of 64 keys in flight, k and v.
    """

    q_stages: int = 2
    stages: int = 2

    def __post_init__(self) -> None:
        for name, allowed in (("q_stages", (1, 2)), ("stages", (2, 3, 4))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")

    def columns(self, problem: AttentionProblem) -> int:
        """Columns of a head inside the tiles: a row of a tile is 128 bytes at least."""
        return max(64, problem.width)

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: q and dout, k and v, the bias of the tile; barriers and its place take under a KiB."""
        bias = problem.scores.bias
        rows = 4 * self.q_stages + 2 * self.stages
        pairs = 256 * (bias.dtype.itemsize if bias else 0)
        return 64 * (problem.dtype.itemsize * rows * self.columns(problem) + pairs) + 1024


BACKWARD_CONFIGS: dict[BackwardKernel, type[HopperBackwardConfig]] = {kind.kernel: kind for kind in (
    HopperD64Config, HopperD128AugmentedKConfig, HopperD128Config, HopperD192Config, HopperD256Config)}
_NO_BIAS = "calls without a bias"
_FOR_AUGMENTED_K = ("a scale of 2^-40 or more, and no softcap, score function, dropout, lengths that are data or ALiBi "
                    "with keys ahead")


def dk_dv_fit(problem: AttentionProblem) -> bool:
    """Whether a warpgroup's registers hold all columns of dK and dV of 64 keys."""
    return problem.d <= 192 and problem.dv <= 128


def owns_keys(problem: AttentionProblem) -> bool:
    """Whether the kernel of head dims 129 to 192, where each warpgroup has keys of its own, takes such a call."""
    return (problem.d > 128 and dk_dv_fit(problem) and problem.scores.softcap is None and not problem.scores.dropout_p
            and not problem.sequences.are_data and problem.is_banded)


def augmented_k_fits(problem: AttentionProblem) -> bool:
    """Whether lse and delta may be subtracted by products: nothing else may come between these and P or dS.

    Extra columns hold lse / scale. Where lengths are data, tiles hold queries of other sequences. ALiBi's distance is
    subtracted too, where it needs no absolute value.
    """
    scores = problem.scores
    return (max(problem.d, problem.dv) <= 128 and problem.scale >= LEAST_SCALE and scores.softcap is None
            and scores.score_function is None and (scores.alibi_slopes is None or not problem.sees_ahead)
            and not scores.dropout_p and not problem.sequences.are_data)


def _bias_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of 64 queries' bias for a tile of keys; 0 without a bias."""
    bias = problem.scores.bias
    return 0 if bias is None else 64 * BLOCK_N * bias.dtype.itemsize


def _chunks_of(dim: int) -> tuple[int, ...]:
    return next(chunks for chunks in ((64,), (128,), (128, 64), (256,)) if dim <= sum(chunks))
