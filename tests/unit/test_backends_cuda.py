"""The float32 backends: what they refuse, how they make a product, which tile they take, what a kernel is told."""

import re
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends import cuda, cuda_ieee
from tilewise.backends._support import float32
from tilewise.backends._support.triton import precision_of
from tilewise.backends.base import Needs, Saved
from tilewise.errors import BackendUnavailable, InvalidInput
from tilewise.kernels.cuda import program as programs
from tilewise.kernels.cuda.call import UNBOUNDED, Call
from tilewise.kernels.cuda.config import CudaConfig
from tilewise.kernels.cuda.source import MAIN, source_files
from tilewise.masks import causal, prefix, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.support.caches import clear_caches
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_cuda import CUDA_SPLIT, backward_kernels, cuda_config, sum_kernels

TENSOR_CORES, FMA_PIPES = cuda.backend, cuda_ieee.backend
LENGTHS = OperandSpec((2,), (1,), torch.int32)


def problem(d=64, mask=None, **fields):
    q, k = torch.empty(2, 4, 100, d), torch.empty(2, 2, 100, d)
    made = AttentionProblem.from_tensors(q, k, k, **({} if mask is None else {"mask": mask}))
    return replace(made, device=torch.device("cuda", 0), **fields)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(float32, "lacking", lambda: None)
    monkeypatch.setattr(float32, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("asked", "words"), [
    (replace(problem(), device=torch.device("cpu")), "runs on CUDA devices, got cpu"),
    (problem(dtype=torch.bfloat16), "computes in float32, got torch.bfloat16"),
    (problem(d=257), "takes head dims up to 256, got 257 and 257"),
    (problem(mask=causal() & prefix(3)), r"takes causal masks and windows, got causal\(\) & prefix\(3\)"),
    (problem(scores=ScoreOptions(softcap=30.0)), "takes no option that changes scores or reports one, got softcap 30"),
    (problem(scores=ScoreOptions(max_logit=True)), "got max_logit"),
    (problem(sequences=Sequences(8, LENGTHS, LENGTHS)), "takes lengths of batch entries, got 8 packed sequences"),
    (problem(sk=2**29), "takes lengths below 536870912, got 100 queries and 536870912 keys"),
])
def test_what_is_refused_is_said(asked, words):
    for backend in (TENSOR_CORES, FMA_PIPES):
        for side in (asked, asked.backward(lse_grad=True)):
            assert re.search(words, backend.why_not(side) or "")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("asked", [
    problem(), problem(d=256, mask=causal()), problem(d=8), problem(d=33), problem(mask=window(3, 5)),
    problem(sequences=Sequences(seqlens_k=LENGTHS)), problem(deterministic=True), problem(sk=0),
])
def test_what_is_plain_is_taken_both_ways(asked):
    for backend in (TENSOR_CORES, FMA_PIPES):
        assert backend.why_not(asked) is None
        assert backend.why_not(asked.backward(lse_grad=True)) is None


