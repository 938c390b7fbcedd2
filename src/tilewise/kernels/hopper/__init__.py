"""Kernels for Hopper GPUs in Gluon: TMA, warpgroup MMA and warp specialization, written out.

Begin with docs/hopper-forward.md, which lists the files and draws what runs when; then forward/kernel.py, from its last
function, the kernel, up. arguments.py has what kernels are handed, tile_scheduler.py the order of tiles and the masked
blocks of each, pipeline.py stages and barriers, softmax.py and products.py the arithmetic.
"""

SHARED_MEMORY = 227 * 1024  # bytes that a CTA may have
