"""Triton's interpreter without what it repeats, or computes and drops: the same results in less than half the time.

And with ``tl.fma`` as GPUs have it, rounded once: what a kernel loses where it takes a rounded product off an exact one
would else be seen on a GPU alone.
"""

import math
from dataclasses import replace
from functools import wraps

import numpy
from triton.language import core, semantic
from triton.runtime import interpreter


def quicken(monkeypatch):
    """Have the interpreter do once what it would do again and again."""
    patch_once_a_launch(monkeypatch)
    look_numpy_types_up_once(monkeypatch)
    leave_unread_checks_out(monkeypatch)
    sides_of = make_shapes_once(monkeypatch)
    broadcast_by_sides(monkeypatch, sides_of)
    promote_types_that_differ_alone(monkeypatch)
    know_types_by_identity(monkeypatch)
    call_builtins_directly(monkeypatch)
    compute_with_one_type_directly(monkeypatch)


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
    """Keep what a block's type and a tensor make of a shape: each result made it, and checked it, anew.

    Return the sides, ints, of each shape by its id: shapes of the same sides are one object, which is kept.
    """
    make, sides_of, of_types, of_tensors, names = core.block_type.__init__, {}, {}, {}, {}

    def make_type(self, element_ty, shape):
        sides = sides_of.get(id(shape))
        if sides is None:
            sides = tuple(side.value if isinstance(side, core.constexpr) else side for side in shape)
        if sides not in of_types:
            make(self, element_ty, shape)
            of_types[sides] = self.shape, self.numel
            sides_of[id(self.shape)] = sides
        self.element_ty = element_ty
        self.shape, self.numel = of_types[sides]
        key = sides, str(element_ty)
        if key not in names:
            names[key] = f"<{self.shape}, {element_ty}>"
        self.name = names[key]

    def make_tensor(self, handle, type):
        sides = sides_of.get(id(type.shape)) or tuple(type.shape) if type.is_block() else ()
        if sides not in of_tensors:
            of_tensors[sides] = core.tuple([core.constexpr(side) for side in sides]), core.constexpr(math.prod(sides))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sides]

    monkeypatch.setattr(core.block_type, "__init__", make_type)
    monkeypatch.setattr(core.tensor, "__init__", make_tensor)
    return sides_of


def broadcast_by_sides(monkeypatch, sides_of):
    """Compare the sides of two operands as ints: Triton's tuples wrap each in a constexpr and unwrap it, thrice a side.

    Scalars beside blocks, other ranks and sides that do not agree are left to Triton.
    """
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def stretched(self, value, own, sides):
        if own == sides:
            return value
        handle = self.builder.create_broadcast(value.handle, list(sides))
        return self.tensor(handle, core.block_type(value.type.scalar, list(sides)))

    @wraps(broadcast)
    def broadcast_quickly(self, lhs, rhs):
        if not lhs.type.is_block() and not rhs.type.is_block():
            return lhs, rhs
        if lhs.type.is_block() and rhs.type.is_block():
            left, right = sides_of.get(id(lhs.type.shape)), sides_of.get(id(rhs.type.shape))
            if left is not None and left == right:
                return lhs, rhs
            if left and right and len(left) == len(right) and all(
                    one in (1, other) or other == 1 for one, other in zip(left, right, strict=True)):
                sides = tuple(other if one == 1 else one for one, other in zip(left, right, strict=True))
                return stretched(self, lhs, left, sides), stretched(self, rhs, right, sides)
        return broadcast(self, lhs, rhs)

    monkeypatch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_quickly)


def promote_types_that_differ_alone(monkeypatch):
    """Only broadcast two operands of one type: what they are promoted and cast to is that type, but in a division."""
    check = semantic.TritonSemantic.binary_op_type_checking_impl

    @wraps(check)
    def check_quickly(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True,
                      div_or_mod=False):
        if (not div_or_mod and isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
                and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()):
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    monkeypatch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", check_quickly)


# What has the same numbers of either kind in NumPy's own broadcasting, and whether it is a comparison.
_ELEMENTWISE = {"add": (numpy.add, False), "sub": (numpy.subtract, False), "mul": (numpy.multiply, False),
                "less_than": (numpy.less, True), "less_equal": (numpy.less_equal, True),
                "greater_than": (numpy.greater, True), "greater_equal": (numpy.greater_equal, True),
                "equal": (numpy.equal, True)}
_DIRECT = {id(core.float32): numpy.float32, id(core.int32): numpy.int32, id(core.int64): numpy.int64}


def compute_with_one_type_directly(monkeypatch):
    """Hand NumPy two tensors of one type, or one and a number of its kind: it broadcasts them itself, and faster.

    Of any other operands, such as pointers, Triton makes what it would.
    """
    for name, (compute, compares) in _ELEMENTWISE.items():
        apart = getattr(semantic.TritonSemantic, name)
        monkeypatch.setattr(semantic.TritonSemantic, name, _elementwise(apart, compute, compares))


def _elementwise(apart, compute, compares):
    binary, tensor, handle_of = interpreter.InterpreterBuilder.binary_op, core.tensor, interpreter.TensorHandle

    @wraps(apart)
    def elementwise(self, lhs, rhs, *options, **named):
        like = _type_of_both(lhs, rhs)
        if like is None:
            return apart(self, lhs, rhs, *options, **named)
        dtype = like.scalar
        left, right = (value.handle if type(value) is tensor else
                       handle_of(numpy.array([value], _DIRECT[id(dtype)]), dtype) for value in (lhs, rhs))
        made = binary(self.builder, left, right, compute)
        return tensor(made, like.with_element_ty(core.int1) if compares else like)

    return elementwise


def _type_of_both(lhs, rhs):
    """Return the type of what two operands are broadcast to, or None where Triton is to find it."""
    if type(lhs) is not core.tensor:
        lhs, rhs = rhs, lhs
        if type(lhs) is not core.tensor:
            return None
    dtype, own = lhs.dtype, lhs.type
    if id(dtype) not in _DIRECT:
        return None
    if type(rhs) is core.tensor:
        other = rhs.type
        if rhs.dtype is not dtype:
            return None
        if not other.is_block():
            return own
        if not own.is_block():
            return other
        left, right = lhs.handle.data.shape, rhs.handle.data.shape
        if left == right:
            return own
        if len(left) != len(right) or not all(one in (1, side) or side == 1 for one, side in zip(
                left, right, strict=True)):
            return None
        return core.block_type(dtype, [side if one == 1 else one for one, side in zip(left, right, strict=True)])
    if dtype is core.float32:
        return own if type(rhs) in (int, float) else None
    return own if type(rhs) is int and dtype.get_int_min_value() <= rhs <= dtype.get_int_max_value() else None


def know_types_by_identity(monkeypatch):
    """Compare names of two types only where they are two: most often both are Triton's own object."""
    equals = core.dtype.__eq__
    monkeypatch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equals(self, other))


def call_builtins_directly(monkeypatch):
    """Hand builtins their semantic without the function around them that demands it."""
    around = core.builtin(lambda: None).__code__

    def patch_attr(obj, name, member, builder, scope):
        function = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def called(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    monkeypatch.setattr(interpreter, "_patch_attr", patch_attr)
