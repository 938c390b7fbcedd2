"""Attention in a few lines: causal, with shared key/value heads, forward and backward."""

import torch

import tilewise as tw


def main() -> None:
    """Attend, differentiate, and ask which backend did it."""
    q = torch.randn(2, 8, 1000, 64, requires_grad=True)  # (batch, heads, positions, head dim); any length
    k, v = (torch.randn(2, 2, 1000, 64, requires_grad=True) for _ in range(2))  # 4 query heads share each

    out, lse = tw.attention(q, k, v, mask=tw.causal(), return_aux=("lse",))
    out.sum().backward()

    print(f"out {tuple(out.shape)}, lse {tuple(lse.shape)}, k.grad {tuple(k.grad.shape)}")
    print(tw.explain(q, k, v, mask=tw.causal()))


if __name__ == "__main__":
    main()
