"""The backward kernel's products that begin from nothing: S and dP, keys as rows, and dQ (maths.md, section 6)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.kernels.gluon.hopper_tails import begin_with


@gluon.jit
def issue_pairs(own, streamed, rows, turn, slot, WHICH: gl.constexpr, C: gl.constexpr):
    """Issue Sᵀ = K·Qᵀ (WHICH 0), or dPᵀ = V·dOᵀ (1), of a turn; with C.TAILS less lse / scale, or delta.

    own: the warpgroup's keys or values; streamed: tiles of queries or their dO; slot: of the turn.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.QUERIES, 16])
    start = gl.full([64, C.QUERIES], 0.0, gl.float32, layout=LAYOUT)
    right = streamed.index(slot).reshape([C.QUERIES, C.WIDTH]).permute((1, 0))
    if C.TAILS:
        start = begin_with(rows, turn % C.STAGES, WHICH, start)
    return warpgroup_mma(own, right, start, use_acc=C.TAILS, is_async=True)


@gluon.jit
def issue_dq(k_tiles, dscores_tiles, half, OWN: gl.constexpr, C: gl.constexpr):
    """Issue a warpgroup's part of dQ = dS·K: half its columns or, of 128 queries, half its rows."""
    COLUMNS: gl.constexpr = C.WIDTH // 2 if C.QUERIES == 64 else C.WIDTH
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, layout=LAYOUT)
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        dscores = dscores_tiles.index(2 * i + half)
        k = k_tiles.index(i).reshape([64, C.WIDTH])
        if C.QUERIES == 64:
            k = k.slice(OWN * COLUMNS, COLUMNS, 1)
        else:
            dscores = dscores.slice(OWN * 64, 64, 1)
        dq = warpgroup_mma(dscores.permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq
