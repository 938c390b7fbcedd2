"""Every cache of what a call led to is registered, so that one call clears them all."""

import ast
import functools
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.support.caches import clear_caches, is_registered, registered

SOURCE = Path(tilewise.__file__).parent
# Modules that nobody can import here: what they need is not installed, or they run when they are imported.
LEFT_OUT = ("tilewise.__main__",)
# Bounded caches of something else than what a call led to, with what they hold.
OTHERS = {
    "tilewise.kernels.cuda.program._loaded": "compiled kernels",
    "tilewise.bench.cached.copy_gb_per_s": "a measurement of a device",
}
# Dicts that modules fill while they run, and hold something else.
OTHER_DICTS = {
    "tilewise.validate.names._arguments": "the arguments of each public call",
    "tilewise.backends._support.self_check._found": "what checks of a device found; forget() drops it",
    "tilewise.kernels.cudnn.lengths._kept": "tensors that captured graphs read",
    "tilewise.kernels.hopper.launch._SPARE": "counters that captured graphs use",
}
CALLS = ("Problem", "Options", "Operands", "Facts", "Spec")  # what describes a call, in an annotation


def modules():
    names = [info.name for info in pkgutil.walk_packages(tilewise.__path__, "tilewise.")]
    return [tilewise, *(importlib.import_module(name) for name in names if name not in LEFT_OUT)]


def functools_caches():
    """Return each cache that functools made, by module and name; a name that was imported is its module's own."""
    made = {}
    for module in modules():
        owners = [(module.__name__, vars(module))]
        owners += [(f"{module.__name__}.{name}", vars(one)) for name, one in vars(module).items()
                   if inspect.isclass(one) and one.__module__ == module.__name__]
        for owner, names in owners:
            for name, value in names.items():
                if isinstance(value, functools._lru_cache_wrapper) and value not in made.values() and (
                        value.__module__.startswith("tilewise")):
                    made[f"{owner}.{name}"] = value
    return made


@pytest.fixture(scope="module")
def caches():
    pytest.importorskip("triton", reason="modules of kernels import Triton")
    return functools_caches()


def home_of(name, cache):
    return f"{cache.__module__}.{cache.__qualname__}" if cache.__module__ != "tilewise" else name


def test_every_bounded_cache_is_registered(caches):
    bounded = {home_of(name, cache): cache for name, cache in caches.items()
               if cache.cache_parameters()["maxsize"] is not None}
    assert len(bounded) > 10
    assert {name for name, cache in bounded.items() if not is_registered(cache)} == set(OTHERS)


def test_no_unbounded_cache_is_keyed_by_a_call(caches):
    unbounded = {home_of(name, cache): cache for name, cache in caches.items()
                 if cache.cache_parameters()["maxsize"] is None}
    assert len(unbounded) > 5

    def parameters(cache):
        return [str(one.annotation) for one in inspect.signature(cache).parameters.values()]

    assert {name for name, cache in unbounded.items()
            if any(word in annotation for annotation in parameters(cache) for word in CALLS)} == set()


def test_every_dict_that_a_module_fills_is_registered_or_holds_something_else(caches):
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(("tilewise", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for line in ast.parse(path.read_text("utf-8")).body:
            target = line.target if isinstance(line, ast.AnnAssign) else None
            if isinstance(target, ast.Name) and isinstance(line.value, ast.Dict) and not line.value.keys:
                found.add(f"{name}.{target.id}")
    assert found == set(OTHER_DICTS)


def test_clearing_empties_what_calls_led_to_and_changes_no_result(caches):
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    clear_caches()
    before = tilewise.attention(q, k, v, mask=tilewise.causal(), softcap=2.0)
    before.sum().backward()
    held = [name for name, cache in caches.items() if is_registered(cache) and cache.cache_info().currsize]
    assert len(held) >= 2
    clear_caches()
    assert [name for name, cache in caches.items() if is_registered(cache) and cache.cache_info().currsize] == []
    assert torch.equal(tilewise.attention(q, k, v, mask=tilewise.causal(), softcap=2.0), before)


def test_dicts_and_caches_of_functools_are_taken_and_handed_back():
    mapping = {1: 2}
    doubled = functools.lru_cache(maxsize=4)(lambda x: 2 * x)
    from tilewise.support import caches as registry

    places = len(registry._registered)
    try:
        assert registered(mapping) is mapping
        assert registered(doubled) is doubled
        doubled(1)
        clear_caches()
        assert mapping == {}
        assert doubled.cache_info().currsize == 0
        assert not is_registered({})
    finally:
        del registry._registered[places:], registry._clears[places:]
