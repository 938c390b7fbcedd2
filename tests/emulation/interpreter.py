"""Triton's interpreter without what it repeats, or computes and drops: the same results in less than half the time.

And with ``tl.fma`` as GPUs have it, rounded once: what a kernel loses where it takes a rounded product off an exact one
would else be seen on a GPU alone.
"""

import math
from dataclasses import replace

import numpy
from triton.language import core
from triton.runtime import interpreter


def quicken(monkeypatch):
    """Have the interpreter do once what it would do again and again."""
    patch_once_a_launch(monkeypatch)
    look_numpy_types_up_once(monkeypatch)
    leave_unread_checks_out(monkeypatch)
    make_shapes_once(monkeypatch)


def fuse_multiplication_and_addition(monkeypatch):
    """Round ``tl.fma`` of float32 once; float64 holds the product whole."""
    apart = interpreter.InterpreterBuilder.create_fma

    def fused(self, x, y, z):
        if x.data.dtype != numpy.float32:
            return apart(self, x, y, z)
        total = x.data.astype(numpy.float64) * y.data + z.data
        with numpy.errstate(over="ignore"):
            return interpreter.TensorHandle(total.astype(numpy.float32), x.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)


def round_products_of_tiles_once(monkeypatch):
    """Sum ``tl.dot`` in float64: numpy sums K Qᵀ in another order than Q Kᵀ, where GPUs sum both along the head dim.

    A score of 10⁶ has another last bit then than its lse has, and so would P another size.
    """
    def dot(self, x, y, total, precision, limit):
        product = numpy.matmul(x.data.astype(numpy.float64), y.data.astype(numpy.float64))
        return interpreter.TensorHandle((product + total.data).astype(total.data.dtype), total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def patch_once_a_launch(monkeypatch):
    """Patch the language for the first call of each module's functions in a launch, not for every call.

    What patching puts in place is the same each time, and stays until the launch has ended.
    """
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        if id(fn.__globals__) in patched:
            return None  # which a launch would need, but not a call in it
        scope = patch(fn)
        patched.add(id(fn.__globals__))
        return scope

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)


def look_numpy_types_up_once(monkeypatch):
    """Keep NumPy's type of each of Triton's: a table of all of them was made at every look-up."""
    look_up, found = interpreter._get_np_dtype, {}

    def look_up_once(dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", look_up_once)


def leave_unread_checks_out(monkeypatch):
    """Do not compute in 64 bits beside each integer sum whether it overflows: only a debugging run asserts it."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))


def make_shapes_once(monkeypatch):
    """Keep what a block's type and a tensor make of a shape: each result made it, and checked it, anew."""
    make, of_types, of_tensors = core.block_type.__init__, {}, {}

    def make_type(self, element_ty, shape):
        sides = tuple(side.value if isinstance(side, core.constexpr) else side for side in shape)
        key = str(element_ty), sides
        if key not in of_types:
            make(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = of_types[key]

    def make_tensor(self, handle, type):
        sides = tuple(type.shape) if type.is_block() else ()
        if sides not in of_tensors:
            of_tensors[sides] = core.tuple([core.constexpr(side) for side in sides]), core.constexpr(math.prod(sides))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sides]

    monkeypatch.setattr(core.block_type, "__init__", make_type)
    monkeypatch.setattr(core.tensor, "__init__", make_tensor)
