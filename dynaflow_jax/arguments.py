"""What the command line is given as text, as values: functions, shapes, strategies, rules and axes.

Text is never evaluated: calls may name strategies and rules only, and their arguments are literals.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import strategies
from dynaflow_jax.annotate import Rule, SplitFunc, SplitModule
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.schedule import OpScheduler

_SHAPE = re.compile(r"(?P<dtype>[A-Za-z]\w*)(?:\[(?P<sizes>[\d,\s]*)\])?")
_LETTERS = {"f": "float", "bf": "bfloat", "i": "int", "s": "int", "u": "uint", "c": "complex"}


def load(text: str, what: str) -> Any:
    """The object that ``"module:name"`` or ``"package.module:object.attribute"`` names.

    Args:
      text: the text.
      what: what it was given as, for messages.

    Raises:
      DynaFlowError: if there is no such module or object, or importing the module fails.
    """
    module_name, colon, path = text.partition(":")
    is_module = re.fullmatch(r"\w+(\.\w+)*", module_name) and not module_name.endswith(".py")
    if not colon or not path or not is_module:
        raise DynaFlowError(f"{text!r} for {what} is not of the form module:function, as in my_package.my_module:step.")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise DynaFlowError(
                f"There is no module {error.name!r} for {what} {text!r}: start from the folder that holds it, or let "
                "PYTHONPATH name that."
            ) from None
        raise DynaFlowError(f"Importing {module_name!r} for {what} fails: {error}.") from error
    except (Exception, SystemExit) as error:
        raise DynaFlowError(f"Importing {module_name!r} for {what} fails: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            names = getattr(found, "__dict__", {}).items()
            near = [key for key, value in names if callable(value) and not key.startswith("_")]
            has = f"; it has {', '.join(near[:8])}{', ...' if len(near) > 8 else ''}" if near else ""
            raise DynaFlowError(f"{module_name!r} has no {path!r}, which {what} {text!r} names{has}.") from None
    return found


def shapes(text: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """``"f32[8,128] bf16[4,4] int32[]"`` as types of arrays; numbers of bits as XLA writes them, or NumPy's names.

    Raises:
      DynaFlowError: naming the first part that is none.
    """
    found, position = [], 0
    for match in _SHAPE.finditer(text):
        if text[position : match.start()].strip(" \t\n;,"):
            break
        found.append(_struct(match))
        position = match.end()
    if rest := text[position:].strip():
        raise DynaFlowError(f"--shapes: {rest!r} is no shape; write one for each argument, as in 'f32[8,128] i32[8]'.")
    if not found:
        raise DynaFlowError("--shapes is empty; write one for each argument, as in 'f32[8,128] i32[8]'.")
    return tuple(found)


def _struct(match: re.Match[str]) -> jax.ShapeDtypeStruct:
    name, sizes = match["dtype"], match["sizes"]
    if sizes is None:
        raise DynaFlowError(
            f"--shapes: {match[0]!r} has no sizes in brackets; write {name}[8,128], or {name}[] for a scalar."
        )
    full = "bool" if name == "pred" else re.sub(r"^([a-z]{1,2})(\d+)$", _full, name)
    try:
        dtype = jnp.dtype(full)
        numbers = tuple(int(size) for size in sizes.split(",")) if sizes.strip() else ()
    except TypeError:
        raise DynaFlowError(
            f"--shapes: {match[0]!r} has no dtype of JAX's; f32, bf16, i32 and bool are some."
        ) from None
    except ValueError:
        raise DynaFlowError(
            f"--shapes: {match[0]!r} needs whole numbers between commas, as in {name}[8,128]."
        ) from None
    return jax.ShapeDtypeStruct(numbers, dtype)


def _full(match: re.Match[str]) -> str:
    return _LETTERS.get(match[1], match[1]) + match[2]


def arrays(structs: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays of such types: normal random numbers, and zeros for what is not floating-point."""
    random = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(random.standard_normal(leaf.shape, np.float32), leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return tuple(jax.tree.map(fill, structs))


def made(text: str) -> tuple[Any, ...]:
    """The arguments that the function named ``"module:factory"`` returns.

    Raises:
      DynaFlowError: if there is none, it fails, or does not return a tuple.
    """
    factory = load(text, "--args")
    if not callable(factory):
        raise DynaFlowError(f"--args {text!r} is {factory!r:.60}; it names a function that returns the arguments.")
    try:
        found = factory()
    except Exception as error:
        raise DynaFlowError(f"--args {text!r} fails: {type(error).__name__}: {error}") from error
    if not isinstance(found, (tuple, list)):
        raise DynaFlowError(
            f"--args {text!r} returned {type(found).__name__}, not a tuple of the arguments; of one: return (x,)."
        )
    return tuple(found)


def strategy(text: str) -> Any:
    """``"NanoFlow(micro_batches=2)"`` as a strategy; of ``df.strategies``, with literal arguments."""
    return _built(_parsed(text, "--strategy"), _strategies(), "--strategy")


def candidates(text: str) -> tuple[Any, ...]:
    """``"NanoFlow(2), DualBatchOverlap()"`` as strategies."""
    node, known = _parsed(text, "--candidates"), _strategies()
    known.pop("Auto")
    return tuple(_built(entry, known, "--candidates") for entry in _entries(node))


def rules(text: str) -> tuple[Rule, ...]:
    """``"SplitFunc('psum'), (SplitModule('norm'), SplitModule('up'))"`` as rules; a tuple inside is one operator."""
    known: Mapping[str, Callable[..., Any]] = {"SplitFunc": SplitFunc, "SplitModule": SplitModule}

    def rule(node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(map(rule, node.elts))
        return _built(node, known, "--rules")

    return tuple(map(rule, _entries(_parsed(text, "--rules"))))


def literal(text: str, what: str) -> Any:
    """Python's literals: ``"None, 0"``, ``"{'x': 0}"``, ``"'mean'"``; a single word is text."""
    if re.fullmatch(r"[a-z_]+", text):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise DynaFlowError(
            f"{what}: {text!r} is no literal; write it as in Python: 'None, 0' or \"{{'x': 0}}\"."
        ) from None


def _strategies() -> dict[str, Callable[..., Any]]:
    """Those whose arguments are literals; --kernels stands for ``WithKernels``."""
    named = {name: getattr(strategies, name) for name in strategies.__all__ if name != "WithKernels"}
    return {name: kind for name, kind in named.items() if issubclass(kind, OpScheduler) or kind is strategies.Auto}


def _parsed(text: str, what: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise DynaFlowError(f"{what}: {text!r} is no name with literal arguments, as in NanoFlow(2).") from None


def _entries(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]


def _built(node: ast.expr, known: Mapping[str, Callable[..., Any]], what: str) -> Any:
    """What a name, or a call of it, stands for."""
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name):
        raise DynaFlowError(f"{what}: {ast.unparse(node)!r} is no name with literal arguments, as in NanoFlow(2).")
    if name.id not in known:
        raise DynaFlowError(f"{what}: {name.id!r} is unknown; there are {', '.join(known)}.")
    kind, args, kwargs = known[name.id], [], {}
    try:
        args = [ast.literal_eval(arg) for arg in (call.args if call else ())]
        kwargs = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in (call.keywords if call else ())}
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise DynaFlowError(f"{what}: the arguments of {ast.unparse(node)} have to be literals.") from None
    try:
        inspect.signature(kind).bind(*args, **kwargs)
        return kind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise DynaFlowError(f"{what}: {ast.unparse(node)}: {error}.") from None
