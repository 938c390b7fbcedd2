"""Philox4x32 in the Hopper kernels, which dropout draws its random numbers by (maths.md, eq. 19)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROUNDS = gl.constexpr(7)  # Salmon et al., 2011, table 2: passes BigCrush
FACTORS = gl.constexpr((0xD2511F53, 0xCD9E8D57))
KEY_STEPS = gl.constexpr((0x9E3779B9, 0xBB67AE85))


@gluon.jit
def philox_round(c0, c1, c2, c3, k0, k1):
    """One round. A word has no more dims than what it depends on, at first none, or one."""
    from_a = c0.to(gl.uint64) * FACTORS[0]
    from_c = c2.to(gl.uint64) * FACTORS[1]
    return ((from_c >> 32).to(gl.uint32) ^ c1 ^ k0, from_c.to(gl.uint32), (from_a >> 32).to(gl.uint32) ^ c3 ^ k1,
            from_a.to(gl.uint32))
