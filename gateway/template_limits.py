"""Bounds for chat templates, which are programs by strangers: on steps, time and size of text.

A template is compiled with a tick at the head of every loop and macro, so that loops over
anything, and recursion, are counted. What makes text out of text is looked at before it runs
(repetition, widths, replacing, joining) or after (adding two texts), so that texts can grow by
small factors only until it is noticed.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S = 5.0
MAX_GROWTH = 4
"""Characters of output per character of message text, beyond the first `MAX_FIXED_CHARS`."""
MAX_FIXED_CHARS = 2**20
STEPS_PER_CHAR = 20
"""Turns of loops, calls of macros and lengths of ranges, per character of message text, beyond the
first `MAX_FIXED_STEPS`: short messages are rendered on the event loop, where 10,000 empty turns
take 5 ms."""
MAX_FIXED_STEPS = 20_000
MAX_STEPS = 200_000
MAX_NUMBER = 10_000
"""Repetitions, widths and counts as arguments."""
MAX_EXPONENT = 64
TICKS_PER_LOOK = 64
"""Ticks between two looks at the clock."""

_WIDE = re.compile(r"\d{5}|\*")
"""In a format: a field wider than `MAX_NUMBER`, or as wide as an argument says."""


class TooMuch(jinja2.TemplateError):
    """Rendering went beyond one of the bounds."""


class Budget:
    """The bounds of one rendering."""

    def __init__(self, num_chars: int) -> None:
        """`num_chars`: of the messages."""
        self._deadline = time.monotonic() + MAX_RENDER_S
        self.max_chars = MAX_FIXED_CHARS + MAX_GROWTH * num_chars
        self._chars = self.max_chars
        self._steps = min(MAX_STEPS, MAX_FIXED_STEPS + STEPS_PER_CHAR * num_chars)

    def range(self, *bounds: int) -> range:
        """Jinja's `range`, counted."""
        steps = range(*bounds)
        self._steps -= len(steps)
        self.tick()
        return steps

    def take(self, text: str) -> str:
        """Output."""
        self._chars -= len(text)
        self._check("output")
        return text

    def tick(self) -> None:
        self._steps -= 1
        if self._steps < 0 or self._steps % TICKS_PER_LOOK == 0:
            self._check("loop")

    def _check(self, what: str) -> None:
        if self._chars < 0 or self._steps < 0 or time.monotonic() > self._deadline:
            raise TooMuch(what)


BUDGET: ContextVar[Budget] = ContextVar("budget")
"""Of the rendering that this thread is doing."""


@jinja2.pass_context  # so that the compiler does not evaluate it
def _tick(context: Context, value: Any) -> None:
    BUDGET.get().tick()


def _fits(size: int, what: str) -> None:
    if size > BUDGET.get().max_chars:
        raise TooMuch(what)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _check_replace(text: Any, old: Any = "", new: Any = "", *rest: Any) -> None:
    text = str(text)
    _fits(len(text) + text.count(str(old)) * len(str(new)), "replacing")


def _check_join(separator: Any, items: Any = (), *rest: Any) -> None:
    if isinstance(items, str | list | tuple | dict):  # what can be looked at twice
        longest = max((len(item) if isinstance(item, str) else 64 for item in items), default=0)
        _fits(len(items) * (len(str(separator)) + longest), "joining")


def _check_format(text: Any, *rest: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TooMuch("width")


_METHOD_CHECKS: dict[str, Callable[..., None]] = {"replace": _check_replace, "join": _check_join}
_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": lambda items, separator="", *rest: _check_join(separator, items),
    "format": _check_format,
}


def _check_numbers(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    if any(
        _is_number(value) and abs(value) > MAX_NUMBER for value in (*arguments, *named.values())
    ):
        raise TooMuch("number")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its arguments and its result looked at."""
    given = 1 if hasattr(function, "jinja_pass_arg") else 0
    check = _FILTER_CHECKS.get(name)

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        _check_numbers(arguments[given + 1 :], named)
        if check is not None:
            check(*arguments[given:], *named.values())
        return BoundedEnvironment.sized(function(*arguments, **named))

    return bounded


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.sized(")
        super().visit_Concat(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox; what it compiles must be rendered with `BUDGET` set."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _Generator

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _bounded(name, filter) for name, filter in self.filters.items()}
        self.filters["_tick"] = _tick

    def bounded_template(self, source: str) -> jinja2.Template:
        """As `from_string`, with ticks. Raises `TemplateSyntaxError`."""
        tree = self.parse(source)
        bodies = [node.body for node in tree.find_all(nodes.For)]
        bodies += [node.body for node in tree.find_all(nodes.Macro)]
        bodies += [node.body for node in tree.find_all(nodes.CallBlock)]
        for body in bodies:
            tick = nodes.Filter(nodes.Const(0), "_tick", [], [], None, None)
            body.insert(0, nodes.ExprStmt(tick))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    @staticmethod
    def sized(value: Any) -> Any:
        """`value`, unless it is a text longer than all output may be."""
        if isinstance(value, str):
            _fits(len(value), "text")
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int) and abs(right) <= MAX_EXPONENT):
            raise TooMuch("power")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            factor, text = (right, left) if _is_number(right) else (left, right)
            if not _is_number(factor) or factor > MAX_NUMBER:
                raise TooMuch("repetition")
            _fits(int(factor) * len(text), "repetition")
        if operator == "%":
            _check_format(left)
        return self.sized(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
        text = getattr(method, "__self__", None)
        if isinstance(method, BuiltinMethodType) and isinstance(text, str):
            _check_numbers(args, kwargs)
            if method is not obj:
                _check_format(text)
            elif check := _METHOD_CHECKS.get(method.__name__):
                check(text, *args)
        return self.sized(super().call(context, obj, *args, **kwargs))
