"""Flash attention's forward pass in one Triton kernel. No GPU: TRITON_INTERPRET=1."""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

BLOCK_M, BLOCK_N = tl.constexpr(64), tl.constexpr(32)  # queries of a tile, keys of a block


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, length, scale_log2,
                     CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One program: a tile of queries of one head; (heads, length, HEAD_DIM), dense."""
    head = tl.program_id(1).to(tl.int64) * length * HEAD_DIM  # where this head begins
    first = tl.program_id(0) * BLOCK_M
    offs_m, offs_d = first + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q_offsets = head + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=offs_m[:, None] < length, other=0.0)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    row_sum = tl.zeros((BLOCK_M,), tl.float32)  # the sum of 2^(score - row_max) so far
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)  # the same, each term times its V
    end = tl.minimum(length, first + BLOCK_M) if CAUSAL else length  # no key from here on
    for start in range(0, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        kv_offsets = head + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=offs_n[:, None] < length, other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=offs_n[:, None] < length, other=0.0)
        visible = offs_n[None, :] <= offs_m[:, None] if CAUSAL else offs_n[None, :] < length
        scores = tl.where(visible, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # finite: all see the first key
        decay = tl.exp2(row_max - new_max)  # moves the sums to the new maximum
        probs = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * decay + tl.sum(probs, 1)
        acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v)
        row_max = new_max
    out = acc / row_sum[:, None]  # the softmax's denominator comes last
    tl.store(out_ptr + q_offsets, out.to(q.dtype), mask=offs_m[:, None] < length)


def attention(q, k, v, causal=False):
    """Attention of (heads, length, head dim), dense; 16 and other powers of two."""
    (heads, length, head_dim), out = q.shape, torch.empty_like(q)
    grid, log2e = (triton.cdiv(length, BLOCK_M.value), heads), 1.4426950408889634
    attention_kernel[grid](q, k, v, out, length, head_dim**-0.5 * log2e, causal, head_dim)
    return out


def main():
    """Check the kernel against torch's operator, without a mask and with a causal one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 4, 200, 64, dtype=torch.float16, device=device)
    for causal in (False, True):
        expected = scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(attention(q, k, v, causal), expected, rtol=0, atol=4e-3)


if __name__ == "__main__":
    main()
    print("The kernel computes what torch's operator does.")
