"""What Python finds under the name ``flash_attn`` while tilewise is installed there: modules, metadata, refusals.

Modules are entered in :data:`sys.modules`. A finder in :data:`sys.meta_path` refuses flash-attn's other modules with a
sentence, and answers :mod:`importlib.metadata` for the distribution, where that was asked for.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.errors import TilewiseError

NAME = "flash_attn"
# What is not replaced, by the beginning of its name, and what to use.
_INSTEAD = {
    "flash_attn.losses": "torch.nn.functional.cross_entropy takes the place of its loss.",
    "flash_attn.ops": "torch.nn.functional has linear, layer_norm, rms_norm, gelu and silu.",
    "flash_attn.modules": "Build such a module of torch.nn's, and call flash_attn_func in it.",
    "flash_attn.models": "Transformers has such models, and calls tilewise for attn_implementation='flash_attention_2' "
                         "after install(metadata=True).",
    "flash_attn.cute": "tilewise.integrations.flash_attn_cute.install() enters the functions of flash-attn 4.",
}


def package(name: str, contents: Mapping[str, Any], doc: str | None) -> ModuleType:
    """Make a package of that name, which :func:`importlib.util.find_spec` finds, too, once it is entered."""
    made = ModuleType(name, doc)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(contents)
    return made


def enter(modules: Mapping[str, ModuleType], version: str, metadata: bool) -> None:
    """Enter ``flash_attn`` and its modules, by their full names; answer for its metadata from now on if asked to.

    Raises:
        TilewiseError: metadata is asked for, and a real flash_attn is installed: it has its own.
    """
    if metadata:
        _refuse_beside_the_real_one()
    if NAME not in sys.modules:
        sys.modules.update(modules)
    finder = _entered()
    if finder is None:
        finder = _Finder(version)
        sys.meta_path.append(finder)
    if metadata and not finder.has_metadata:
        finder.has_metadata = True
        _forget_answers()


def remove() -> None:
    """Take away what :func:`enter` entered, and what was entered below it since; nothing where nothing was."""
    finder = _entered()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]
    if finder.has_metadata:
        _forget_answers()


class _Finder(DistributionFinder):
    """Finds no module: refuses those that are not entered. Finds the distribution where it has metadata."""

    def __init__(self, version: str) -> None:
        self.version, self.has_metadata = version, False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise for a module of flash_attn, which no finder before this one has found."""
        if fullname.startswith(f"{NAME}."):
            # No name: with one, `from flash_attn import losses` would drop the message.
            raise ModuleNotFoundError(_refusal(fullname))

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
                           ) -> Iterable[Distribution]:
        """Return flash_attn's distribution, unless another one, or those of other folders, are looked for."""
        asked = context.name is None or re.sub(r"[-_.]+", "_", context.name).lower() == NAME
        return [_Metadata(self.version)] if self.has_metadata and asked and context.path is sys.path else []


class _Metadata(Distribution):
    """The distribution ``flash_attn``, which says who made it."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
                        "Summary: tilewise under flash-attn's names (tilewise.integrations.flash_attn.install)\n",
            "top_level.txt": f"{NAME}\n", "INSTALLER": "tilewise\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


def _entered() -> _Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)


def _refuse_beside_the_real_one() -> None:
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec") and not isinstance(finder, _Finder)]
    found = next((spec for spec in (finder.find_spec(NAME, None) for finder in finders) if spec is not None), None)
    versions = [f"version {one.version}" for one in Distribution.discover(name=NAME) if not isinstance(one, _Metadata)]
    if found is not None or versions:
        places = [] if found is None else [f"at {found.origin or list(found.submodule_search_locations or [])}"]
        raise TilewiseError(
            f"metadata is True and a flash_attn is installed ({', '.join([*versions, *places])}): two would answer for "
            "its version; allowed is metadata=True where there is none. Uninstall it, or call install() without "
            "metadata=True: clients then see its version, and call tilewise.")


def _refusal(name: str) -> str:
    instead = next((f" {advice}" for prefix, advice in _INSTEAD.items() if f"{name}.".startswith(f"{prefix}.")), "")
    return (f"{name} is not there: tilewise.integrations.flash_attn.install() replaces flash_attn, "
            "flash_attn.flash_attn_interface, flash_attn.bert_padding and flash_attn.layers.rotary, and no other "
            f"module of flash-attn.{instead} If the code needs it, install flash-attn itself, and do not call "
            "install().")


def _forget_answers() -> None:
    """Let Transformers ask anew: it asks once a process whether flash_attn is there, and keeps its functions."""
    asked = sys.modules.get("transformers.utils.import_utils")
    known = {} if asked is None else vars(asked)
    for name, value in known.items():
        if hasattr(value, "cache_clear") and ("flash_attn" in name or name == "_package_distribution_mapping"):
            value.cache_clear()
    mapping = known.get("PACKAGE_DISTRIBUTION_MAPPING")  # of earlier versions, 5.17 among them: made at import
    if mapping is not None:
        mapping.pop(NAME, None)
        mapping.update({name: found for name, found in packages_distributions().items() if name == NAME})
    loaded = sys.modules.get("transformers.modeling_flash_attention_utils")
    if loaded is not None and vars(loaded).get("_loaded_implementation") == "flash_attention_2":
        vars(loaded)["_loaded_implementation"] = None
