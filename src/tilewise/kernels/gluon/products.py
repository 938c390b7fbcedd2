"""A warpgroup's products in the forward pass: S = Q·Kᵀ and O += P·V, and O itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.kernels.gluon.softmax import as_operand


@gluon.constexpr_function
def products_of(widths, held):
    """The products that make S, of each the piece of Q and K, its first column and how many: powers of two.

    The last ``held`` columns, whose Q registers hold, are the last one.
    """
    found = []
    for piece, width in enumerate(widths):
        end = width - held if piece == len(widths) - 1 else width
        begin = 0
        while begin < end:
            columns = 1 << ((end - begin).bit_length() - 1)
            found.append((piece, begin, columns))
            begin += columns
    return [*found, (len(widths) - 1, widths[-1] - held, held)] if held else found


@gluon.jit
def load_q_fragments(q_tiles, q_stage, C: gl.constexpr):
    """Load the last C.HELD columns of Q into register fragments, two neighbours packed in 32 bits, as P's are."""
    if C.HELD > 0:
        PIECE: gl.constexpr = len(C.D) - 1
        WIDTH: gl.constexpr = C.D[PIECE]
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16]), 2)
        q = q_tiles[PIECE].index(q_stage).reshape([64, WIDTH]).slice(WIDTH - C.HELD, C.HELD, 1).load(LAYOUT)
        even, odd = q.reshape([64, C.HELD // 2, 2]).split()
        return (gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32,
                                          is_pure=True, pack=1),)
    else:
        return ()


@gluon.jit
def columns_of(tiles, stage, ROWS: gl.constexpr, PRODUCT: gl.constexpr, C: gl.constexpr):
    """The columns of Q or K in a stage that an MMA multiplies, by its number."""
    OWN: gl.constexpr = products_of(C.D, C.HELD)[PRODUCT]
    return tiles[OWN[0]].index(stage).reshape([ROWS, C.D[OWN[0]]]).slice(OWN[1], OWN[2], 1)


@gluon.jit
def issue_scores(q, k_tiles, stage, HALF: gl.constexpr, C: gl.constexpr):
    """Begin S = Q·Kᵀ, as many products as products_of says. HALF: of the first half of the keys alone."""
    BLOCK_N: gl.constexpr = C.BLOCK_N // 2 if HALF else C.BLOCK_N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    PRODUCTS: gl.constexpr = len(products_of(C.D, C.HELD))
    s = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
    for i in gl.static_range(PRODUCTS):
        if C.HELD > 0 and i == PRODUCTS - 1:
            rows = as_operand(q.fragments[0], k_tiles[0].dtype, gl.DotOperandLayout(0, S_LAYOUT, 2))
        else:
            rows = columns_of(q.tiles, q.stage, 64, i, C)
        k = columns_of(k_tiles, stage, C.BLOCK_N, i, C).slice(0, BLOCK_N, 0)
        s = warpgroup_mma(rows, k.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def issue_out(probs, v_tiles, stage, acc, C: gl.constexpr):
    """Begin O += P·V, a product a piece of the columns and part of the keys, as many as P has."""
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
    """Every piece of O times a number a row, if there is one."""
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
