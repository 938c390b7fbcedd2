"""Attention kernels of other packages, used where they are installed."""

import importlib
import importlib.util
from typing import Any, cast

import torch

from tilewise.bench.grids import Cell
from tilewise.bench.providers import Attend, Provider, TransposedProvider
from tilewise.bench.roofline import Direction
from tilewise.masks import Band

_HALF = (torch.float16, torch.bfloat16)


class FlexProvider(Provider):
    """torch's FlexAttention, compiled in its default mode, the mask as a block mask."""

    name = "flex"

    def missing(self, device: torch.device) -> str | None:
        """Refuse the CPU."""
        if device.type != "cuda":
            return "FlexAttention has no backward on the CPU, and its forward compiles for tens of seconds"
        return None

    def bind(self, cell: Cell, device: torch.device) -> Attend:
        """Compile for this shape, the mask's block structure worked out beforehand."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Its backward frees buffers that a second backward over the same graph, as it is timed here, reads again.
        functorch_config: Any = importlib.import_module("torch._functorch.config")
        functorch_config.donated_buffer = False
        # A shape more is a compilation more of the same function; past a limit torch would stop compiling.
        importlib.import_module("torch._dynamo").reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        case = cell.case
        block_mask = None
        if case.mask.is_bounded:
            block_mask = create_block_mask(_mask_function(case.mask.band(case.sq, case.sk)), None, None,
                                           case.sq, case.sk, device=str(device))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return compiled(q, k, v, block_mask=block_mask, scale=case.scale, enable_gqa=case.hq != case.hk)

        return attend


class FlashAttentionProvider(TransposedProvider):
    """A generation of the flash-attn package: (b, s, h, d), bottom-right masks."""

    def __init__(self, name: str, module: str, product: str, no_window: int | None) -> None:
        self.name, self.module, self.product, self.no_window = name, module, product, no_window

    def missing(self, device: torch.device) -> str | None:
        """Say that it is not installed, or that the device is not a GPU."""
        if device.type != "cuda":
            return f"{self.product} runs on GPUs only"
        return None if _is_importable(self.module) else f"{self.product} is not installed (module {self.module})"

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse float32 and masks of the other corner."""
        case = cell.case
        if cell.dtype not in _HALF:
            return f"computes in float16 and bfloat16, got {cell.dtype}"
        if case.mask.is_bounded and case.sq != case.sk and case.mask.alignment != "bottom_right":
            return f"aligns masks bottom-right, got {case.mask}"
        return None

    def bind(self, cell: Cell, device: torch.device) -> Attend:
        """Call flash_attn_func; some generations return lse beside out."""
        function: Any = importlib.import_module(self.module).flash_attn_func
        case, mask = cell.case, cell.case.mask
        is_causal = mask.right == 0
        sides = (self.no_window if side is None else side for side in (mask.left, mask.right))
        window = (self.no_window, self.no_window) if mask.left is None and is_causal else tuple(sides)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = function(q, k, v, softmax_scale=case.scale, causal=is_causal, window_size=window)
            return cast(torch.Tensor, result[0] if isinstance(result, (tuple, list)) else result)

        return attend


def peer_providers() -> list[Provider]:
    """Return the providers that other packages bring."""
    return [
        FlexProvider(),
        FlashAttentionProvider("flash_attn2", "flash_attn.flash_attn_interface", "FlashAttention-2", -1),
        FlashAttentionProvider("flash_attn3", "flash_attn_interface", "FlashAttention-3", -1),
        FlashAttentionProvider("flash_attn4", "flash_attn.cute", "FlashAttention-4", None),
    ]


def _mask_function(band: Band) -> Any:
    lower, upper = band.lower, band.upper

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = torch.ones_like(j, dtype=torch.bool)
        if lower is not None:
            seen = seen & (j - i >= lower)
        if upper is not None:
            seen = seen & (j - i <= upper)
        return seen

    return visible


def _is_importable(module: str) -> bool:
    parent = module.rpartition(".")[0]
    if parent and importlib.util.find_spec(parent) is None:
        return False
    return importlib.util.find_spec(module) is not None
