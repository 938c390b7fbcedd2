"""Hopper kernels in Gluon: copy engine, warpgroup products and warp roles, said outright."""
