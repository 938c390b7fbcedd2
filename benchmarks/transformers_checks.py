"""What benchmarks/transformers_sweep.py asks of a tiny model: the same numbers by tilewise as by eager attention."""

import copy
import functools
import inspect
import math
import signal
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tiny_transformers import Call, calls, configs_of, groups, model_of

from tilewise.errors import TilewiseError
from tilewise.integrations import class_tables
from tilewise.integrations import transformers as integration

CHECKS = ("forward", "backward", "left_padding", "right_padding", "generate")
# The largest difference, over the largest number of eager attention's tensor.
TOLERANCE = 1e-4
# A gradient that is small beside the model's largest is rounding: its differences are read against this part of that.
SMALL_GRADIENT = 1e-2
OURS, OURS_WITH_AVERAGE = "tilewise", "tilewise_average"
# Eager, with parameters that are changed by a rounding.
ROUNDED = ("rounded 1", "rounded 2", "rounded 3")
MORE_ROUNDINGS = 4  # a result comes of several
LARGEST_ROUNDING = 1e-2  # beyond, a model that magnifies roundings says nothing
NEW_TOKENS, PADDED = 4, 3
_HUGE = 1e30  # what is beyond is a mask that a model puts into its output

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Found:
    """What became of a check of one model.

    Attributes:
        outcome: "same"; "rows_without_keys": only rows that see no key differ; "as_sdpa": the numbers of Transformers'
            SDPA, which are not eager's; "rounding": eager attention with parameters that one rounding changes is as far
            off; "differs"; "refused": tilewise raised its own error, or Transformers does not take the name; "fails":
            something else was raised; "no_attention": no attention function was called; "eager_fails": eager attention
            does not run, or not twice to the same numbers.
        difference: the largest, over the largest number of its tensor; None where nothing was compared.
        reason: a sentence, or what was raised and where.
    """

    outcome: str
    difference: float | None = None
    reason: str = ""


