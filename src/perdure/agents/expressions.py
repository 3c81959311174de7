"""Arithmetic and small Python expressions, evaluated from their syntax tree within bounds.

Nothing is compiled or executed: a node that is not listed here is refused. There are no loops, no
attributes, no names but those of a few functions; numbers and sequences have a largest size. So an
expression takes at most some milliseconds.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from perdure.core.agent_api import ToolError

MAX_CHARACTERS = 256
MAX_NODES = 200
MAX_BITS = 4096
"""Of an integer, on the way to the result as well."""
MAX_ITEMS = 1000
"""Of a range."""
MAX_EXPONENT = 4096
_MAX_DIGITS = 300

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "all": all,
    "any": any,
    "divmod": divmod,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "range": lambda *bounds: list(_bounded_range(*bounds)),
    "round": lambda number, digits=0: _rounded(number, digits),
    "sorted": sorted,
    "sum": sum,
}
_REFUSED = (ArithmeticError, TypeError, ValueError, IndexError, RecursionError)


def calculate(text: str) -> str:
    """The value of an arithmetic expression: numbers, ``+ - * / // % **``, parentheses.

    Raises:
        ToolError: It is none, is too long, or has no value of a size that is allowed.
    """
    value = _Evaluation(only_numbers=True).value_of(text)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def evaluate(text: str) -> str:
    """The value of a Python expression of numbers, text, lists, comparisons and a few functions.

    Raises:
        ToolError: As :func:`calculate`.
    """
    return repr(_Evaluation(only_numbers=False).value_of(text))


class _Evaluation:
    """One expression. ``only_numbers`` leaves arithmetic alone."""

    def __init__(self, *, only_numbers: bool) -> None:
        self._only_numbers = only_numbers

    def value_of(self, text: str) -> Any:
        if len(text) > MAX_CHARACTERS:
            raise ToolError(f"an expression has at most {MAX_CHARACTERS} characters")
        if "\\" in text:
            raise ToolError("an expression has no backslash")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ToolError("this is not an expression") from None
        if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
            raise ToolError(f"an expression has at most {MAX_NODES} parts")
        try:
            return self._value(tree.body)
        except _REFUSED as error:
            raise ToolError(f"{type(error).__name__}: {str(error)[:80]}") from None

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return _within_bounds(value)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _within_bounds(_UNARY[type(op)](self._value(operand)))
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
                return _combined(type(op), self._value(left), self._value(right))
        if self._only_numbers:
            raise ToolError("only numbers, + - * / // % ** and parentheses are understood")
        return self._other_value(node)

    def _other_value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | str() as value):
                return value
            case ast.List(elts=items):
                return [self._value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple([self._value(item) for item in items])
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compared(self._value(left), ops, others)
            case ast.BoolOp(op=op, values=values):
                found = [self._value(value) for value in values]
                return all(found) if isinstance(op, ast.And) else any(found)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body) if self._value(test) else self._value(orelse)
            case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
                return self._value(value)[self._value(index)]
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._called(name, arguments)
        raise ToolError(f"{type(node).__name__} is not understood here")

    def _compared(self, left: Any, ops: Sequence[ast.cmpop], others: Sequence[ast.expr]) -> bool:
        for op, other in zip(ops, others, strict=True):
            if type(op) not in _COMPARED:
                raise ToolError(f"{type(op).__name__} is not understood here")
            right = self._value(other)
            if not _COMPARED[type(op)](left, right):
                return False
            left = right
        return True

    def _called(self, name: str, arguments: Sequence[ast.expr]) -> Any:
        function = _FUNCTIONS.get(name)
        if function is None:
            raise ToolError(f"there is no function {name}; known: {', '.join(_FUNCTIONS)}")
        return _within_bounds(function(*[self._value(argument) for argument in arguments]))


def _combined(op: type[ast.operator], left: Any, right: Any) -> Any:
    if op is not ast.Add and not (_is_number(left) and _is_number(right)):
        raise ToolError("only numbers can be combined so")
    if op is ast.Pow:
        bits = left.bit_length() if isinstance(left, int) else 1
        if abs(right) > MAX_EXPONENT or bits * abs(right) > MAX_BITS:
            raise ToolError("the number is too large")
    value = _within_bounds(_BINARY[op](left, right))
    if isinstance(value, complex):
        raise ToolError("the value is no real number")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _within_bounds(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the number is too large")
    if isinstance(value, list | tuple | str) and len(cast("Sequence[Any]", value)) > 4 * MAX_ITEMS:
        raise ToolError("the value is too long")
    return value


def _bounded_range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > MAX_ITEMS:
        raise ToolError(f"a range has at most {MAX_ITEMS} numbers")
    return found


def _rounded(number: float, digits: int) -> float:
    if abs(digits) > _MAX_DIGITS:
        raise ToolError("numbers are rounded to few digits")
    return round(number, digits) if digits else round(number)
