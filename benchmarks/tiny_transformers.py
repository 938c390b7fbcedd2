"""Tiny models of every type of Transformers, made from their configurations' own defaults, and what to call them with.

A number becomes a small one by its name, in the configurations within as well; what names do not tell is in
tiny_transformers_exceptions.py. Weights are random, and nothing is downloaded.
"""

import copy
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tiny_transformers_exceptions as exceptions
import torch

BATCH, LENGTH, DECODER_LENGTH, SAMPLES, FRAMES, VOCABULARY = 2, 9, 7, 4000, 64, 128
FIRST_SPECIAL = 100  # tokens from here on are those that configurations name: an image's, the end's
HEADS, KEY_HEADS, LAYERS, EXPERTS, WINDOW = 4, 2, 2, 4, 5
LARGEST = 50_000_000  # parameters of a model


@dataclass(frozen=True)
class Widths:
    """A way to make a configuration small.

    Attributes:
        hidden, head: the width of a hidden state and of a head; None: widths stay, and layers become few.
        fills: whether numbers that the defaults leave out are set too.
    """

    hidden: int | None
    head: int | None
    fills: bool = False


WAYS = (Widths(64, 16), Widths(64, 16, fills=True), Widths(256, 64), Widths(512, 128), Widths(None, None))
HIDDEN, HEAD, STAYS = "hidden", "head", "stays"
# What a number becomes, by its name; the first that matches counts.
NUMBERS: tuple[tuple[str, int | str], ...] = (
    (r"num_feat_extract_layers|mamba_d_conv|.*loss.*|max_window_layers|num_register_tokens", STAYS),
    (r"mtp_.*layers|num_nextn_predict_layers|num_kv_shared_layers", 0),
    (r"(.*_)?vocab_size(_per_layer_input)?|(.*_)?codebook_size", VOCABULARY),
    (r".*position.*", STAYS),
    (r"num_(key_value|kv)_heads|(.*_)?num_key_value_heads|kv_n_heads", KEY_HEADS),
    (r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|n_head)|(linear|mamba|index)_.*heads", HEADS),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"encoder_hash_byte_group_vocab", 512),
    (r"(.*_)?head_dim|d_kv|kv_channels", HEAD),
    (r".*lora_rank|gated_norm_rank|hidden_size_per_layer_input", 16),
    (r"(.*_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|d_ff|mlp_dim)", HIDDEN),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|projection_size|output_dim"
     r"|proj_dim|embedding_dim|codebook_dim|condition_dim|project_dim|upsample_groups)", HIDDEN),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|layers|depth|num_blocks)", LAYERS),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_(top_?)?k|top_k_experts|n_shared_experts", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window|sliding_window_size|attention_chunk_size", WINDOW),
    (r"num_queries|num_query_tokens|resampler_n_latents|num_latents", 6),
    (r"index_topk", 4),
)
_RATES = re.compile(r".*(dropout|drop_path|layerdrop|pdrop|jitter).*")  # of what is random in training
_LEFT_OUT = frozenset({
    "transformers_version", "_name_or_path", "id2label", "label2id", "architectures", "dtype", "torch_dtype",
    "per_layer_config"})
_OF_STAGES = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "depth")


@dataclass(frozen=True)
class Call:
    """What a model is called with.

    Attributes:
        arguments: by name.
        length: of what a padding mask of the model covers; None = nothing that one does.
        batch: rows of that mask.
        is_sound: whether the mask is of samples or frames, of which a model may join several to a row.
    """

    arguments: dict[str, Any]
    length: int | None = None
    batch: int = BATCH
    is_sound: bool = False


def types() -> list[str]:
    """Return the model types whose source looks attention up by a name: folders of ``transformers.models``."""
    return sorted({path.parent.name for path in _models().glob("*/modeling_*.py")
                   if "ALL_ATTENTION_FUNCTIONS" in path.read_text("utf-8")})


def _models() -> Path:
    import transformers

    return Path(transformers.__file__).parent / "models"


def modules(model_type: str) -> list[ModuleType]:
    """Return the modules that define a type's models."""
    return [importlib.import_module(f"transformers.models.{model_type}.{path.stem}")
            for path in sorted((_models() / model_type).glob("modeling_*.py"))]


