"""float32 attention in CUDA C++: one source, compiled when first used."""
