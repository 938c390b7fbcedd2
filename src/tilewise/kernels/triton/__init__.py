"""Triton kernels: those that take every option, on every GPU.

Begin with forward.py, a program's whole way through its tile, beside maths.md; then primitives.py, whose formulas it
calls, and backward.py. Who sees whom is in bands.py, what changes a score in modifiers.py, which part of a call a
program works on in places.py, and how a problem becomes a launch in launch.py. Gradients of operands: sums.py,
pair_sums.py and dbias.py. Decoding: decode.py, cache.py and decode_launch.py. blanks.py serves cuDNN's kernels.

The modules with kernels import Triton; launch.py and sums.py do not.
"""
