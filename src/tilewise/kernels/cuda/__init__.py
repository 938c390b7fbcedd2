"""float32 attention in CUDA C++: one source, compiled when first used.

attention_fp32.cu says in which order its headers are to be read, beside docs/float32.md. config.py says what of a
kernel is chosen for a problem.
"""
