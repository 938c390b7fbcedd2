"""Triton kernels: forward, delta, dK/dV and dQ. Importing this package imports Triton."""
