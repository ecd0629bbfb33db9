"""Triton's interpreter without its needless work: for the tests of kernels and the rehearsal of `gpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Half the time of an interpreted launch is spent on three things that change no result.

    For every call of a jitted function the interpreter looks through the whole language and replaces what the launch
    has replaced before: a third of the time. It computes all sums and products of integers again in 64 bits for an
    assertion that is off: a fourth of the rest. And for every value it builds a table of all types.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    look_up: Callable[[Any], Any] = interpreter._get_np_dtype
    builder = interpreter.interpreter_builder
    options = builder.options
    inside: list[int] = []  # namespaces patched in the current launch
    known: dict[str, Any] = {}  # name of a scalar type -> that of NumPy

    def patched(function: Any) -> Any:
        is_launch, namespace = not inside, id(function.__globals__)
        if namespace in inside:
            return None
        scope = patch(function)
        inside.append(namespace)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (restore(), inside.clear())
        return scope

    def numpy_type(wanted: Any) -> Any:
        scalar = wanted.scalar
        if isinstance(scalar, core.pointer_type):
            return look_up(wanted)
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = look_up(scalar)
        return found

    interpreter._patch_lang, interpreter._get_np_dtype = patched, numpy_type
    builder.options = replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype = patch, look_up
        builder.options = options
