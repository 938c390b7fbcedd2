"""Calls by their shapes: one that a user names, and those of a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidInput
from tilewise.masks import Mask, causal, chunk, window

_SIZES = ("b", "hq", "hk", "sq", "sk", "d", "dv")
_LAYOUTS = ("bhsd", "bshd")
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")  # of Transformers' layer_types


@dataclass(frozen=True)
class CallShape:
    """One attention call, by its shapes: all that a kernel that is compiled depends on.

    Attributes:
        sq: query length; of packed sequences the total.
        sk: key length; None = sq.
        b: batch size; of packed sequences 1.
        hq, hk: query heads, and key/value heads; hk None = hq.
        d, dv: head dims of q and k, and of v; dv None = d.
        dtype: of q, k and v.
        mask: a :class:`tilewise.Mask`; None = no mask.
        scale, softcap, dropout_p, deterministic, backend: as :func:`tilewise.attention` takes them.
        sinks: whether each head has one.
        packed: how many sequences are packed, as for :func:`tilewise.attention_varlen`; None = they are not.
        layout: how q, k and v lie in memory: "bhsd", or "bshd" for transposed views of (b, s, h, d).
        backward: whether the call has a backward pass, with a gradient of q, k and v.
        lse_grad: whether a gradient arrives through lse.

    A call like it launches the same kernels if, beside these, the strides of its tensors are multiples of 16 where
    those of dense tensors are, and its gradient dout lies in memory as out does.
    """

    sq: int
    sk: int | None = None
    b: int = 1
    hq: int = 8
    hk: int | None = None
    d: int = 128
    dv: int | None = None
    dtype: torch.dtype = torch.bfloat16
    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    packed: int | None = None
    layout: Literal["bhsd", "bshd"] = "bhsd"
    deterministic: bool | None = None
    backend: str | None = None
    backward: bool = True
    lse_grad: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise InvalidInput(f"{name} is {size!r}; allowed is an integer of 1 and more.")
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidInput(f"dtype is {self.dtype!r}; allowed is a torch.dtype.")
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise InvalidInput(f"mask is a {type(self.mask).__name__}; allowed is causal(), window(left, right) or "
                               "another Mask, or None. For a mask that holds tensors, pass compile_ahead a function "
                               "that makes the call.")
        if self.layout not in _LAYOUTS:
            raise InvalidInput(f"layout is {self.layout!r}; allowed are {', '.join(map(repr, _LAYOUTS))}.")
        if self.packed is not None and (self.packed < 1 or self.b != 1):
            raise InvalidInput(f"packed is {self.packed} and b is {self.b}; allowed are 1 or more packed sequences, "
                               "with b=1.")

    def __call__(self) -> None:
        """Make the call, and its backward pass, on tensors that hold anything."""
        sk, hk, dv = self.sk or self.sq, self.hk or self.hq, self.dv or self.d
        q, k, v = (self._tensor(h, s, d) for h, s, d in ((self.hq, self.sq, self.d), (hk, sk, self.d), (hk, sk, dv)))
        sinks = torch.empty(self.hq, dtype=self.dtype, device="cuda") if self.sinks else None
        options: dict[str, Any] = {
            "mask": self.mask, "scale": self.scale, "softcap": self.softcap, "sinks": sinks,
            "dropout_p": self.dropout_p, "dropout_seed": 0 if self.dropout_p else None,
            "deterministic": self.deterministic, "backend": self.backend}
        if self.lse_grad:
            options["return_aux"] = ("lse",)
        if self.packed is None:
            results = attention(q, k, v, **options)
        else:
            borders = torch.empty(self.packed + 1, dtype=torch.int32, device="cuda")
            of_keys = borders if sk == self.sq else torch.empty_like(borders)
            q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (q, k, v))
            results = attention_varlen(q, k, v, cu_seqlens_q=borders, cu_seqlens_k=of_keys, **options)
        made = tuple(results) if self.lse_grad else (results,)
        if self.backward:
            torch.autograd.backward(made, tuple(torch.empty_like(result) for result in made))

    def _tensor(self, h: int, s: int, d: int) -> torch.Tensor:
        options: dict[str, Any] = {"dtype": self.dtype, "device": "cuda", "requires_grad": self.backward}
        if self.layout == "bhsd" and self.packed is None:
            return torch.empty(self.b, h, s, d, **options)
        return torch.empty(self.b, s, h, d, **options).transpose(1, 2)

    def __str__(self) -> str:
        pairs = (("h", self.hq, self.hk), ("s", self.sq, self.sk), ("d", self.d, self.dv))
        sizes = [f"{name}{first}" if second in (None, first) else f"{name}{first}x{second}"
                 for name, first, second in pairs]
        more = [text for wanted, text in (
            (self.mask is not None, str(self.mask)), (self.softcap is not None, f"softcap={self.softcap}"),
            (self.sinks, "sinks"), (self.dropout_p, f"dropout_p={self.dropout_p}"),
            (self.packed is not None, f"{self.packed} packed"), (self.deterministic, "deterministic"),
            (self.backend is not None, f"backend={self.backend}"), (not self.backward, "forward")) if wanted]
        return " ".join([f"b{self.b}", *sizes, str(self.dtype).removeprefix("torch."), *more])


def calls_of_model(config: Any, lengths: Iterable[int], *, b: int = 1, dtype: torch.dtype | None = None,
                   backward: bool = True, is_causal: bool = True) -> tuple[CallShape, ...]:
    """Return the attention calls of a model's layers, without padding or a cache.

    Args:
        config: a configuration of Hugging Face Transformers, or what has its attributes.
        lengths: of sequences.
        b: batch size.
        dtype: None = the configuration's, or bfloat16 if it names none.
        backward: whether the model is trained.
        is_causal: whether tokens see earlier ones alone.

    Returns:
        One call for each kind of layer and each length.

    Raises:
        InvalidInput: the configuration lacks what attention needs.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, sliding_window=4096)
    >>> print(*calls_of_model(config, [2048, 8192]), sep="; ")
    b1 h32x8 s2048 d128 bfloat16 causal(); b1 h32x8 s8192 d128 bfloat16 causal() & window(4095, 0)
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)
    hq = _number(config, "num_attention_heads", "n_head")
    d, dv = _head_dims(config, hq)
    dims: dict[str, Any] = {
        "hq": hq, "hk": hq if d != dv else getattr(config, "num_key_value_heads", None) or hq, "d": d, "dv": dv}
    divisor = getattr(config, "query_pre_attn_scalar", None)
    options: dict[str, Any] = {
        "scale": getattr(config, "attention_multiplier", None) if divisor is None else float(divisor) ** -0.5,
        "softcap": getattr(config, "attn_logit_softcapping", None),
        "sinks": getattr(config, "model_type", None) == "gpt_oss"}
    dtype = dtype or _dtype_of(config)
    calls = (CallShape(sq=length, b=b, dtype=dtype, layout="bshd", backward=backward, **dims, **options,
                       mask=_mask_of(config, kind, length, is_causal)) for length in lengths for kind in _kinds(config))
    return tuple(dict.fromkeys(calls))


