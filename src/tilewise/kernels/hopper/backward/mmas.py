"""MMAs of the Hopper backward: S and dP, keys as rows, and dQ (maths.md, section 6)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.kernels.hopper.backward.augmented_k import issue_augmented
from tilewise.kernels.hopper.mask_ranges import QUERIES

SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # of 64 keys by 64 queries

# Which of the two MMAs issue_s_or_dp issues.
SCORES: gl.constexpr = gl.constexpr(0)
DPROBS: gl.constexpr = gl.constexpr(1)


@gluon.jit
def issue_s_or_dp(left, streamed, row_stats, count, stage, OPERAND: gl.constexpr, C: gl.constexpr):
    """Issue Sᵀ = K·Qᵀ (SCORES) or dPᵀ = V·dOᵀ (DPROBS) of iteration ``count`` of the Q pipe.

    left: the warpgroup's K or V; streamed: the tiles of Q or dO, of which ``stage`` is this iteration's. With
    C.AUGMENTED_K lse / scale is subtracted from S, and delta from dP.
    """
    start = gl.full([64, QUERIES], 0.0, gl.float32, layout=SCORE_LAYOUT)
    right = streamed.index(stage).reshape([QUERIES, C.WIDTH]).permute((1, 0))
    if C.AUGMENTED_K:
        start = issue_augmented(row_stats, count % C.Q_STAGES, OPERAND, start)
    return warpgroup_mma(left, right, start, use_acc=C.AUGMENTED_K, is_async=True)


@gluon.jit
def dscores_index(stage, consumer, SIDE_BY_SIDE: gl.constexpr, C: gl.constexpr):
    """Return where dS of a consumer lies: of its two stages, which are SIDE_BY_SIDE where they also stage dK."""
    if SIDE_BY_SIDE:
        place = 2 * consumer + stage
    else:
        place = stage * C.CONSUMERS + consumer
    return place


@gluon.jit
def issue_dq(k_tiles, dscores_tiles, ds_stage, first, PART: gl.constexpr, PARTS: gl.constexpr,
             SIDE_BY_SIDE: gl.constexpr, C: gl.constexpr, start=None):
    """Issue one of PARTS parts of dQ = dS·K, which share its columns; an MMA for each consumer's keys.

    first: which tile of K has the first keys. SIDE_BY_SIDE: as of ``dscores_index``. start: the accumulator that dQ
    begins from, or None for zero.
    """
    COLUMNS: gl.constexpr = C.WIDTH // PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, layout=LAYOUT) if start is None else start
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        dscores = dscores_tiles.index(dscores_index(ds_stage, i, SIDE_BY_SIDE, C))
        k = k_tiles.index(first + i).reshape([64, C.WIDTH]).slice(PART * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(dscores.permute((1, 0)), k, dq, use_acc=i > 0 or start is not None, is_async=True)
    return dq
