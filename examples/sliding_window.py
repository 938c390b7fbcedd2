"""A sliding window: what it hides, that the result is exact, and what it saves.

Usage: ``python examples/sliding_window.py --length 8192 --window 256``
"""

import argparse
import time

import torch

import tilewise as tw


def milliseconds(device, call):
    """Best of three runs, after one to warm up."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])


def main(arguments=None):
    """Draw the mask, compare with dense attention, and time it against the causal mask without a window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256, help="keys that a query sees, its own included")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    print("window(2, 0): each query sees itself and the two keys before it")
    print(tw.window(2, 0).show(6, 6))

    window = tw.causal() & tw.window(options.window - 1, 0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, options.length, 64, device=options.device) for _ in range(3))
    out = tw.attention(q, k, v, mask=window)

    # Dense attention on the last queries alone: the whole score matrix would be length x length.
    last = min(128, options.length)
    scores = q[:, :, -last:] @ k.transpose(2, 3) / 64**0.5
    hidden = ~window.visible(options.length, options.length, options.device)[-last:]
    dense = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    error = (out[:, :, -last:] - dense).abs().max().item()
    print(f"\n{window}: largest difference from dense attention {error:.1e}")

    print(f"{options.length} tokens:")
    for name, mask in (("window", window), ("causal without a window", tw.causal())):
        time_taken = milliseconds(options.device, lambda mask=mask: tw.attention(q, k, v, mask=mask))
        print(f"  {name}: {time_taken:.1f} ms in the backend {tw.explain(q, k, v, mask=mask).forward!r}")
    return error


if __name__ == "__main__":
    main()