def _number(config: Any, *names: str) -> int:
    found = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if not isinstance(found, int):
        raise InvalidInput(f"config, a {type(config).__name__}, has no {' or '.join(names)}; allowed is the "
                           "configuration of a model with attention layers, as Transformers' AutoConfig reads it.")
    return found


def _head_dims(config: Any, hq: int) -> tuple[int, int]:
    """Return the head dims of q and k, and of v."""
    parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if all(getattr(config, name, None) for name in parts):  # multi-head latent attention, keys and values expanded
        nope, rope, dv = (_number(config, name) for name in parts)
        return nope + rope, dv
    d = getattr(config, "head_dim", None) or _number(config, "hidden_size", "n_embd") // hq
    return d, d


def _dtype_of(config: Any) -> torch.dtype:
    named = getattr(config, "dtype", None) or vars(config).get("torch_dtype") or torch.bfloat16
    dtype = named if isinstance(named, torch.dtype) else getattr(torch, str(named).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"config has dtype {named!r}; allowed is the name of a torch.dtype, or pass dtype.")
    return dtype


def _kinds(config: Any) -> list[str]:
    """Return the kinds of the model's layers."""
    named = getattr(config, "layer_types", None)
    if named is None:
        is_off = getattr(config, "use_sliding_window", None) is False
        is_windowed = getattr(config, "sliding_window", None) is not None and not is_off
        return ["sliding_attention" if is_windowed else "full_attention"]
    kinds = [kind for kind in dict.fromkeys(named) if kind in _KINDS]
    if not kinds:
        raise InvalidInput(f"config has layer_types {sorted(set(named))}; allowed is at least one of "
                           f"{', '.join(_KINDS)}.")
    return kinds


def _mask_of(config: Any, kind: str, length: int, is_causal: bool) -> Mask | None:
    """Return the mask of a layer; a window that hides nothing is left out, as integrations/transformers.py does."""
    keys = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    left = keys - 1 if keys is not None and keys < length else None
    if left is None and not is_causal:
        mask = None
    else:
        mask = causal() if left is None else window(left, 0 if is_causal else left)
    size = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return mask if size is None or size >= length else chunk(size) if mask is None else mask & chunk(size)
