"""Models of Transformers that look the attention's name up in a table of classes of their own.

They know "eager" and "sdpa", and would raise ``KeyError`` for another name. :func:`enter` puts a class under it: the
table's own "sdpa", whose call of torch's scaled_dot_product_attention comes to tilewise.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.integrations.torch_sdpa import scaled_dot_product_attention

__all__ = ["enter"]

# Module of transformers.models, and the table in it. GIT's has no class that calls torch's function.
_TABLES = {
    "data2vec.modeling_data2vec_vision": "DATA2VEC_VISION_SELF_ATTENTION_CLASSES",
    "deepseek_ocr2.modeling_deepseek_ocr2": "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES",
    "sam.modeling_sam": "SAM_VISION_ATTENTION_CLASSES",
    "sam_hq.modeling_sam_hq": "SAM_HQ_VISION_ATTENTION_CLASSES",
    "unlimited_ocr.modeling_unlimited_ocr": "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES",
}


class _ToTilewise(TorchFunctionMode):
    """Within a ``with`` block, torch's scaled_dot_product_attention is tilewise's."""

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (),
                           named: dict[str, Any] | None = None) -> Any:
        """Call a function of torch's, or tilewise's in its place."""
        if function is torch.nn.functional.scaled_dot_product_attention:
            function = scaled_dot_product_attention
        return function(*arguments, **(named or {}))


def enter(name: str) -> None:
    """Enter a class into each table that the installed Transformers has, by this name."""
    for module, table in _TABLES.items():
        path = f"transformers.models.{module}"
        folder = path.rpartition(".")[0]
        if importlib.util.find_spec(folder) is None or importlib.util.find_spec(path) is None:
            continue  # this version does not have the model
        classes: dict[str, type[torch.nn.Module]] = getattr(importlib.import_module(path), table, {})
        if "sdpa" in classes:  # else it has a registry by now
            classes[name] = _by_tilewise(classes["sdpa"])


def _by_tilewise(sdpa: Any) -> type[torch.nn.Module]:
    class ByTilewise(sdpa):  # type: ignore[misc]
        """The class that calls torch's function, which is tilewise's here."""

        def forward(self, *arguments: Any, **named: Any) -> Any:
            with _ToTilewise():
                return super().forward(*arguments, **named)

    ByTilewise.__name__ = ByTilewise.__qualname__ = sdpa.__name__.replace("Sdpa", "") + "ByTilewise"
    return ByTilewise
