"""Hopper kernels in Gluon: copy engine, warpgroup products and warp roles, said outright.

Begin with docs/hopper.md, which lists the files and draws what runs when; then hopper_forward.py, from its last
function, the kernel, up.
"""
