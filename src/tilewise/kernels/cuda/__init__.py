"""float32 attention in CUDA C++: one source, compiled when first used.

attention_fp32.cu is to be read from top to bottom, beside docs/float32.md. config.py says what of a kernel
is chosen for a problem.
"""