class OutOfTimeError(Exception):
    """A check took longer than its limit."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise :class:`OutOfTimeError` in the block after so many seconds."""
    def raised(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, raised)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Calls:
    """How often tilewise's attention functions were called."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls count."""
        @functools.wraps(function)
        def counting(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return function(*arguments, **named)

        return counting


def register() -> Calls:
    """Enter tilewise under both names, and return what counts the calls."""
    from transformers import AttentionInterface

    integration.register(OURS)
    integration.register(OURS_WITH_AVERAGE, rows_without_keys="average")
    calls = Calls()
    AttentionInterface.register(OURS, calls.counted(integration.attention_forward))
    class_tables.scaled_dot_product_attention = calls.counted(class_tables.scaled_dot_product_attention)
    return calls


@dataclass
class Subject:
    """A class of models that runs in eager attention, with what it is called with."""

    model_type: str
    kind: type
    config: Any
    call: Call
    seed: int
    models: dict[str, torch.nn.Module] = field(default_factory=dict)

    def model(self, name: str) -> torch.nn.Module:
        """Return the model with this attention; the same parameters under each name."""
        if name not in self.models:
            is_rounded = name in ROUNDED
            model = model_of(self.kind, copy.deepcopy(self.config), self.seed, "eager" if is_rounded else name)
            self.models[name] = rounded(model, ROUNDED.index(name)) if is_rounded else model
        return self.models[name]


def rounded(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Change each parameter by up to one rounding, as another order of the same sums would."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            off = torch.rand(parameter.shape, generator=random) * 2 - 1
            parameter.mul_(1 + off * torch.finfo(torch.float32).eps)
    return model


def subjects(model_type: str, limit: int) -> Iterator[Subject | tuple[str, str]]:
    """Yield a model for each kind of configuration of a type; where none runs in eager attention, its name and why."""
    for config_class, kinds in groups(model_type).items():
        seed = zlib.crc32(f"{model_type} {config_class.__name__}".encode()) & 0x7FFFFFFF
        reason, until = "", time.monotonic() + limit
        for kind, config in configs_of(config_class, kinds, model_type):
            if isinstance(config, str):
                reason = reason or config
                continue
            try:
                with limited(max(1, math.ceil(until - time.monotonic()))):
                    found, why = _first_that_runs(model_type, kind, config, seed)
            except Exception as error:  # whatever a model raises is its outcome
                found, why = None, said(error)
            if found is not None:
                yield found
                break
            reason = reason or f"{kind.__name__}: {why}"
        else:
            yield config_class.__name__, reason


def _first_that_runs(model_type: str, kind: type, config: Any, seed: int) -> tuple[Subject | None, str]:
    model, why = model_of(kind, copy.deepcopy(config), seed, "eager"), "nothing to call it with"
    for call in calls(kind, config, model_type, seed + 1):
        subject = Subject(model_type, kind, config, call, seed, {"eager": model})
        try:
            _forward(model, call, seed)
        except OutOfTimeError:
            raise
        except Exception as error:  # whatever a model raises is its outcome
            why = said(error)
        else:
            return subject, ""
    return None, why


def checks_of(subject: Subject) -> list[str]:
    """Return which checks apply: padding to what takes a mask of its tokens, generation to what generates tokens."""
    asked = ["forward", "backward"]
    parameters = inspect.signature(subject.kind.forward).parameters
    if subject.call.length is not None and "attention_mask" in parameters:
        asked += ["right_padding"] if subject.call.is_sound else ["left_padding", "right_padding"]
    generates = getattr(subject.kind, "can_generate", bool)()
    if generates and "input_ids" in subject.call.arguments and subject.call.length is not None:
        asked.append("generate")
    return asked


def checked(subject: Subject, check: str, counted: Calls, limit: int) -> tuple[Found, float]:
    """Return what became of a check, and its seconds."""
    began = time.perf_counter()
    try:
        with limited(limit):
            found = _checked(subject, check, counted)
    except OutOfTimeError as error:
        found = Found("fails", reason=f"{said(error)}, eager and tilewise together")  # eager alone did not
    return found, time.perf_counter() - began


def _checked(subject: Subject, check: str, counted: Calls) -> Found:
    run = {"forward": _outputs, "backward": _gradients, "generate": _generated}.get(check, _padded)
    try:
        wanted = run(subject, "eager", check)
    except Exception as error:  # whatever a model raises is its outcome
        return Found("eager_fails", reason=said(error))
    counted.count = 0
    try:
        found = run(subject, OURS, check)
    except OutOfTimeError:
        raise
    except Exception as error:  # whatever a model raises is its outcome
        by_transformers = isinstance(error, KeyError) and error.args == (OURS,)  # a table of classes of its own
        outcome = "refused" if by_transformers or isinstance(error, TilewiseError) else "fails"
        return Found(outcome, reason=f"{said(error)}; {_by_sdpa(subject, run, check)}")
    worst = difference(found, wanted)
    if not counted.count:
        return Found("no_attention", worst)
    if worst <= TOLERANCE:
        return Found("same", worst)
    return _named(worst, subject, run, check, wanted, found)


def _named(worst: float, subject: Subject, run: Callable[..., Outputs], check: str, wanted: Outputs,
           found: Outputs) -> Found:
    """Say why numbers are not eager's."""
    again = difference(run(subject, "eager", check), wanted)
    if again > TOLERANCE:
        return Found("eager_fails", again, "eager attention differs from itself in a second run")
    averaged = run(subject, OURS_WITH_AVERAGE, check)
    if (without := difference(averaged, wanted)) <= TOLERANCE:
        return Found("rows_without_keys", worst,
                     f"with the average in rows that see no key, as eager has it, the difference is {without:.1e}")
    if "padding" in check and difference(_outputs_of(averaged), _outputs_of(wanted)) <= TOLERANCE:
        # Eager's rows without keys have gradients of queries and keys, which an average of values has not.
        without = _without_such_rows(subject, check)
        if without <= TOLERANCE:
            return Found("rows_without_keys", worst, "outputs are eager's with the average in rows that see no key; "
                         f"where such rows play no part, outputs and gradients differ by {without:.1e}")
    rounding = max(difference(run(subject, name, check), wanted) for name in ROUNDED)
    if rounding * MORE_ROUNDINGS >= worst and worst <= LARGEST_ROUNDING:
        return Found("rounding", worst, f"eager's own numbers change by {rounding:.1e} with parameters that differ by "
                     "a rounding of float32")
    try:
        by_sdpa = run(subject, "sdpa", check)
    except OutOfTimeError:
        raise
    except Exception as error:  # whatever a model raises is its outcome
        return Found("differs", worst, f"by sdpa: {said(error)}")
    near = min(difference(found, by_sdpa), difference(averaged, by_sdpa))
    if near <= TOLERANCE:
        return Found("as_sdpa", worst, f"Transformers' own sdpa gives these numbers, to {near:.1e}")
    return Found("differs", worst, f"from sdpa by {near:.1e}, sdpa from eager by {difference(by_sdpa, wanted):.1e}")


def _outputs_of(found: Outputs) -> Outputs:
    return {name: tensor for name, tensor in found.items() if not name.startswith("gradient of")}


def _without_such_rows(subject: Subject, check: str) -> float:
    """Return the difference from eager where rows that see no key play no part: 0 and the average give the same."""
    padding = padding_of(subject.call, check)
    with torch.no_grad():
        ours, averaged = (_forward(subject.model(name), subject.call, subject.seed, padding)
                          for name in (OURS, OURS_WITH_AVERAGE))
    kept = {name: (tensor - averaged[name]).abs().flatten(tensor.dim() - 1).amax(-1) <= 1e-6 * tensor.abs().max()
            for name, tensor in ours.items() if tensor.dim() > 1}
    if not any(rows.any() for rows in kept.values()):
        return float("inf")
    found, wanted = (_gradients(subject, name, check, padding, kept) for name in (OURS, "eager"))
    return difference(found, wanted)


def _by_sdpa(subject: Subject, run: Callable[..., Outputs], check: str) -> str:
    try:
        run(subject, "sdpa", check)
    except OutOfTimeError:
        raise
    except Exception as error:  # whatever a model raises is its outcome
        return f"sdpa does not run either: {type(error).__name__}"
    return "sdpa runs"


def difference(found: Outputs, wanted: Outputs) -> float:
    """Return the largest difference of any tensor, over the largest number of eager's; infinite if shapes differ."""
    if found.keys() != wanted.keys():
        return float("inf")
    worst = 0.0
    for name, theirs in wanted.items():
        ours = found[name]
        if ours.shape != theirs.shape:
            return float("inf")
        plain = theirs.isfinite() & (theirs.abs() < _HUGE)
        if not torch.equal(plain, ours.isfinite() & (ours.abs() < _HUGE)):
            return float("inf")
        if plain.any():
            scale = max(theirs[plain].abs().max().item(), _least_scale(name, wanted))
            gap = (ours[plain] - theirs[plain]).abs().max().item()
            worst = max(worst, gap / scale if scale else gap)
    return worst


def _least_scale(name: str, wanted: Outputs) -> float:
    if not name.startswith("gradient of"):
        return 0.0
    gradients = [value for key, value in wanted.items() if key.startswith("gradient of") and value.numel()]
    return SMALL_GRADIENT * max(value.abs().max().item() for value in gradients)


def _forward(model: torch.nn.Module, call: Call, seed: int, padding: torch.Tensor | None = None) -> Outputs:
    """Call the model, and return its floating-point outputs where there is a token."""
    torch.manual_seed(seed)
    arguments = {name: copy.copy(value) for name, value in call.arguments.items()}
    if padding is not None:
        arguments["attention_mask"] = padding
    given = model(**arguments)
    return {name: tensor if padding is None else _of_tokens(tensor, call, padding.bool())
            for name, tensor in _tensors(given)}


def _of_tokens(tensor: torch.Tensor, call: Call, padding: torch.Tensor) -> torch.Tensor:
    """Return the rows of tokens; of frames that a model joined, those that are all sound."""
    if tensor.shape[1:2] == padding.shape[1:] and len(tensor) % len(padding) == 0:
        return tensor[padding.repeat_interleave(len(tensor) // len(padding), 0)]  # several rows of codebooks an entry
    decoded = call.arguments.get("decoder_input_ids")
    is_of_decoder = decoded is not None and tensor.shape[1:2] == decoded.shape[1:]
    if call.is_sound and not is_of_decoder and tensor.dim() > 2 and len(tensor) == len(padding):
        rows = tensor.shape[1]
        sound = (padding.sum(1) * rows) // padding.shape[1] - (~padding).any(1).long()
        return tensor[torch.arange(rows) < sound[:, None]]
    return tensor


def _tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors of an output, without caches, and without probabilities, which eager has."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            if "attentions" not in str(key):
                yield from _tensors(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for key, part in enumerate(value):
            yield from _tensors(part, f"{name}.{key}")


def _detached(outputs: Outputs) -> Outputs:
    return {name: tensor.detach() for name, tensor in outputs.items()}


def _outputs(subject: Subject, name: str, check: str) -> Outputs:
    with torch.no_grad():
        return _detached(_forward(subject.model(name), subject.call, subject.seed))


def _gradients(subject: Subject, name: str, check: str, padding: torch.Tensor | None = None,
               kept: Outputs | None = None) -> Outputs:
    """Return outputs and the gradients of the parameters, of the mean of all outputs with random weights.

    kept: rows of outputs that count; None = all.
    """
    model = subject.model(name)
    model.zero_grad()
    outputs = _forward(model, subject.call, subject.seed, padding)
    if kept is not None:
        outputs = {key: outputs[key][rows] for key, rows in kept.items() if rows.any()}
    random = torch.Generator().manual_seed(subject.seed)
    loss = torch.zeros(())
    for tensor in outputs.values():
        weights = torch.randn(tensor.shape, generator=random)
        if tensor.requires_grad:
            plain = tensor.isfinite() & (tensor.abs() < _HUGE)
            loss = loss + (torch.where(plain, tensor, 0) * weights).mean()
    if not loss.requires_grad:
        raise RuntimeError("no output has a gradient")
    loss.backward()
    return _detached(outputs) | {f"gradient of {key}": parameter.grad.clone()
                                 for key, parameter in model.named_parameters() if parameter.grad is not None}


def _padded(subject: Subject, name: str, check: str) -> Outputs:
    """Return outputs and gradients where the second entry is padded; the loss is over tokens alone."""
    return _gradients(subject, name, check, padding_of(subject.call, check))


def padding_of(call: Call, side: str) -> torch.Tensor:
    """Return a mask (b, s) whose second entry has tokens of padding on this side."""
    padding = torch.ones(call.batch, call.length or 0, dtype=torch.long)
    part = max(PADDED, (call.length or 0) // 3)
    padding[-1, :part] = 0
    return padding.flip(1) if side == "right_padding" else padding


def _generated(subject: Subject, name: str, check: str) -> Outputs:
    """Return tokens and logits of greedy generation with a cache, of a batch that is padded on the left."""
    model = subject.model(name)
    torch.manual_seed(subject.seed)
    arguments = {key: copy.copy(value) for key, value in subject.call.arguments.items()
                 if not key.startswith("decoder_")}
    arguments["attention_mask"] = padding_of(subject.call, "left_padding")
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id = 0
    if settings.bos_token_id is None:
        settings.bos_token_id = 1
    if settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = 1
    with torch.no_grad():
        made = model.generate(**arguments, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                              return_dict_in_generate=True, output_logits=True, use_cache=True)
    if not hasattr(made, "sequences"):
        raise RuntimeError(f"generate() returns a {type(made).__name__}, which is no sequence of tokens")
    logits = {f"logits {step}": part.float() for step, part in enumerate(made.logits or ())}
    return {"tokens": made.sequences.double()} | logits


def said(error: BaseException) -> str:
    """Return an error as a line: its kind, what it says, and where it was raised."""
    lines = str(error).strip().splitlines() or [""]
    text = " ".join(line.strip() for line in lines)[:240]
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/transformers/models/" in frame.filename]
    where = (inside or frames or [None])[-1]
    place = f" ({Path(where.filename).name}:{where.lineno})" if where is not None else ""
    return f"{type(error).__name__}: {text}{place}"
