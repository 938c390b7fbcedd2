"""The backward pass: a kernel for each range of head dims (d64, d128, d192, d256), dQ's own, and a bias's gradient."""
