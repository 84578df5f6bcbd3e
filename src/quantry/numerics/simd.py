"""Small loops as machine code: arithmetic on 16 float32 lanes written in Python, compiled by LLVM for this processor.

A `Kernel` runs Python code on `Vector`s once and records the operations instead of doing them. LLVM maps 16 lanes onto
the registers the processor has. Every operation is one IEEE operation (nothing is fused or reordered), so each lane
computes exactly what scalar code would. Compiling takes about a tenth of a second.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch

LANES = 16
AVAILABLE = find_spec("llvmlite") is not None and sys.platform != "win32"  # not tested there
_lock = Lock()  # one thread at a time sets up LLVM


class Vector:
    """A number in each lane."""

    def __init__(self, kernel: "Kernel", value: Any) -> None:
        self.kernel, self.value = kernel, value

    def __add__(self, other: "Operand") -> "Vector":
        return self.kernel.record("fadd", self, other)

    def __sub__(self, other: "Operand") -> "Vector":
        return self.kernel.record("fsub", self, other)

    def __mul__(self, other: "Operand") -> "Vector":
        return self.kernel.record("fmul", self, other)

    def __truediv__(self, other: "Operand") -> "Vector":
        return self.kernel.record("fdiv", self, other)

    def __rtruediv__(self, other: float) -> "Vector":
        return self.kernel.constant(other) / self

    def __neg__(self) -> "Vector":
        return self.kernel.record("fneg", self)

    def __abs__(self) -> "Vector":
        return self.kernel.call("fabs", self)

    def __lt__(self, other: "Operand") -> "Mask":
        return self.kernel.compare("<", self, other)

    def __gt__(self, other: "Operand") -> "Mask":
        return self.kernel.compare(">", self, other)

    def equals(self, other: "Operand") -> "Mask":
        return self.kernel.compare("==", self, other)

    def differs(self, other: "Operand") -> "Mask":
        return self.kernel.compare("!=", self, other)


class Mask:
    """True or false in each lane."""

    def __init__(self, kernel: "Kernel", value: Any) -> None:
        self.kernel, self.value = kernel, value

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(self.kernel, self.kernel.builder.and_(self.value, other.value))

    def __invert__(self) -> "Mask":
        return Mask(self.kernel, self.kernel.builder.not_(self.value))


Operand = Vector | float


class Kernel:
    """A function of pointers and a count, recorded by `body(kernel)`; call it with tensors (or None) and the count."""

    def __init__(self, body: Callable[["Kernel"], None], pointers: int) -> None:
        self.ir = import_module("llvmlite.ir")
        self.float, self.byte, self.index = self.ir.FloatType(), self.ir.IntType(8), self.ir.IntType(64)
        self.vector = self.ir.VectorType(self.float, LANES)
        self.module = self.ir.Module()
        types = [*[self.float.as_pointer()] * pointers, self.index]
        self.function = self.ir.Function(self.module, self.ir.FunctionType(self.ir.VoidType(), types), "kernel")
        self.builder = self.ir.IRBuilder(self.function.append_basic_block())
        *self.pointers, self.count = self.function.args
        body(self)
        self.builder.ret_void()
        with _lock:
            self.engine, address = _compile(str(self.module))
        self.run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, ctypes.c_int64)(address)

    def __call__(self, *arguments: torch.Tensor | int | None) -> None:
        """Runs the kernel, without holding Python's lock."""
        self.run(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))

    # Numbers in lanes

    def constant(self, number: float) -> Vector:
        return Vector(self, self.ir.Constant(self.vector, [ctypes.c_float(number).value] * LANES))

    def record(self, operation: str, *operands: Operand) -> Vector:
        return Vector(self, getattr(self.builder, operation)(*(self._value(operand) for operand in operands)))

    def compare(self, sign: str, left: Vector, right: Operand) -> Mask:
        return Mask(self, self.builder.fcmp_ordered(sign, left.value, self._value(right)))

    def where(self, mask: Mask, yes: Operand, no: Operand) -> Vector:
        return Vector(self, self.builder.select(mask.value, self._value(yes), self._value(no)))

    def nearest(self, value: Vector) -> Vector:
        """Rounds to the nearest whole number, halves to even."""
        return self.call("rint", value)

    def root(self, value: Vector) -> Vector:
        return self.call("sqrt", value)

    def least(self, left: Vector, right: Operand) -> Vector:
        """Returns the smaller operand; if one is NaN, the other."""
        return self.call("minnum", left, right)

    def most(self, left: Vector, right: Operand) -> Vector:
        return self.call("maxnum", left, right)

    def clamp(self, value: Vector, low: float, high: float) -> Vector:
        """Clamps a value to limits; NaN becomes the lower one."""
        return self.least(self.most(value, low), high)

    def call(self, name: str, *operands: Operand) -> Vector:
        """Calls one of LLVM's own functions."""
        full = f"llvm.{name}.v{LANES}f32"
        signature = self.ir.FunctionType(self.vector, [self.vector] * len(operands))
        function = self.module.globals.get(full) or self.ir.Function(self.module, signature, full)
        return Vector(self, self.builder.call(function, [self._value(operand) for operand in operands]))

    # Loops

    def repeat(self, times: Any, state: Sequence[Operand], body: Callable[..., Sequence[Vector]]) -> list[Vector]:
        """Records a loop that runs at least once: `body(index, *state)` returns the next state; returns the last."""
        count = self.index(times) if isinstance(times, int) else times
        before, head = self.builder.block, self.function.append_basic_block()
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(self.index)
        carried = [self.builder.phi(self.vector) for _ in state]
        after = list(body(index, *(Vector(self, phi) for phi in carried)))
        following = self.builder.add(index, self.index(1))
        for phi, first, last in zip(carried, state, after, strict=True):
            phi.add_incoming(self._value(first), before)
            phi.add_incoming(last.value, self.builder.block)
        index.add_incoming(self.index(0), before)
        index.add_incoming(following, self.builder.block)
        out = self.function.append_basic_block()
        self.builder.cbranch(self.builder.icmp_unsigned("<", following, count), head, out)
        self.builder.position_at_end(out)
        return after

    def each(self, times: Any, body: Callable[[Any], None]) -> None:
        """Records a loop without a state."""

        def step(index: Any) -> tuple[()]:
            body(index)
            return ()

        self.repeat(times, [], step)

    def each_tile(self, body: Callable[[Any], None]) -> None:
        """Records a loop over `count` in steps of 16: body(first)."""
        self.each(self.builder.udiv(self.count, self.index(LANES)), lambda index: body(self.at(index, LANES, 0)))

    def fill(self, array: "Array", value: Callable[[Any], Vector]) -> None:
        """Sets every element of an array."""
        self.each(array.length, lambda index: array.__setitem__(index, value(index)))

    # Memory

    def array(self, length: int) -> "Array":
        with self.builder.goto_entry_block():  # within a loop, every turn would take new memory
            start = self.builder.alloca(self.ir.ArrayType(self.vector, length))
        return Array(self, start, length)

    def table(self, numbers: Sequence[float]) -> Any:
        """Returns a pointer to constants."""
        array = self.ir.ArrayType(self.float, len(numbers))
        table = self.ir.GlobalVariable(self.module, array, self.module.get_unique_name("table"))
        table.initializer = self.ir.Constant(array, [ctypes.c_float(number).value for number in numbers])
        return self.builder.gep(table, [self.index(0), self.index(0)])

    def at(self, row: Any, width: Any, column: Any) -> Any:
        """Returns the index of an element of a matrix."""
        high, wide, far = (self.index(number) if isinstance(number, int) else number for number in (row, width, column))
        return self.builder.add(self.builder.mul(high, wide), far)

    def pick(self, pointer: Any, index: Any) -> Vector:
        """Loads one number for all lanes."""
        number = self.builder.load(self.builder.gep(pointer, [index]))
        first = self.builder.insert_element(self.ir.Constant(self.vector, self.ir.Undefined), number, self.index(0))
        return Vector(self, self._shuffled(first, first, [0] * LANES))

    def load(self, pointer: Any, index: Any) -> Vector:
        """Loads the 16 numbers from an index on."""
        return Vector(self, self.builder.load(self._address(pointer, index, self.vector), align=4))

    def store(self, value: Vector, pointer: Any, index: Any) -> None:
        self.builder.store(value.value, self._address(pointer, index, self.vector), align=4)

    def load_bytes(self, pointer: Any, index: Any) -> Vector:
        """Loads the 16 bytes from an index on, as numbers."""
        numbers = self.builder.load(self._address(pointer, index, self._bytes()), align=1)
        return Vector(self, self.builder.uitofp(numbers, self.vector))

    def store_bytes(self, value: Vector, pointer: Any, index: Any) -> None:
        """Stores whole numbers from 0 to 255 as bytes."""
        numbers = self.builder.fptoui(value.value, self._bytes())
        self.builder.store(numbers, self._address(pointer, index, self._bytes()), align=1)

    def load_rows(self, pointer: Any, first: Any, width: int, column: Any, array: "Array") -> None:
        """Loads elements from a column on of 16 rows of a matrix, so that a lane holds a row."""
        for start in range(0, array.length, LANES):
            rows = [self.load(pointer, place).value for place in self._rows(first, width, column, start)]
            for element, value in enumerate(self._transposed(rows)):
                array[start + element] = Vector(self, value)

    def store_rows(self, array: "Array", pointer: Any, first: Any, width: int, column: Any) -> None:
        """Stores elements into a matrix of bytes; inverts `load_rows`."""
        for start in range(0, array.length, LANES):
            rows = self._transposed([array[start + element].value for element in range(LANES)])
            for value, place in zip(rows, self._rows(first, width, column, start), strict=True):
                self.store_bytes(Vector(self, value), pointer, place)

    def _rows(self, first: Any, width: int, column: Any, start: int) -> list[Any]:
        """Returns the index of each of 16 rows of a matrix at a column plus an offset."""
        rows = [self.builder.add(first, self.index(row)) for row in range(LANES)]
        return [self.at(row, width, self.builder.add(column, self.index(start))) for row in rows]

    def _transposed(self, rows: list[Any]) -> list[Any]:
        """Transposes by swapping ever larger off-diagonal blocks: 1 by 1, 2 by 2, 4 by 4, 8 by 8."""
        for step in (1, 2, 4, 8):
            low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
            high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
            for row in (row for row in range(LANES) if not row & step):
                upper, lower = rows[row], rows[row + step]
                rows[row], rows[row + step] = self._shuffled(upper, lower, low), self._shuffled(upper, lower, high)
        return rows

    def _shuffled(self, left: Any, right: Any, order: list[int]) -> Any:
        indices = self.ir.Constant(self.ir.VectorType(self.ir.IntType(32), LANES), order)
        return self.builder.shuffle_vector(left, right, indices)

    def _address(self, pointer: Any, index: Any, vector: Any) -> Any:
        start = self.builder.bitcast(pointer, vector.element.as_pointer())
        return self.builder.bitcast(self.builder.gep(start, [index]), vector.as_pointer())

    def _bytes(self) -> Any:
        return self.ir.VectorType(self.byte, LANES)

    def _value(self, operand: Operand) -> Any:
        return (operand if isinstance(operand, Vector) else self.constant(operand)).value


class Array:
    """Vectors in memory, which stay in the processor's first cache."""

    def __init__(self, kernel: Kernel, start: Any, length: int) -> None:
        self.kernel, self.start, self.length = kernel, start, length

    def _place(self, index: Any) -> Any:
        number = self.kernel.index(index) if isinstance(index, int) else index
        return self.kernel.builder.gep(self.start, [self.kernel.index(0), number])

    def __getitem__(self, index: Any) -> Vector:
        return Vector(self.kernel, self.kernel.builder.load(self._place(index)))

    def __setitem__(self, index: Any, value: Vector) -> None:
        self.kernel.builder.store(value.value, self._place(index))


def _compile(source: str) -> tuple[Any, int]:
    """Compiles for this processor; returns the engine, which keeps the code alive, and its address."""
    llvm = import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(source)
    module.verify()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine, engine.get_function_address("kernel")
