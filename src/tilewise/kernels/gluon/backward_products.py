"""The backward kernel's products that begin from nothing: S and dP, keys as rows, and dQ (maths.md, section 6)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.kernels.gluon.hopper_tails import begin_with
from tilewise.kernels.gluon.tiles import QUERIES


@gluon.jit
def issue_pairs(own, streamed, rows, turn, slot, WHICH: gl.constexpr, C: gl.constexpr):
    """Issue Sᵀ = K·Qᵀ (WHICH 0), or dPᵀ = V·dOᵀ (1), of a turn; with C.AUGMENTED_K less lse / scale, or delta.

    own: the warpgroup's keys or values; streamed: tiles of queries or their dO; slot: of the turn.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    start = gl.full([64, QUERIES], 0.0, gl.float32, layout=LAYOUT)
    right = streamed.index(slot).reshape([QUERIES, C.WIDTH]).permute((1, 0))
    if C.AUGMENTED_K:
        start = begin_with(rows, turn % C.KV_STAGES, WHICH, start)
    return warpgroup_mma(own, right, start, use_acc=C.AUGMENTED_K, is_async=True)


@gluon.jit
def dscores_slot(half, consumer, C: gl.constexpr):
    """Return where dS of a consumer lies. With C.PERSISTENT both of its tiles are side by side, and stage dK."""
    if C.PERSISTENT:
        slot = 2 * consumer + half
    else:
        slot = half * C.CONSUMERS + consumer
    return slot


@gluon.jit
def issue_dq(k_tiles, dscores_tiles, half, first, OWN: gl.constexpr, MAKERS: gl.constexpr, C: gl.constexpr,
             start=None):
    """Issue a part of dQ = dS·K: the columns of one of MAKERS warpgroups. first: the slot of the first keys.

    start: what it is added to, or None.
    """
    COLUMNS: gl.constexpr = C.WIDTH // MAKERS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, layout=LAYOUT) if start is None else start
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        dscores = dscores_tiles.index(dscores_slot(half, i, C))
        k = k_tiles.index(first + i).reshape([64, C.WIDTH]).slice(OWN * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(dscores.permute((1, 0)), k, dq, use_acc=i > 0 or start is not None, is_async=True)
    return dq
