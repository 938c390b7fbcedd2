"""The tiled algorithm in plain PyTorch: what every other kernel must agree with, written to be read."""