@pytest.mark.usefixtures("hopper")
def test_older_gpus_are_refused_by_what_their_cores_lack(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert TENSOR_CORES.why_not(problem()) == ("needs CUDA compute capability 8.0 or newer, got 7.5; "
                                               "backend='cuda_ieee' takes 7.5")
    assert FMA_PIPES.why_not(problem()) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert FMA_PIPES.why_not(problem()) == "needs CUDA compute capability 7.5 or newer, got 7.0"


@pytest.mark.usefixtures("hopper")
def test_gpu_without_the_shared_memory_is_refused(monkeypatch):
    monkeypatch.setattr(float32, "device_spec", lambda device: DeviceSpec("tiny", "sm_1", 16 * 1024))
    assert TENSOR_CORES.why_not(problem()) == ("finds no tile for head dims 64 and 64 in the 16384 bytes of shared "
                                               "memory of sm_1")


@pytest.mark.parametrize(("name", "off", "on"), [("allow_tf32", False, True), ("fp32_precision", "ieee", "tf32")])
def test_single_tf32_products_are_made_only_where_torch_is_allowed_them(name, off, on):
    """torch raises where its older name is read after the newer was written: so did reading allow_tf32 here."""
    torch_settings = torch.backends.cuda.matmul
    before = torch_settings.fp32_precision
    try:
        setattr(torch_settings, name, off)
        assert (TENSOR_CORES.products, FMA_PIPES.products, precision_of(torch.float32)) == (3, 0, "ieee")
        setattr(torch_settings, name, on)
        assert (TENSOR_CORES.products, FMA_PIPES.products, precision_of(torch.float32)) == (1, 0, "tf32")
        assert precision_of(torch.float16) == "ieee"
    finally:
        torch_settings.fp32_precision = before


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("d", [8, 64, 72, 128, 160, 256])
def test_every_architecture_has_a_tile_that_fits_it(arch, d):
    device = DeviceSpec.of_arch(arch)
    for products in (0,) if arch == "sm_75" else (0, 1, 3):
        for kernel in ("forward", *sum_kernels(problem(d)), "dq", *backward_kernels(problem(d), products)):
            assert cuda_config(kernel, problem(d), device, products) is not None


def test_tiles_do_not_depend_on_lengths_or_batch():
    device = DeviceSpec.of_arch("sm_90")
    for kernel in ("forward", "dqkv", "dkdv", "dq"):
        assert (cuda_config(kernel, problem(), device, 3)
                == cuda_config(kernel, problem(b=64, sq=1, sk=9999), device, 3))


@pytest.mark.parametrize(("field", "value"), [
    ("products", 2), ("blocks", 3), ("warps", 5), ("others", 12), ("resident", 0), ("chunk", 24)])
def test_illegal_tile_cannot_be_made(field, value):
    fields = {"products": 3, "blocks": 1, "warps": 4, "others": 32, "resident": 1} | {field: value}
    with pytest.raises(InvalidInput, match=f"{field}={value}; allowed are"):
        CudaConfig(**fields)


def test_halves_take_rows_of_the_other_side_by_16():
    with pytest.raises(InvalidInput, match=re.escape("others=8; halves (products=3) allow multiples of 16")):
        CudaConfig(products=3, blocks=1, warps=4, others=8)
    assert CudaConfig(products=1, blocks=1, warps=4, others=8).others == 8


def test_a_single_product_of_tf32_reads_nothing_that_was_written_before():
    with pytest.raises(InvalidInput, match="split=True with products=1; allowed are products=0, 3"):
        CudaConfig(products=1, blocks=1, warps=4, others=16, split=True)


def test_memory_of_tiles_is_counted():
    """Rows of 64 and 4 floats, of q or of k and v, two steps of the other side's, and of queries lse and delta."""
    tile = CudaConfig(products=3, blocks=1, warps=4, others=32)
    assert tile.shared_bytes("forward", 64, 64) == 4 * (64 * 68 + 2 * 32 * 2 * 68)
    assert tile.shared_bytes("dkdv", 64, 64) == 4 * (64 * 2 * 68 + 2 * 32 * (2 * 68 + 2))
    assert tile.shared_bytes("dqkv", 64, 64) == tile.shared_bytes("dkdv", 64, 64) + 4 * 32 * (64 + 4)
    assert CUDA_SPLIT[3].shared_bytes("split", 64, 32) == 4 * 32 * (68 + 36)
    split = replace(tile, split=True)  # two landings, and two counts of warps, in 16 bytes each
    assert split.shared_bytes("forward", 64, 64) == tile.shared_bytes("forward", 64, 64) + 32
    assert split.shared_bytes("dqkv", 64, 64) == tile.shared_bytes("dqkv", 64, 64)


def test_memory_of_tiles_on_fma_pipes_is_counted():
    """Forward, q by dims and two chunks as wide as the wider of keys and values; else one step of the other side's; and
    the tiles that pass from product to product, 16 rows and 4 floats a warp.
    """
    tile = CudaConfig(products=0, blocks=4, warps=4, others=64, chunk=16)
    passed_on = 4 * 64 * 20
    assert tile.shared_bytes("forward", 96, 32) == 4 * (96 * 68 + 2 * 16 * 68 + passed_on)
    assert tile.shared_bytes("forward", 96, 128) == 4 * (96 * 68 + 2 * 16 * 132 + passed_on)
    # Chunks that land have no gaps between rows, and landings and counts of warps behind them all.
    assert replace(tile, split=True).shared_bytes("forward", 96, 128) == 4 * (96 * 68 + 2 * 16 * 128 + passed_on) + 32
    assert CUDA_SPLIT[0].shared_bytes("split", 96, 32) == 4 * (96 * 68 + 64 * 32)
    assert tile.shared_bytes("dkdv", 64, 64) == 4 * (64 * 2 * 68 + 64 * (2 * 68 + 2) + passed_on)
    assert tile.shared_bytes("dqkv", 64, 64) == tile.shared_bytes("dkdv", 64, 64)


@pytest.mark.parametrize(("kernel", "d", "tile"), [
    ("forward", 32, (2, 8, 32, 1)), ("forward", 64, (2, 8, 32, 1)), ("forward", 96, (1, 8, 64, 1, True)),
    ("forward", 128, (1, 8, 64, 1, True)), ("dqkv", 64, (1, 8, 64, 1, True)), ("dqkv", 128, (1, 8, 32, 1, True)),
    ("dkdv", 64, (1, 8, 32, 1)), ("dkdv", 128, (1, 8, 32, 1)),
    ("dq", 64, (1, 8, 32, 2)), ("dq", 128, (1, 4, 16, 2))])
@pytest.mark.parametrize("mask", [None, causal()])
def test_hopper_gets_the_tiles_that_were_fastest_there(kernel, d, tile, mask):
    assert cuda_config(kernel, problem(d, mask), DeviceSpec.of_arch("sm_90"), 3) == CudaConfig(3, *tile)


@pytest.mark.parametrize(("kernel", "d", "tile"), [
    ("forward", 64, (4, 8, 128, 1, True, 64)), ("forward", 128, (4, 8, 128, 1, True, 64)),
    ("dqkv", 64, (4, 4, 64, 2)), ("dqkv", 128, (4, 4, 32, 2)), ("dkdv", 64, (4, 4, 64, 2)),
    ("dkdv", 128, (4, 4, 32, 2)), ("dq", 64, (4, 4, 64, 2)), ("dq", 128, (4, 4, 32, 2))])
def test_fma_pipes_of_hopper_get_the_tiles_that_were_fastest_there(kernel, d, tile):
    assert cuda_config(kernel, problem(d), DeviceSpec.of_arch("sm_90"), 0) == CudaConfig(0, *tile)


@pytest.mark.parametrize(("arch", "d", "mask", "split"), [
    ("sm_90", 32, causal(), True), ("sm_100", 128, window(None, 3), True), ("sm_90", 129, None, False),
    ("sm_90", 64, window(5, 0), False), ("sm_80", 32, None, False), ("sm_120", 64, None, False)])
def test_keys_are_written_transposed_where_the_hardware_copies_tiles_that_all_begin_at_the_first_key(arch, d, mask,
                                                                                                     split):
    assert cuda_config("forward", problem(d, mask), DeviceSpec.of_arch(arch), 0).split is split


@pytest.mark.parametrize(("mask", "bounds"), [
    (None, (-UNBOUNDED, UNBOUNDED)), (causal(), (-UNBOUNDED, 0)), (window(5, 2), (-5, 2)),
    (window(2**40, 2), (-UNBOUNDED, 2))])
def test_bounds_of_the_band_fit_the_kernels_integers(mask, bounds):
    call = Call.of(problem(mask=mask))
    assert (call.lower, call.upper, call.shifted) == (*bounds, False)


def test_lengths_that_are_data_leave_the_shift_to_the_kernel():
    asked = problem(mask=causal("bottom_right"), sequences=Sequences(seqlens_k=LENGTHS))
    lengths = torch.zeros(2, dtype=torch.int64)
    call = Call.of(asked, seqlens_k=lengths)
    assert (call.lower, call.upper, call.shifted) == (-UNBOUNDED, 0, True)
    assert (call.lengths_q, call.lengths_k, call.wide_k) == (None, lengths.data_ptr(), True)


@pytest.mark.parametrize("backend", [TENSOR_CORES, FMA_PIPES], ids=lambda backend: backend.name)
def test_problem_without_a_visible_pair_launches_nothing(backend, monkeypatch):
    monkeypatch.setattr(float32, "_launch", None)
    q, k = torch.randn(1, 2, 5, 8), torch.empty(1, 2, 0, 8)
    empty = AttentionProblem.from_tensors(q, k, k)
    out, lse, _ = backend.forward(empty, q, k, k)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == float("-inf")).all()
    gradients = backend.backward(empty.backward(lse_grad=False), Saved(q, k, k, out, lse), out, None, Needs())
    assert torch.equal(gradients.dq, torch.zeros_like(q))


def test_gradients_that_nobody_needs_are_not_launched(monkeypatch):
    launched = []
    monkeypatch.setattr(float32, "_launch", lambda kernel, *_: launched.append(kernel))
    q = torch.randn(1, 2, 5, 8)
    saved, plain = Saved(q, q, q, q, torch.zeros(1, 2, 5)), AttentionProblem.from_tensors(q, q, q)
    for needs, kernels in ((Needs(), ["delta", "dqkv"]), (Needs(dkv=False), ["delta", "dq"]),
                           (Needs(dq=False), ["delta", "dkdv"])):
        TENSOR_CORES.backward(plain.backward(lse_grad=False), saved, q, None, needs)
        assert launched == kernels
        launched.clear()


@pytest.mark.parametrize(("asked", "products", "kernels"), [
    (problem(), 3, ("dqkv",)), (problem(d=128), 3, ("dqkv",)), (problem(deterministic=True), 3, ("dkdv", "dq")),
    (problem(), 1, ("dkdv", "dq")), (problem(), 0, ("dqkv",)), (problem(d=129), 3, ("dk", "dv", "dq"))])
def test_one_kernel_makes_every_gradient_where_dq_may_be_summed_in_any_order(asked, products, kernels):
    assert backward_kernels(asked, products) == kernels


def test_delta_has_one_program_for_all_head_dims_and_storages():
    spec = DeviceSpec.of_arch("sm_90")
    found = [float32.plan("delta", problem(d=d), spec, products, vectors)
             for d, products, vectors in ((8, 3, False), (64, 0, True), (256, 3, True))]
    assert found == [(found[0][0], 0, -(-problem().sq // 8), problem().hq)] * 3


def test_dq_is_zeros_before_a_kernel_adds_to_it(monkeypatch):
    q = torch.full((1, 2, 5, 8), 3.0)
    monkeypatch.setattr(float32, "_launch", lambda *_: None)
    monkeypatch.setattr(float32, "_empty_like", lambda tensor: torch.full_like(tensor, float("nan")))
    saved, plain = Saved(q, q, q, q, torch.zeros(1, 2, 5)), AttentionProblem.from_tensors(q, q, q)
    for deterministic in (False, True):
        asked = replace(plain, deterministic=deterministic).backward(lse_grad=False)
        dq = TENSOR_CORES.backward(asked, saved, q, None, Needs()).dq
        assert dq.isnan().all() if deterministic else (dq == 0).all()


@pytest.mark.parametrize(("kernel", "split"), [("forward", "kv"), ("dqkv", "qdout"), ("dq", "kv")])
def test_what_comes_in_steps_is_split_before_and_the_rest_stays(kernel, split, monkeypatch):
    calls = []
    monkeypatch.setattr(float32, "load", lambda program, *_: lambda call, programs: calls.append(
        (program.kernel, programs, {name: getattr(call, name).data for name in ("q", "k", "v", "dout")},
         (call.dk.data, call.dv.data))))
    monkeypatch.setattr(float32, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    monkeypatch.setattr(float32, "cuda_config", lambda *_: CudaConfig(3, 1, 4, 32, split=True))
    clear_caches()
    q, k, v, dout = (torch.empty(2, heads, 40, 64) for heads in (4, 2, 2, 4))
    asked = AttentionProblem.from_tensors(q, k, v)
    call = Call.of(asked, q=q, k=k, v=v, dout=dout)
    float32._launch(kernel, asked, call, 3, vectors=True)
    clear_caches()
    (first, programs_of_split, _, (one, other)), (second, _, seen, _) = calls
    assert (first, second) == ("split", kernel)
    own = {name: tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v), ("dout", dout))}
    expected = {"kv": {"k": one, "v": other}, "qdout": {"q": one, "dout": other}}[split]
    assert programs_of_split == 2 * 2 * (2 if split == "kv" else 4)
    assert seen == own | expected
    assert call.q.data == q.data_ptr(), "the caller's call is as it was"


@pytest.mark.parametrize(("made", "vectors"), [
    (lambda: torch.empty(2, 3, 8, 16), True), (lambda: torch.empty(2, 8, 3, 16).transpose(1, 2), True),
    (lambda: torch.empty(2, 3, 8, 18)[..., :16], False), (lambda: torch.empty(2, 3, 16, 8).mT, False),
    (lambda: torch.empty(2 * 3 * 8 * 16 + 1)[1:].view(2, 3, 8, 16), False),
    (lambda: torch.empty(2, 3, 8, 18), False), (lambda: torch.empty(1, 3, 8, 16).as_strided((1, 3, 8, 16),
                                                                                            (7, 128, 16, 1)), True)])
def test_rows_are_copied_16_bytes_at_a_time_only_where_each_begins_at_such_a_multiple(made, vectors):
    assert float32._takes_vectors(made()) is vectors


def test_headers_are_those_that_the_source_includes():
    files, reached, todo = source_files(), set(), [MAIN]
    while todo:
        reached.add(name := todo.pop())
        todo += set(re.findall(r'^#include "(.+)"$', files[name].decode(), re.MULTILINE)) - reached
    assert reached == set(files)


@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_a_change_of_any_file_of_the_source_is_another_kernel_in_the_cache(monkeypatch):
    files, program = source_files(), programs.Program("forward", CudaConfig(0, 4, 4, 32), d=64, dv=64, vectors=True)
    names = {programs.file_name(program, "sm_90")}
    for name in files:
        monkeypatch.setattr(programs, "source_files", lambda name=name: files | {name: files[name] + b"\n"})
        names.add(programs.file_name(program, "sm_90"))
    assert len(names) == 1 + len(files)


@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_compiled_kernel_is_taken_from_the_cache_and_compiled_anew_for_another_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "kernels"))
    program = float32.plan("delta", problem(), DeviceSpec.of_arch("sm_90"), 3, True)[0]
    code = programs.machine_code(program, "sm_90")
    assert code.startswith(b"\x7fELF")
    (kept,) = (tmp_path / "kernels").iterdir()
    kept.write_bytes(b"from the cache")
    assert programs.machine_code(program, "sm_90") == b"from the cache"
    assert programs.machine_code(program, "sm_80").startswith(b"\x7fELF")
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def _file_in_the_way(folder):
    (folder / "file").write_text("no folder")
    return str(folder / "file" / "kernels")


def _folder_in_the_way(folder):
    """What a kernel's file is renamed to is a folder: neither read nor replaced."""
    (folder / f"delta-sm_90-{'0' * 24}.cubin").mkdir()
    return str(folder)


@pytest.mark.parametrize("make", [_file_in_the_way, _folder_in_the_way, None], ids=["folder", "file", "home"])
def test_without_a_cache_that_can_be_written_kernels_are_compiled_with_one_warning(make, tmp_path, monkeypatch):
    """It was an OSError, of a folder of which no argument had been named."""
    monkeypatch.setattr(programs, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    monkeypatch.setattr(programs, "compile_program", lambda program, arch: (b"compiled", ""))
    monkeypatch.setattr(programs.hashlib, "sha256", lambda key: SimpleNamespace(hexdigest=lambda: "0" * 64))
    for name in ("TILEWISE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if make is None:
        monkeypatch.setattr(Path, "home", _no_home)
    else:
        monkeypatch.setenv("TILEWISE_CACHE", make(tmp_path))
    before = sorted(tmp_path.iterdir())
    program = float32.plan("delta", problem(), DeviceSpec.of_arch("sm_90"), 3, True)[0]
    programs._tell_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot be kept on disk.*: .+\. Set TILEWISE_CACHE to a folder"):
        assert programs.machine_code(program, "sm_90") == b"compiled"
    assert programs.machine_code(program, "sm_90") == b"compiled", "and told once"
    assert sorted(tmp_path.iterdir()) == before, "nothing half made is left"


@pytest.mark.parametrize("mends", [True, False])
def test_kept_kernel_that_the_driver_refuses_is_compiled_anew_once(mends, tmp_path, monkeypatch):
    """A file that a crash had left empty made every process fail until somebody deleted it."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(programs, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    compiled, loaded = [], []
    monkeypatch.setattr(programs, "compile_program", lambda *_: (compiled.append(b"whole") or b"whole", ""))

    def load(code):
        loaded.append(code)
        return int(code != b"whole" or not mends), "module"

    driver = _driver(cuModuleLoadData=load, cuGetErrorString=lambda error: (0, b"invalid image"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    program = programs.Program("delta", CudaConfig(products=3, blocks=1, warps=4, others=32), 64, 64, vectors=True)
    programs.machine_code(program, "sm_90")
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"")
    if mends:
        programs._loaded.__wrapped__(program, "sm_90", 3, 0)
    else:
        with pytest.raises(RuntimeError, match="attention_backward_delta_kernel: invalid image"):
            programs._loaded.__wrapped__(program, "sm_90", 3, 0)
    assert loaded == [b"", b"whole"]
    assert compiled == [b"whole"] * 2
    assert kept.read_bytes() == b"whole"


def _driver(**functions):
    """A driver that takes everything, but for what is given."""
    return SimpleNamespace(**{
        "CUresult": SimpleNamespace(CUDA_SUCCESS=0), "CUfunction_attribute": SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=0, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=1),
        "cuCtxGetCurrent": lambda: (0, 1), "cuModuleLoadData": lambda code: (0, "module"),
        "cuModuleGetFunction": lambda *_: (0, "function"), "cuFuncSetAttribute": lambda *_: (0,),
        "cuLaunchKernel": lambda *_: (0,)} | functions)


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_failing_compiler_is_quoted(monkeypatch):
    failing = SimpleNamespace(nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0), nvrtcCreateProgram=lambda *_: (1, None),
                              nvrtcGetErrorString=lambda error: (0, b"NVRTC_ERROR_OUT_OF_MEMORY"))
    monkeypatch.setattr(programs, "_nvrtc", lambda: failing)
    program = float32.plan("delta", problem(), DeviceSpec.of_arch("sm_90"), 3, True)[0]
    with pytest.raises(BackendUnavailable, match="NVRTC: NVRTC_ERROR_OUT_OF_MEMORY"):
        programs.compile_program(program, "sm_90")


def without_library():
    raise RuntimeError("Failure finding libnvrtc.so\nlisted: these folders")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("module", "told"), [
    (None, "import of cuda.bindings halted; None in sys.modules"),
    (SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=without_library)), "Failure finding libnvrtc.so"),
], ids=["no package", "no library"])
def test_package_and_library_that_are_missing_are_named_before_a_call_needs_them(module, told, monkeypatch):
    """With the package and without the library, the problem was taken, and the call failed."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    monkeypatch.setattr(float32, "lacking", programs.lacking)
    programs.lacking.cache_clear()
    try:
        reason = ("needs the package cuda-bindings and the library NVRTC, which CUDA builds of torch bring; others "
                  f"need tilewise[cuda]: {told}")
        assert TENSOR_CORES.why_not(problem()) == FMA_PIPES.why_not(problem()) == reason
        program = float32.plan("delta", problem(), DeviceSpec.of_arch("sm_90"), 3, True)[0]
        with pytest.raises(BackendUnavailable) as caught:
            programs.compile_program(program, "sm_90")
        assert str(caught.value) == f"backend 'cuda' {reason}"
    finally:
        programs.lacking.cache_clear()


def test_a_thread_without_a_context_is_given_the_device_s(monkeypatch):
    """A backward pass in autograd's thread found none: only calls of the CUDA runtime make one current."""
    contexts, made = threading.local(), []

    def current():
        return 0, getattr(contexts, "own", 0)

    def enqueue(*arguments):
        made.append(current()[1])
        return (0,)

    driver = _driver(
        cuCtxGetCurrent=current, cuCtxSetCurrent=lambda one: (0, setattr(contexts, "own", one)),
        cuDevicePrimaryCtxRetain=lambda device: (0, 70 + device), cuLaunchKernel=enqueue)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(programs, "machine_code", lambda *_: b"")
    monkeypatch.setattr(programs, "_thread", threading.local())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    program = programs.Program("delta", CudaConfig(products=3, blocks=1, warps=4, others=32), 64, 64, vectors=True)
    launch = programs._loaded.__wrapped__(program, "sm_90", 3, 0)
    launch(Call(), 1)
    thread = threading.Thread(target=lambda: [launch(Call(), 1), launch(Call(), 1)])
    thread.start()
    thread.join()
    assert made == [73, 73, 73]
