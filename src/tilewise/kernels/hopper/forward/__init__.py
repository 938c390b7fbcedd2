"""The forward pass: one producer warp, one to three consumer warpgroups."""
