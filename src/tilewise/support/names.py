"""Names that a user types: here and not beside what they name, so that the command line knows them without torch."""

BACKENDS = ("gluon", "triton", "cuda", "cuda_ieee", "torch", "cudnn", "reference")
DTYPES = ("float16", "bfloat16", "float32", "float64")
MASK_FORMS = ("none, causal[:ALIGNMENT], window:LEFT,RIGHT[:ALIGNMENT], prefix:KEYS[:ALIGNMENT], "
              "chunk:LENGTH[:ALIGNMENT], sink_tokens:KEYS, or some of them joined by '&'")
# GPUs that kernels are compiled for where they are not: what compile_ahead/gpu.py describes.
GPUS = ("a100-40gb", "a100-80gb", "h100", "h100-pcie", "h200", "gh200", "b200")
# Of the benchmarks: what grids.py, families.py, timing.py, plan.py and torture_peers.py of bench/ have.
GRIDS = ("cpu", "paper", "seeds", "gqa", "fp32", "options", "packed", "packed-kv", "masks", "decode", "families")
FAMILIES = ("softcap-d128", "softcap-d256", "short-window", "grouped-heads", "odd-lengths", "head-dims", "d192-dv128",
            "short-packed", "few-keys", "bias", "tiny", "small-batch")  # of the grid families
REGIMES = ("duty", "dense", "sustained", "turns")
_OURS = ("tilewise", *(f"tilewise:{name}" for name in BACKENDS))
_OF_TORCH = ("naive", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
_PEERS = ("flex", "flash_attn2", "flash_attn3", "flash_attn3_fwd", "flash_attn4")
PROVIDERS = (*_OURS, "tilewise:deterministic", *_OF_TORCH, "tilewise:triton:documents", "varlen_attn",
             "tilewise:pages256", "tilewise:pages16", "sdpa_flash_folded", "sdpa_cudnn_folded", "tilewise:llmc",
             "tilewise:cuda:llmc", "tilewise:cuda_ieee:llmc", *_PEERS)
IMPLEMENTATIONS = (*_OURS, *_OF_TORCH, *_PEERS)
