"""What is quickened in Triton's interpreter gives what Triton's own code gives."""

import itertools

import numpy
import pytest
import torch

pytest.importorskip("triton")

from triton.language import core, semantic
from triton.runtime import interpreter

if torch.cuda.is_available():
    pytest.skip("kernels are not interpreted where there is a GPU", allow_module_level=True)

SHAPES = ((), (4,), (1,), (4, 8), (4, 1), (1, 8), (1, 1), (2, 4, 8), (1, 4, 1))
TYPES = {core.float32: numpy.float32, core.float16: numpy.float16, core.int32: numpy.int32, core.int64: numpy.int64,
         core.uint32: numpy.uint32, core.int1: numpy.bool_}


def tensor(shape, dtype=core.float32):
    data = numpy.arange(1, 1 + numpy.prod(shape, dtype=int)).reshape(shape or (1,)).astype(TYPES[dtype])
    return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, list(shape)) if shape else dtype)


def outcome(function, *arguments, **options):
    """Return what becomes of two operands, or that they were refused, and how."""
    try:
        made = function(interpreter.interpreter_semantic, *arguments, **options)
    except (ValueError, TypeError, AttributeError, OverflowError, RuntimeWarning) as error:
        return type(error), str(error)
    return [(str(one.type), [int(getattr(side, "value", side)) for side in one.shape], one.handle.data.dtype,
             one.handle.data.tolist()) for one in made]


@pytest.mark.parametrize("shapes", list(itertools.product(SHAPES, SHAPES)), ids=str)
def test_broadcast_operands_are_tritons(shapes):
    quick = semantic.TritonSemantic.broadcast_impl_value
    left, right = map(tensor, shapes)
    assert outcome(quick, left, right) == outcome(quick.__wrapped__, left, right)


@pytest.mark.parametrize("is_division", [False, True])
@pytest.mark.parametrize("types", list(itertools.product(TYPES, TYPES)), ids=lambda types: f"{types[0]}-{types[1]}")
def test_promoted_operands_are_tritons(types, is_division):
    quick = semantic.TritonSemantic.binary_op_type_checking_impl
    left, right = (tensor((4, side), dtype) for side, dtype in zip((8, 1), types, strict=True))
    for operands in ((left, right), (left, 3), (2.5, right)):
        got, wanted = (outcome(function, *operands, div_or_mod=is_division) for function in (quick, quick.__wrapped__))
        assert got == wanted


NUMBERS = (3, 2.5, -1, 0.0, True, 2**31, 2**40, float("inf"))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "less_than", "less_equal", "greater_than", "greater_equal",
                                  "equal"])
def test_elementwise_results_are_tritons(name):
    quick = getattr(semantic.TritonSemantic, name)
    options = (False,) if name in ("add", "sub", "mul") else ()
    tensors = [[tensor(shape, dtype) for shape in SHAPES] for dtype in TYPES]
    pairs = [*itertools.chain(*(itertools.product(alike, alike) for alike in tensors)),
             *itertools.product((alike[3] for alike in tensors), (alike[4] for alike in tensors)),
             *((alike[place], number) for alike in tensors for place in (0, 3) for number in NUMBERS)]
    for left, right in (*pairs, *((right, left) for left, right in pairs)):
        got, wanted = (outcome(lambda *given, function=function: [function(*given)], left, right, *options)
                       for function in (quick, quick.__wrapped__))
        assert got == wanted, (left, right)


def test_sides_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match="Cannot make_shape_compatible"):
        interpreter.interpreter_semantic.broadcast_impl_value(tensor((4, 8)), tensor((2, 8)))


def test_equal_types_are_known_as_two_objects_too():
    assert core.dtype("fp32") == core.float32
    assert core.dtype("fp32") != core.float16
    assert core.block_type(core.float32, [4, 8]) == core.block_type(core.dtype("fp32"), [4, 8])
    assert core.block_type(core.float32, [4, 8]).name == f"<{core.block_type(core.int32, [4, 8]).shape}, fp32>"