def groups(model_type: str) -> dict[type, list[type]]:
    """Return the classes of models for each class of configurations of this type, the most telling first."""
    from transformers import PreTrainedModel

    found: dict[type, list[type]] = {}
    for module in modules(model_type):
        for name, kind in vars(module).items():
            own = isinstance(kind, type) and kind.__module__ == module.__name__
            if not own or not issubclass(kind, PreTrainedModel):
                continue
            config = kind.config_class
            is_model = "PreTrainedModel" not in name and kind.forward is not torch.nn.Module.forward
            if is_model and config is not None and config.__module__.split(".")[2] == model_type:
                found.setdefault(config, []).append(kind)
    return {config: sorted(kinds, key=_rank) for config, kinds in found.items()}


def _rank(kind: type) -> tuple[int, str]:
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model", "ForMaskedLM", "ForPreTraining",
               "Encoder", "Decoder")
    found = (number for number, ending in enumerate(endings) if kind.__name__.endswith(ending))
    return next(found, len(endings)), kind.__name__


def configs_of(config_class: type, kinds: list[type], model_type: str) -> Iterator[tuple[type, Any]]:
    """Yield models to try with a small configuration each, or in its place why there is none."""
    for way, kind in itertools.product(WAYS, kinds[:3]):
        try:
            config = tiny_config(config_class, model_type, way)
            with torch.device("meta"):
                model = kind._from_config(copy.deepcopy(config), attn_implementation="eager")
        except Exception as error:  # whatever a configuration refuses is its reason
            yield kind, f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
            continue
        count = sum(parameter.numel() for parameter in model.parameters())
        yield kind, config if count <= LARGEST else f"{count} parameters by this table of widths"


def tiny_config(kind: type, model_type: str, way: Widths = WAYS[0]) -> Any:
    """Return a small configuration of this class."""
    special = iter(range(VOCABULARY - 1, FIRST_SPECIAL - 1, -1))
    options = _shrunk(kind().to_dict(), way, special)
    _merge(options, exceptions.CONFIGURATIONS.get(model_type, {}).get(kind.__name__, {}))
    return kind(**options)


