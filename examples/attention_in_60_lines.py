"""Flash attention's forward pass in one Triton kernel; where there is no GPU, run it with TRITON_INTERPRET=1."""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

BLOCK_M, BLOCK_N = tl.constexpr(64), tl.constexpr(32)  # queries of a tile, keys of a block


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, length, scale, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One program computes out of BLOCK_M queries of one head; q, k, v and out: (heads, length, HEAD_DIM), dense."""
    head = tl.program_id(1).to(tl.int64) * length * HEAD_DIM  # where this head begins in each tensor
    first = tl.program_id(0) * BLOCK_M
    offs_m, offs_d = first + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q_offsets = head + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=offs_m[:, None] < length, other=0.0)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    row_sum = tl.zeros((BLOCK_M,), tl.float32)  # the sum of 2^(score - row_max) so far
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)  # the same sum, each term times its row of V
    end = tl.minimum(length, first + BLOCK_M) if CAUSAL else length  # no query of this tile sees a key from here on
    for start in range(0, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        kv_offsets = head + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=offs_n[:, None] < length, other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=offs_n[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)  # log2(e)
        visible = offs_n[None, :] < length
        if CAUSAL:
            visible = visible & (offs_n[None, :] <= offs_m[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # finite: every query sees the first key
        decay = tl.exp2(row_max - new_max)  # moves what was summed up to the new maximum
        probs = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * decay + tl.sum(probs, 1)
        acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    out = acc / row_sum[:, None]  # the softmax's denominator comes last
    tl.store(out_ptr + q_offsets, out.to(q.dtype), mask=offs_m[:, None] < length)


def attention(q, k, v, causal=False):
    """Attention of (heads, length, head dim) tensors, dense; the head dim is a power of two from 16 on."""
    (heads, length, head_dim), out = q.shape, torch.empty_like(q)
    grid = triton.cdiv(length, BLOCK_M.value), heads
    attention_kernel[grid](q, k, v, out, length, head_dim**-0.5, causal, head_dim)
    return out


def main():
    """Check the kernel against torch's operator, without a mask and with the causal one."""
    q, k, v = torch.randn(3, 4, 200, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    for causal in (False, True):
        torch.testing.assert_close(attention(q, k, v, causal), scaled_dot_product_attention(q, k, v, is_causal=causal))
    print("The kernel computes what torch's operator does, without a mask and with the causal one.")


if __name__ == "__main__":
    main()
