"""What a task becomes for XLA: a module of its own, run by the host twin or captured on CUDA."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering.bits import from_bits, physical, to_bits
from dynaflow_jax.lowering.tasks import Task


@dataclasses.dataclass(frozen=True)
class Module:
    """What a task becomes for XLA: a function of values as they are in memory.

    Attributes:
      task: what it computes.
      reads: the types of its operands.
      writes: its results on CUDA, in their order there.
      donated: operands in whose memory the first results are computed.
      given: the types of those that follow, each in the memory of a further operand.
    """

    task: Task
    reads: Sequence[Any]
    writes: Sequence[int]
    donated: tuple[int, ...]
    given: Sequence[Any]

    def on_host(self) -> Any:
        """Lowered for the host twin, whose results have memory of their own."""
        return self._lowered(self._compute, self._shapes(self.reads), ())

    def in_capture(self, form: Callable[..., Callable[..., list[Any]]]) -> Any:
        """Lowered for CUDA; ``form`` makes of the function one that is captured as it runs."""
        shapes, given = self._shapes(self.reads), self._shapes(self.given)
        first = [self.task.writes.index(i) for i in self.writes]

        def compute(*args: Any) -> list[Any]:
            results = self._compute(*args)
            return [results[i] for i in first]

        enclosing = form(compute, sorted(self.donated))  # in the order of the first results
        memory = (*self.donated, *range(len(shapes), len(shapes) + len(given)))
        return self._lowered(lambda *args: enclosing(*args[: len(shapes)]), [*shapes, *given], memory)

    def bytecode(self, form: Callable[..., Callable[..., list[Any]]]) -> bytes:
        """The same, as bytes."""
        return compat.module_bytecode(self.in_capture(form))

    def _compute(self, *args: Any) -> list[Any]:
        return [to_bits(x) for x in self.task.compute(*map(from_bits, args, self.reads))]

    def _lowered(self, fun: Callable[..., Any], shapes: Sequence[Any], donated: tuple[int, ...]) -> Any:
        def named(*args: Any) -> list[Any]:
            return fun(*args)

        named.__name__ = self.task.name  # and so the module's, which profilers show
        try:
            # Arguments that a partition does not use stay arguments, so that its signature is what it reads.
            return jax.jit(named, keep_unused=True, donate_argnums=donated).lower(*shapes)
        except Exception as error:
            why = str(error) or repr(error)  # some say nothing but what they are
            raise DynaFlowError(f"{self.task.name} cannot be compiled on its own: {why}") from error

    @staticmethod
    def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(*physical(aval)) for aval in avals]


_NAME = r'("[^"]*"|[^\s"(]+)'  # in quotes if it holds a space, say
_MODULE = re.compile(rf"^module @{_NAME}")
_PRIVATE = re.compile(rf"func\.func private @{_NAME}\(")


def fingerprint(text: str) -> str:
    """A hash that modules share which differ only in their names and in those of their functions."""
    text = _MODULE.sub("module", text)
    for i, name in enumerate(dict.fromkeys(_PRIVATE.findall(text))):
        text = re.sub(rf"@{re.escape(name)}(?=\()", f"@f{i}", text)
    return hashlib.sha256(text.encode()).hexdigest()
