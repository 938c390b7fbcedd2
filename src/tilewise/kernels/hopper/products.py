"""A warpgroup's products in the forward pass: S = Q·Kᵀ and O += P·V, and O itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.kernels.hopper.softmax import as_operand


@gluon.jit
def issue_scores(q, k_tiles, stage, C: gl.constexpr):
    """Begin S = Q·Kᵀ, a product a chunk of the columns."""
    s = gl.full([64, C.BLOCK_N], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16]))
    for i in gl.static_range(len(C.D)):
        rows = q.tiles[i].index(q.stage).reshape([64, C.D[i]])
        k = k_tiles[i].index(stage).reshape([C.BLOCK_N, C.D[i]])
        s = warpgroup_mma(rows, k.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def issue_out(probs, v_tiles, stage, acc, C: gl.constexpr):
    """Begin O += P·V, a product a chunk of the columns and part of the keys."""
    BLOCK_N: gl.constexpr = C.BLOCK_N // C.PARTS
    pending = ()
    for i in gl.static_range(len(C.DV)):
        v = v_tiles[i].index(stage).reshape([C.BLOCK_N, C.DV[i]])
        total = acc[i]
        for j in gl.static_range(len(probs)):
            p = as_operand(probs[j], v.dtype, gl.DotOperandLayout(0, acc[i].type.layout, 2))
            total = warpgroup_mma(p, v.slice(BLOCK_N * j, BLOCK_N, 0), total, is_async=True)
        pending = pending + (total,)
    return pending


@gluon.jit
def finish(pending, LEFT: gl.constexpr):
    """Wait until all products but the last LEFT are done, and return the results of those that were asked for."""
    if len(pending) == 1:
        return (warpgroup_mma_wait(LEFT, deps=pending),)
    else:
        return warpgroup_mma_wait(LEFT, deps=pending)


@gluon.jit
def rescale(acc, factor):
    """Every chunk of O times a number a row, if there is one."""
    if factor is None:
        return acc
    else:
        scaled = ()
        for i in gl.static_range(len(acc)):
            own = gl.convert_layout(factor, gl.SliceLayout(1, acc[i].type.layout))
            scaled = scaled + (acc[i] * own[:, None],)
        return scaled


@gluon.jit
def zeros(C: gl.constexpr):
    """O before the first step."""
    acc = ()
    for i in gl.static_range(len(C.DV)):
        acc = acc + (gl.full([64, C.DV[i]], 0.0, gl.float32,
                             layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV[i], 16])),)
    return acc
