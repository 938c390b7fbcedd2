"""Settings that every test shares: the device, poisoned memory, the backends, the interpreter, hypothesis' budget."""

import functools
import gc
import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is imported whether kernels are interpreted: before any test module imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

from tilewise.dispatch import BACKENDS, get_backend
from tilewise.tuning.device import device_spec

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=20, database=None)
settings.load_profile("suite")


LARGE_BYTES = 2**30


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                     help="device that the tests compute on (default: cuda where there is one, else cpu)")


def pytest_collection_modifyitems(config, items):
    device = config.getoption("--device")
    on_cpu = torch.device(device).type == "cpu"
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if on_cpu and parameters.get("backend") == "triton":
            item.add_marker(pytest.mark.interpret)
            # A kernel computes hidden pairs too before it drops them. A GPU does so silently, numpy warns.
            for chatter in ("overflow encountered in (exp2|multiply)", "invalid value encountered in matmul"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{chatter}:RuntimeWarning"))
        if on_cpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA or ROCm device; --device is {device}"))


def pytest_collection_finish():
    """Have garbage collections pass over what stays to the end: each took 0.8 s to look at nearly 20 000 tests."""
    gc.freeze()


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def hopper_gpu(device):
    """Skip a test of what is made for sm_90 alone, on other GPUs."""
    if device_spec(device).arch != "sm_90":
        pytest.skip("runs on Hopper GPUs")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    """Each backend in turn; a test skips with ``why_not``'s sentence what this one refuses."""
    return get_backend(request.param)


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """Fill what torch.empty and its kin return with NaN, so that an output element nobody wrote is seen."""
    allocators = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
                  (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in allocators:
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def memory_for_others():
    """Give a large test's memory back: other processes of the suite share the GPU, and torch would keep it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > LARGE_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    from emulation.interpreter import fuse_multiplication_and_addition, quicken

    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        fuse_multiplication_and_addition(patch)
        yield


def _poisoned(allocate):
    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned
