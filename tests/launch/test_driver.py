"""Launches through the CUDA driver: which kernels it takes, what it is handed, and what it says."""

import struct
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from launch.driver_double import DriverDouble, cubin_of, real
from tilewise.kernels import driver

LAYOUT = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
STREAM = 77


@pytest.fixture
def cuda(monkeypatch):
    """The double, with nothing loaded; the current stream of device 3 is 77."""
    made = DriverDouble()
    monkeypatch.setattr(driver, "bindings", lambda: made)
    made.stream = STREAM

    def stream_of(device):
        assert device == 3
        return made.stream

    monkeypatch.setattr(driver, "raw_stream", lambda: stream_of)
    driver.load.cache_clear()
    yield made
    driver.load.cache_clear()


def metadata(**changes):
    made = {"name": "some_kernel", "num_warps": 4, "shared": 2048, "num_ctas": 1, "global_scratch_size": 0,
            "profile_scratch_size": 0, "launch_cooperative_grid": False, "instrumentation_mode": "",
            "launch_pdl": False, "tensordesc_meta": None}
    return SimpleNamespace(**(made | changes))


def compiled(*types, sizes=(), **changes):
    return SimpleNamespace(metadata=metadata(**changes), asm={"cubin": cubin_of(sizes)},
                           src=SimpleNamespace(signature={f"a{i}": kind for i, kind in enumerate(types)}))


def test_an_image_is_read_of_what_triton_says():
    image = driver.image_of(compiled("tensordesc<bf16[1, 64]>", "*fp32", "constexpr", ("i32", ("constexpr", "*i8")),
                                     tensordesc_meta=[LAYOUT], launch_pdl=True, num_warps=8))
    assert image == driver.Image("some_kernel", cubin_of([]), (
        driver.TensorMap((1, 64), 3), "*fp32", "constexpr", ("i32", ("constexpr", "*i8"))), 256, 2048, True)


@pytest.mark.parametrize(("made", "words"), [
    (compiled("i32", num_ctas=2), "it wants {'num_ctas': 2}"),
    (compiled("i32", global_scratch_size=64), "it wants {'global_scratch_size': 64}"),
    (compiled("i32", profile_scratch_size=8), "it wants {'profile_scratch_size': 8}"),
    (compiled("i32", launch_cooperative_grid=True), "it wants {'launch_cooperative_grid': True}"),
    (compiled("i32", instrumentation_mode="gsan"), "it wants {'instrumentation_mode': 'gsan'}"),
    (SimpleNamespace(metadata=metadata(), asm={"hsaco": b""}), "it has no machine code for an NVIDIA GPU"),
    (compiled("fp8"), "a parameter is of type fp8"),
    (compiled("tensordesc<bf16[1, 64]>"), "a tensor map is described by None"),
    (compiled("tensordesc<bf16[1, 64]>", tensordesc_meta=[None]), "a tensor map is described by None"),
    (compiled("tensordesc<bf16[1, 64]>", tensordesc_meta=[LAYOUT | {"is_im2col": True}]),
     f"a tensor map is described by {LAYOUT | {'is_im2col': True}}"),
    (compiled("tensordesc<bf16[1, 64]>", tensordesc_meta=[{"swizzle": 3}]),
     "a tensor map is described by {'swizzle': 3}"),
    (compiled("i32", tensordesc_meta=[LAYOUT]), "it has more tensor maps than descriptors"),
    (SimpleNamespace(metadata=SimpleNamespace(), asm={"cubin": b""}),
     "it lacks what Triton 3.6 to 3.9 have: 'types.SimpleNamespace' object has no attribute 'num_ctas'"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_kernel_that_is_not_as_expected_is_unknown(made, words):
    with pytest.raises(driver.UnknownKernel) as caught:
        driver.image_of(made)
    assert str(caught.value) == words


def bound(cuda, types, arguments, leading, sizes, grid=(5,), **changes):
    image = driver.image_of(compiled(*types, sizes=sizes, **changes))
    return driver.bind(image, grid, driver.fields_of(image.types, arguments, leading), 3)


def test_parameters_lie_where_the_driver_says(cuda):
    """A byte, then pointers at multiples of 8: gaps are left. Scratch memory, which nothing wants, is null."""
    tensor = torch.zeros(4)
    launch = bound(cuda, ["i8", "*fp32", ("constexpr", "*i32"), "i32", "constexpr", "fp32"],
                   (7, tensor, (None, tensor), 1 << 20, 64, 0.1), 3, [1, 8, 8, 4, 4])
    launch((7, 0x1000, 0x2000))
    launch((9, None, 0x3000))
    assert [struct.unpack("<b7xQQifQQ", one.parameters) for one in cuda.launches] == [
        (7, 0x1000, 0x2000, 1 << 20, pytest.approx(0.1), 0, 0), (9, 0, 0x3000, 1 << 20, pytest.approx(0.1), 0, 0)]


def test_the_shape_of_a_launch_is_the_kernels(cuda):
    launch = bound(cuda, ["i32"], (1,), 0, [4], grid=(5, 2), num_warps=8)
    launch(())
    (one,) = cuda.launches
    assert (one.name, one.grid, one.block, one.shared, one.stream, one.attributes) == (
        "some_kernel", (5, 2, 1), (256, 1, 1), 2048, STREAM, [])
    attribute = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert cuda.attributes == [(attribute, 2048, 1001, 3)]


def test_a_kernel_that_overlaps_the_one_in_front_says_so(cuda):
    bound(cuda, ["i32"], (1,), 0, [4], launch_pdl=True)(())
    assert cuda.launches[0].attributes == [
        real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]


def test_each_launch_goes_to_the_stream_that_is_current_then(cuda):
    launch = bound(cuda, ["i32"], (1,), 0, [4])
    for cuda.stream in (77, 88, 0, 77):
        launch(())
    assert [one.stream for one in cuda.launches] == [77, 88, 0, 77]


def test_more_streams_than_are_kept_are_right_too(cuda, monkeypatch):
    monkeypatch.setattr(driver, "_STREAMS", 2)
    launch = bound(cuda, ["i32"], (1,), 0, [4])
    for cuda.stream in (5, 6, 7, 8, 5):
        launch(())
    assert [one.stream for one in cuda.launches] == [5, 6, 7, 8, 5]


def descriptor_of(tensor, **changes):
    return SimpleNamespace(base=tensor, shape=list(tensor.shape), strides=list(tensor.stride()),
                           **({"padding": "zero"} | changes))


def test_a_tensor_map_is_encoded_once_for_an_address(cuda):
    tensor = torch.zeros(16, 64, dtype=torch.bfloat16)
    launch = bound(cuda, ["tensordesc<bf16[1, 64]>"], (descriptor_of(tensor),), 1, [128, 4, 4, 8, 8],
                   tensordesc_meta=[LAYOUT])
    for address in (0x1000, 0x2000, 0x1000, 0x2000):
        launch((address,))
    kinds = real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert [one[:7] for one in cuda.encoded] == [(kinds, 2, address, [64, 16], [128], [64, 1], [1, 1])
                                                 for address in (0x1000, 0x2000)]
    assert [(cuda.map_in(one.parameters, 0)[2], *struct.unpack_from("<iiqq", one.parameters, 128))
            for one in cuda.launches] == [(address, 16, 64, 64, 1) for address in (0x1000, 0x2000, 0x1000, 0x2000)]


@pytest.mark.parametrize(("dtype", "itemsize", "name"), [
    (torch.float16, 2, "FLOAT16"), (torch.float32, 4, "FLOAT32")])
def test_each_dtype_has_its_tensor_map(cuda, dtype, itemsize, name):
    driver.encode(0x1000, dtype, (4, 8, 64), (512, 64, 1), driver.TensorMap((1, 8, 64), 2), fill_nan=True)
    (one,) = cuda.encoded
    assert one == (getattr(real.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"), 3, 0x1000, [64, 8, 4],
                   [64 * itemsize, 512 * itemsize], [64, 8, 1], [1, 1, 1],
                   real.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                   real.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
                   real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   real.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)


@pytest.mark.parametrize(("descriptor", "words"), [
    (descriptor_of(torch.zeros(16, 64), round_f32_to_tf32=True), "a descriptor rounds to TF32"),
    (descriptor_of(torch.zeros(2, 16, 64)),
     "a descriptor of (2, 16, 64) with strides (1024, 64, 1) goes in blocks of (1, 64)"),
    (descriptor_of(torch.zeros(64, 16).mT), "a descriptor of (16, 64) with strides (1, 16) goes in blocks of (1, 64)"),
], ids=["tf32", "rank", "last stride"])
def test_a_descriptor_that_is_not_as_expected_is_unknown(descriptor, words):
    with pytest.raises(driver.UnknownKernel) as caught:
        driver.fields_of((driver.TensorMap((1, 64), 3),), (descriptor,), 1)
    assert str(caught.value) == words


def test_a_descriptor_of_another_dtype_is_unknown(cuda):
    with pytest.raises(driver.UnknownKernel, match=r"^a descriptor's tensor is of torch\.int8$"):
        driver.encode(0x1000, torch.int8, (16, 64), (64, 1), driver.TensorMap((1, 64), 3))


def test_a_tensor_among_the_numbers_is_unknown():
    with pytest.raises(driver.UnknownKernel, match=r"^a tensor stands among the numbers$"):
        driver.fields_of(("*fp32",), (torch.zeros(1),), 0)


@pytest.mark.parametrize("sizes", [[4], [4, 8, 8], [8, 4]], ids=str)
def test_code_whose_parameters_are_not_those_of_its_types_is_unknown(cuda, sizes):
    image = driver.image_of(compiled("i32", "*fp32", sizes=sizes))
    with pytest.raises(driver.UnknownKernel) as caught:
        driver.load(image, 3)
    assert str(caught.value) == f"its parameters take {[*sizes, 8, 8]} bytes, and their types [4, 8]"
    assert cuda.loaded == [None], "it is unloaded"


def test_launches_of_one_kernel_load_its_code_once(cuda):
    for number in (1, 2):
        bound(cuda, ["i32"], (number,), 0, [4])(())
    assert len(cuda.loaded) == 1
    assert [struct.unpack_from("<i", one.parameters)[0] for one in cuda.launches] == [1, 2]


def test_a_thread_without_a_context_gets_torchs(cuda):
    launch = bound(cuda, ["i32"], (1,), 0, [4])
    cuda.stream, cuda.context = 0, 0
    launch(())
    assert (len(cuda.launches), cuda.entered) == (1, [103])
    cuda.context, cuda.entered = 42, []
    launch(())
    assert cuda.entered == [], "another that is current stays"


def test_a_kernel_is_loaded_in_a_thread_without_a_context(cuda):
    """Autograd's thread has none before its first launch: the backward's first kernel is loaded there."""
    cuda.context = 0
    launch = bound(cuda, ["i32"], (1,), 0, [4])
    launch(())
    assert (len(cuda.launches), cuda.entered) == (1, [103])


def test_an_error_while_parameters_are_asked_for_is_no_unknown_kernel(cuda, monkeypatch):
    """It would be launched by Triton, four times as slow, and nobody would know."""
    failing = real.CUresult.CUDA_ERROR_UNKNOWN, 0, 0
    monkeypatch.setattr(type(cuda), "cuKernelGetParamInfo", lambda *_: failing)
    with pytest.raises(RuntimeError, match="some_kernel: the CUDA driver says words of the driver"):
        bound(cuda, ["i32"], (1,), 0, [4])


def test_an_error_has_the_drivers_words(cuda):
    launch = bound(cuda, ["i32"], (1,), 0, [4])
    cuda.status = real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(RuntimeError, match=r"^some_kernel: the CUDA driver says words of the driver \(.*719.*\)$"):
        launch(())


def test_threads_share_a_launch(cuda):
    tensor = torch.zeros(1)
    launch = bound(cuda, ["*fp32"], (tensor,), 1, [8])
    threads = [threading.Thread(target=lambda own=own: [launch((own * 16 + i % 3,)) for i in range(200)])
               for own in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handed = [struct.unpack_from("<Q", one.parameters)[0] for one in cuda.launches]
    assert sorted(handed) == sorted(own * 16 + i % 3 for own in range(1, 5) for i in range(200))


def test_a_package_that_is_too_old_is_said(monkeypatch):
    driver.bindings.cache_clear()
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", SimpleNamespace(cuLaunchKernelEx=None), raising=False)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", cuda.bindings.driver)
    with pytest.raises(driver.UnknownKernel) as caught:
        driver.bindings()
    driver.bindings.cache_clear()
    assert str(caught.value) == ("the package cuda-bindings lacks cuLibraryLoadData, cuKernelGetParamInfo, "
                                 "cuTensorMapEncodeTiled; 12.9 and later have them")


def test_a_package_that_is_not_there_is_said(monkeypatch):
    driver.bindings.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(driver.UnknownKernel, match=r"^the package cuda-bindings is not there: "):
        driver.bindings()
    driver.bindings.cache_clear()


def test_a_torch_without_the_short_way_to_a_stream_is_asked_for_the_stream(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device))
    driver.raw_stream.cache_clear()
    assert driver.raw_stream()(2) == 42
    driver.raw_stream.cache_clear()
