"""Triton kernels: those that take every option, on every GPU.

Begin with forward.py, which computes one tile of queries, beside maths.md; then primitives.py, its formulas,
backward.py and dq.py. The kernels' arguments are in arguments.py, what they hand to their loops in tile_types.py. The
mask is in mask_ranges.py, score modifiers and dropout in modifiers.py, the tile that a CTA computes in
tile_scheduler.py, and how a problem becomes a launch in launch.py. Gradients of operands: operand_gradients.py,
bias_gradient.py and dbias.py. Decoding: decode.py, cache.py and decode_launch.py; combine.py combines the splits of the
Hopper forward kernel. zero_fill.py serves cuDNN's kernels. config.py says what of a kernel is chosen for a problem.

The modules with kernels import Triton; arguments.py, config.py, launch.py, operand_gradients.py and
tile_types.py do not.
"""