def _merge(options: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if value is exceptions.LEFT_OUT:
            options.pop(name, None)
        elif isinstance(value, dict) and isinstance(options.get(name), dict):
            _merge(options[name], value)
        else:
            options[name] = copy.deepcopy(value)


def _shrunk(options: dict[str, Any], way: Widths, special: Iterator[int], within: bool = False) -> dict[str, Any]:
    """Return options with small numbers, in those within too; what is not to be said is left out."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _LEFT_OUT or not isinstance(name, str) or (name == "model_type" and not within):
            continue
        if name.endswith(("token_id", "token_index")) and isinstance(value, int | list):
            found[name] = next(special)
        elif isinstance(value, dict) and not name.startswith("rope_"):
            found[name] = _shrunk(value, way, special, within=True)
        elif name == "decoder_in_channels" and way.hidden:  # of what comes from an encoder of that width
            found[name] = [way.hidden] * len(value)
        else:
            found[name] = _small(name, value, way)
    _agree(found, options)
    return found


def _small(name: str, value: Any, way: Widths) -> Any:
    if isinstance(value, float) and _RATES.fullmatch(name):
        return 0.0
    if isinstance(value, bool) or not (isinstance(value, int) or (value is None and way.fills)):
        return value
    small = next((number for pattern, number in NUMBERS if re.fullmatch(pattern, name)), STAYS)
    if small in (HIDDEN, HEAD):
        small = (way.hidden if small == HIDDEN else way.head) or STAYS
    elif way.hidden is None and small not in (LAYERS, VOCABULARY):
        small = STAYS
    if not isinstance(small, int):
        return value
    return small if value is None else min(value, small)


def _agree(found: dict[str, Any], options: dict[str, Any]) -> None:
    """Make what depends on another number agree with it: a kind for each layer, a size that patches divide."""
    layers = next((name for name in _OF_LAYERS if isinstance(options.get(name), int)), None)
    kinds = next((name for name in ("layer_types", "layers_block_type") if options.get(name)), None)
    if layers and kinds:
        several = list(dict.fromkeys(options[kinds]))
        found[kinds] = several + options[kinds][:max(0, LAYERS - len(several))]
        found[layers] = len(found[kinds])
    if layers and options[layers] > found[layers] > 0:
        for name in _OF_STAGES:
            found.pop(name, None)
        for name, value in options.items():
            if isinstance(value, list) and len(value) == options[layers] and name != kinds and name != "conv_dim":
                found[name] = value[:found[layers]]
    if "qk_rope_head_dim" in found and options.get("head_dim") == options["qk_rope_head_dim"]:
        found["head_dim"] = found["qk_rope_head_dim"]
    heads = "num_attention_heads"
    if heads in found and options.get("num_key_value_heads") == options[heads]:
        found["num_key_value_heads"] = found[heads]
    if isinstance(found.get("image_size"), int):
        is_patched = isinstance(found.get("patch_size"), int)
        found["image_size"] = 4 * found["patch_size"] if is_patched else min(64, found["image_size"])


def model_of(kind: Any, config: Any, seed: int, implementation: str | dict[str, str]) -> torch.nn.Module:
    """Return the model, in float32 and without dropout; no parameter keeps its first 0 or 1, where faults hide."""
    torch.manual_seed(seed)
    model: torch.nn.Module = kind._from_config(config, attn_implementation=implementation).float().eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.05)
    return model


def calls(kind: Any, config: Any, model_type: str, seed: int) -> Iterator[Call]:
    """Yield calls to try with a model, until one of them runs."""
    source = Inputs(config, seed)
    listed: Callable[[Inputs], Call] | None = exceptions.CALLS.get(model_type, {}).get(kind.__name__)
    if listed is not None:
        yield listed(source)
        return
    parameters = inspect.signature(kind.forward).parameters
    needed = [name for name, parameter in list(parameters.items())[1:]
              if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    first = ("input_ids", "pixel_values", "input_features", "input_values", "inputs_embeds", "pixel_values_videos",
             "past_values")
    if not needed:
        needed = [name for name in first if name in parameters][:1]
    if "decoder_input_ids" in parameters and "decoder_input_ids" not in needed:
        needed.append("decoder_input_ids")
    more = [name for name in ("pixel_values", "input_features", "input_values", "grid_thw", "image_grid_thw",
                              "pixel_values_videos", "input_ids") if name in parameters and name not in needed]
    for names in [needed, *([*needed, name] for name in more)]:
        known = [name for name in names if hasattr(source, name)]
        boxes = {"bbox": source.boxes()} if "bbox" in parameters and "input_ids" in names else {}
        for choice in itertools.islice(itertools.product(*(getattr(source, name)() for name in known)), 16):
            yield called(dict(zip(known, choice, strict=True)) | boxes, parameters)


def called(arguments: dict[str, Any], parameters: Collection[str] = ()) -> Call:
    """Return a call, and what its padding mask would cover: tokens, samples or frames."""
    sound = arguments.get("input_features")
    if "input_features_mask" in parameters and sound is not None and sound.dim() == 3:
        frames = sound.shape[2] if sound.shape[1] > sound.shape[2] or sound.shape[2] > 2 * FRAMES else FRAMES
        arguments["input_features_mask"] = torch.ones(len(sound), frames, dtype=torch.long)
    for name in ("input_ids", "input_values", "inputs_embeds"):
        given = arguments.get(name)
        if given is not None and (given.dim() == 2 or name == "inputs_embeds"):
            return Call(arguments, given.shape[1], len(given), name == "input_values")
    features = arguments.get("input_features")
    return Call(arguments, None if features is None or features.dim() != 3 else FRAMES, is_sound=True)


def asked(config: Any, *names: str, otherwise: Any) -> Any:
    """Return the first such number that the configuration, or one within it, has."""
    for part, name in itertools.product(list(_configs_within(config)), names):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return otherwise


def _configs_within(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs_within(value)


class Inputs:
    """What a model may be called with: a method for each argument, which returns the shapes to try."""

    def __init__(self, config: Any, seed: int) -> None:
        self.config = config
        self.random = torch.Generator().manual_seed(seed)

    def ids(self, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
        """Return tokens, none of them special."""
        return torch.randint(3, FIRST_SPECIAL - 10, (batch, length), generator=self.random)

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal numbers."""
        return torch.randn(*shape, generator=self.random)

    def boxes(self) -> torch.Tensor:
        """Return corners of boxes on a page, (b, s, 4)."""
        corners = torch.randint(0, 400, (BATCH, LENGTH, 2), generator=self.random)
        return torch.cat([corners, corners + 100], -1)

    def width(self) -> int:
        """Return the width of a hidden state."""
        width = asked(self.config, "hidden_size", "d_model", "embed_dim", "n_embd", otherwise=64)
        return width if isinstance(width, int) else width[0]

    def image(self) -> torch.Tensor:
        """Return images, (b, channels, height, width)."""
        size = asked(self.config, "image_size", "input_size", "crop_size", otherwise=64)
        if isinstance(size, dict):
            size = (size.get("height", 64), size.get("width", 64))
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return self.randn(BATCH, self._channels(), height, width)

    def patches(self) -> torch.Tensor:
        """Return the patches of an image of 4 x 4, each in a row."""
        return self.randn(16, self._channels() * asked(self.config, "temporal_patch_size", otherwise=1)
                          * self._patch() ** 2)

    def _patch(self) -> int:
        patch = asked(self.config, "patch_size", otherwise=4)
        return patch if isinstance(patch, int) else patch[-1]

    def _channels(self) -> int:
        channels = asked(self.config, "num_channels", "in_channels", "in_chans", otherwise=3)
        return channels if isinstance(channels, int) else 3

    def input_ids(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.ids()]

    def decoder_input_ids(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.ids(DECODER_LENGTH)]

    def pixel_values(self) -> list[torch.Tensor]:  # noqa: D102
        image, patch = self.image(), self._patch()
        return [image, image[:, None].expand(-1, 2, -1, -1, -1), image[:, None].contiguous(), self.patches(),
                self.randn(1, 16, self._channels() * patch * patch), self.randn(16, self._channels(), patch, patch)]

    def hidden_states(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.patches(), self.randn(BATCH, LENGTH, self.width()), self.image()]

    def inputs_embeds(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.randn(BATCH, LENGTH, self.width())]

    def query_embeds(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.randn(BATCH, 6, self.width())]

    def grid_thw(self) -> list[torch.Tensor]:  # noqa: D102
        return [torch.tensor([[1, 4, 4]])]

    def image_grid_thw(self) -> list[torch.Tensor]:  # noqa: D102
        return self.grid_thw()

    def pixel_values_videos(self) -> list[torch.Tensor]:  # noqa: D102
        image = self.image()
        frames = asked(self.config, "num_frames", "frames_per_clip", otherwise=4)
        return [self.randn(BATCH, frames, *image.shape[1:])]

    def input_values(self) -> list[torch.Tensor]:  # noqa: D102
        mels = asked(self.config, "num_mel_bins", "n_mels", otherwise=80)
        frames = asked(self.config, "max_length", otherwise=FRAMES)
        channels = asked(self.config, "audio_channels", otherwise=1)
        return [self.randn(BATCH, SAMPLES), self.randn(BATCH, channels, SAMPLES), self.randn(BATCH, frames, mels)]

    def input_features(self) -> list[torch.Tensor]:  # noqa: D102
        mels = asked(self.config, "num_mel_bins", "n_mels", "input_feat_size", "input_dim", "feature_size",
                     "feature_projection_input_dim", otherwise=80)
        frames = 2 * asked(self.config, "max_source_positions", otherwise=32)
        return [self.randn(BATCH, FRAMES, mels), self.randn(BATCH, mels, FRAMES), self.randn(BATCH, mels, frames),
                self.randn(BATCH, FRAMES, 128), self.randn(BATCH, FRAMES, 160), self.randn(mels, FRAMES)]

    def past_values(self) -> list[torch.Tensor]:  # noqa: D102
        length = asked(self.config, "context_length", otherwise=32)
        channels = asked(self.config, "num_input_channels", "input_size", otherwise=1)
        return [self.randn(BATCH, length), self.randn(BATCH, length, channels)]
