"""A score function of one's own: a relative position bias read from a small table, never spread over all pairs.

Usage: ``python examples/score_function.py --length 1024``
"""

import argparse
import sys

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit("this example writes functions in Triton, which is not installed: pip install 'tilewise[triton]'")

import tilewise as tw
from tilewise.functions import MaskFunction, ScoreFunction

REACH = tl.constexpr(128)  # distances beyond share the last entry


@triton.jit
def relative_bias(score, batch, head, q_idx, k_idx, table):
    """Add table[head, distance]; inlined in the kernels, where the table comes as a pointer."""
    distance = tl.minimum(tl.maximum(q_idx - k_idx, 0), REACH)
    return score + tl.load(table + head * (REACH + 1) + distance)


def relative_bias_in_torch(score, batch, head, q_idx, k_idx, table):
    """Do the same with tensors; the indices broadcast to the score's (b, hq, queries, keys)."""
    return score + table[head, (q_idx - k_idx).clamp(0, REACH.value)]


@triton.jit
def every_fourth(batch, head, q_idx, k_idx):
    """See every fourth key back from the query, and those nearby."""
    return ((q_idx - k_idx) % 4 == 0) | (q_idx - k_idx < 8)


def every_fourth_in_torch(batch, head, q_idx, k_idx):
    """Do the same with tensors."""
    return ((q_idx - k_idx) % 4 == 0) | (q_idx - k_idx < 8)


def main(arguments=None):
    """Attend with both functions, and compare with a bias and a boolean mask of every pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, options.length, 64, device=options.device, requires_grad=True) for _ in range(3))
    table = torch.randn(4, REACH.value + 1, device=options.device)
    score_function = ScoreFunction(relative_bias, relative_bias_in_torch, tensors=(table,))
    mask = tw.causal() & MaskFunction(every_fourth, every_fourth_in_torch)
    print(mask.show(12, 12))
    out = tw.attention(q, k, v, score_function=score_function, mask=mask)

    positions = torch.arange(options.length, device=options.device)
    distance = positions[:, None] - positions
    spread = tw.attention(q, k, v, bias=table[:, distance.clamp(0, REACH.value)],
                          mask=mask.visible(options.length, options.length).to(options.device))
    error = max((one - other).abs().max().item() for one, other in (
        (out, spread), *zip(*(torch.autograd.grad(each.sum(), (q, k, v)) for each in (out, spread)), strict=True)))
    backend = tw.explain(q, k, v, score_function=score_function, mask=mask).forward
    same = ", the same bits" if error == 0 else ""
    print(f"in the backend {backend!r}, largest difference from a bias of every pair, gradients included: "
          f"{error:.1e}{same}")
    return error


if __name__ == "__main__":
    main()
