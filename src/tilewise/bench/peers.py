"""Attention kernels of other packages, used where they are installed."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, cast

import torch

from tilewise.bench.flex import FlexProvider
from tilewise.bench.grids import Cell
from tilewise.bench.options import options_of
from tilewise.bench.packed import why_not_flash
from tilewise.bench.providers import Attend, Dims, Provider
from tilewise.bench.roofline import Direction
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case


class FlashAttentionProvider(Provider):
    """A generation of the flash-attn package: (b, s, h, d) or packed, bottom-right masks.

    ``keywords`` are what it calls the options that it takes beside packed sequences; it has a gradient of none of them.
    """

    def __init__(self, name: str, module: str, product: str, no_window: int | None,
                 keywords: Mapping[str, str]) -> None:
        self.name, self.module, self.product, self.no_window = name, module, product, no_window
        self.keywords, self.options = keywords, frozenset((*keywords, "packed"))

    def missing(self, device: torch.device) -> str | None:
        """Say that it is not installed, or that the device is not a GPU."""
        if device.type != "cuda":
            return f"{self.product} runs on GPUs only"
        return None if _is_importable(self.module) else f"{self.product} is not installed (module {self.module})"

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse float32 and masks of the other corner."""
        return why_not_flash(cell)

    def dims(self, case: Case) -> Dims:
        """As it takes them."""
        return "shd" if case.packed else "bshd"

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call flash_attn_func or, packed, flash_attn_varlen_func; some generations return lse beside out."""
        module: Any = importlib.import_module(self.module)
        function = module.flash_attn_varlen_func if cell.case.packed else module.flash_attn_func
        case, mask = cell.case, cell.case.mask
        is_causal = mask.right == 0
        sides = (self.no_window if side is None else side for side in (mask.left, mask.right))
        window = (self.no_window, self.no_window) if mask.left is None and is_causal else tuple(sides)
        slopes = operands.alibi_slopes
        values = {"softcap": case.softcap, "dropout_p": case.dropout_p, "sinks": operands.sinks,
                  "alibi": slopes[0] if slopes is not None and len(slopes) == 1 else slopes}
        options = {self.keywords[field]: values[field] for field in options_of(case) if field != "packed"}
        if operands.cu_seqlens_q is not None and operands.cu_seqlens_k is not None:
            options |= {"cu_seqlens_q": operands.cu_seqlens_q.int(), "cu_seqlens_k": operands.cu_seqlens_k.int(),
                        "max_seqlen_q": case.sq, "max_seqlen_k": case.sk}

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = function(q, k, v, softmax_scale=case.scale, causal=is_causal, window_size=window, **options)
            return cast(torch.Tensor, result[0] if isinstance(result, (tuple, list)) else result)

        return attend


class ForwardWheelProvider(FlashAttentionProvider):
    """FlashAttention-3 as the package fa3-fwd brings it, built for inference."""

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse what was switched off in its build."""
        if direction == "backward":
            return "is built without a backward pass"
        if cell.dtype is not torch.bfloat16:
            return f"is built for bfloat16 alone, got {cell.dtype}"
        if cell.case.mask.left is not None or cell.case.mask.right not in (None, 0):
            return f"is built without windows, got {cell.case.mask}"
        return super().why_not(cell, direction, device)


def peer_providers() -> list[Provider]:
    """Return the providers that other packages bring."""
    return [
        FlexProvider(),
        FlashAttentionProvider("flash_attn2", "flash_attn.flash_attn_interface", "FlashAttention-2", -1,
                               {"softcap": "softcap", "alibi": "alibi_slopes", "dropout_p": "dropout_p"}),
        FlashAttentionProvider("flash_attn3", "flash_attn_interface", "FlashAttention-3", -1, {"softcap": "softcap"}),
        ForwardWheelProvider("flash_attn3_fwd", "fa3_fwd_interface", "FlashAttention-3's forward build", -1,
                             {"softcap": "softcap"}),
        FlashAttentionProvider("flash_attn4", "flash_attn.cute", "FlashAttention-4", None,
                               {"softcap": "softcap", "sinks": "learnable_sink"}),
    ]


def _is_importable(module: str) -> bool:
    parent = module.rpartition(".")[0]
    if parent and importlib.util.find_spec(parent) is None:
        return False
    return importlib.util.find_spec(module) is not None
