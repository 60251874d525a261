"""Saying where the operators are: ``mark`` in the model, or partition rules from outside.

A label rides on JAX's name stack, which survives ``jvp``, ``transpose``, ``vmap``, ``remat``, ``scan`` and inlining,
so the backward pass of an annotated layer is annotated too. Outside a ``dynaflow`` trace a mark is an ordinary
``jax.named_scope``: a model with marks runs, and profiles, as it did without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

from dynaflow_jax import compat
from dynaflow_jax.errors import RuleError

_F = TypeVar("_F", bound=Callable[..., Any])

# What may stand in a name without quoting: everything that neither this encoding nor the name stack gives a meaning.
_SAFE = " /._-+*()[]<>:=~!?&^$@,|"
_LABEL = re.compile(r"df:(?P<name>[^{}#]*)\{(?P<tags>[^{}#]*)\}#(?P<instance>\d+)(?:r(?P<rule>\d+))?")


@dataclasses.dataclass(frozen=True)
class Label:
    """One entry into a marked piece of the model.

    Attributes:
      name: the operator's name.
      tags: its tags.
      instance: tells two entries of the same mark apart within a trace.
      rule: index of the rule that made the label, or ``None`` for a ``mark``.
    """

    name: str
    tags: frozenset[str]
    instance: int
    rule: int | None = None

    def encode(self) -> str:
        """The label as a scope of the name stack."""
        tags = ",".join(urllib.parse.quote(tag, safe=_SAFE.replace(",", "")) for tag in sorted(self.tags))
        origin = "" if self.rule is None else f"r{self.rule}"
        return f"df:{urllib.parse.quote(self.name, safe=_SAFE)}{{{tags}}}#{self.instance}{origin}"

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def decode(scope: str) -> Label | None:
        """The label that a scope encodes, or ``None`` for a scope of the user's own."""
        if not (match := _LABEL.fullmatch(scope)):
            return None
        tags = frozenset(urllib.parse.unquote(tag) for tag in match["tags"].split(",") if tag)
        rule = None if match["rule"] is None else int(match["rule"])
        return Label(urllib.parse.unquote(match["name"]), tags, int(match["instance"]), rule)


def _check_name(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name.strip() or not _is_text(name):
        raise RuleError(f"{what} needs a name: a non-empty string, not {name!r}.")
    return name


def _check_tags(tags: Iterable[str] | str, what: str) -> frozenset[str]:
    try:
        tags = frozenset((tags,) if isinstance(tags, str) else tags)
    except TypeError:
        raise RuleError(f"{what}: tags are a list of non-empty strings, not {tags!r}.") from None
    if bad := [tag for tag in tags if not isinstance(tag, str) or not tag or not _is_text(tag)]:
        raise RuleError(f"{what}: tags are non-empty strings, not {bad[0]!r}.")
    return tags


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8, as names on the name stack are: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# What a function under ``jax.custom_vjp`` or ``jax.custom_jvp`` gets its rules by, above a mark as well as below it.
_DERIVATIVE_SETTERS = ("defvjp", "defjvp", "defjvps")


class mark:
    """Marks a piece of the model as an operator of its own: a context manager, and a decorator.

    Each entry is one operator (a loop that enters the same mark three times makes three). Where marks are nested the
    innermost one wins, and the outer operator is what remains. As a decorator it goes on functions, Flax Linen
    methods (above or below ``nn.compact``) and Flax NNX methods.

    Example::

        with df.mark("attention", tags={"compute"}):
            y = attention(x)

        @df.mark("ffn")
        def ffn(x): ...

    Args:
      name: the operator's name.
      tags: words that a strategy can ask for, such as ``"compute"`` or ``"network"``.
    """

    def __init__(self, name: str, tags: Iterable[str] | str = ()):
        self.name = _check_name(name, "df.mark")
        self.tags = _check_tags(tags, f"df.mark({name!r})")
        self._open = threading.local()

    def __enter__(self) -> mark:
        scope = _scope(self.name, self.tags, None)
        scope.__enter__()
        # A stack, so that one mark object may be entered again inside itself, and by several threads.
        self._open.__dict__.setdefault("scopes", []).append(scope)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.scopes.pop().__exit__(*exc)

    def __call__(self, fun: _F) -> _F:
        """Marks every call of ``fun``."""
        if isinstance(fun, type) or not callable(fun):
            raise RuleError(
                f"df.mark({self.name!r}) decorates functions and methods, not {fun!r}; "
                "to make every call of a module class an operator, pass rules=[df.SplitModule(TheClass)] to dynaflow."
            )

        @functools.wraps(fun)
        def marked(*args, **kwargs):
            with _scope(self.name, self.tags, None):
                return fun(*args, **kwargs)

        for name in _DERIVATIVE_SETTERS:
            if hasattr(fun, name):
                setattr(marked, name, getattr(fun, name))
        return marked  # pyright: ignore[reportReturnType]

    def __repr__(self) -> str:
        return f"mark({self.name!r}, tags={sorted(self.tags)})"


@dataclasses.dataclass(frozen=True)
class SplitModule:
    r"""A rule: every call of a matching module is an operator.

    Attributes:
      target: a class (Flax Linen, Flax NNX, or any class whose instances are called; subclasses match too), or a
        regular expression that must match a module's path or its last components: ``r"layers_\d+/mlp"`` matches
        the modules ``layers_3/mlp`` and ``decoder/layers_3/mlp`` (Flax Linen, Flax NNX, Equinox). Inside a
        transformation that hands over copies of modules (``nnx.remat``, ``eqx.filter_jit``), one of several modules of
        a class goes by what their paths have in common.
      name: the operator's name; by default the last component of the module's path.
      tags: the operator's tags.
    """

    target: type | str
    name: str | None = None
    tags: frozenset[str] = frozenset()

    def __init__(self, target: type | str, *, name: str | None = None, tags: Iterable[str] | str = ()):
        if not isinstance(target, (type, str)):
            raise RuleError(f"df.SplitModule takes a class or a path pattern, not {target!r}.")
        if isinstance(target, str):
            try:
                re.compile(target)
            except re.error as error:
                raise RuleError(f"df.SplitModule({target!r}) is not a regular expression: {error}.") from None
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "name", None if name is None else _check_name(name, "df.SplitModule"))
        object.__setattr__(self, "tags", _check_tags(tags, repr(self)))

    def matches(self, module: Any, path: str) -> bool:
        """Whether a module at ``path`` (components joined by ``/``) is meant."""
        if isinstance(self.target, type):
            return isinstance(module, self.target)
        return bool(path) and _path_pattern(self.target).fullmatch(path) is not None

    def __repr__(self) -> str:
        target = self.target.__name__ if isinstance(self.target, type) else repr(self.target)
        return f"SplitModule({target})"


@functools.lru_cache(maxsize=256)
def _path_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:.*/)?(?:{pattern})", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class SplitFunc:
    """A rule: every use of a primitive, or call of a named function, is an operator.

    Attributes:
      target: the name of a JAX primitive (``"psum"``, ``"dot_general"``), of a function under ``jax.jit``,
        ``jax.custom_vjp``, ``jax.custom_jvp`` or ``jax.remat``, of a ``jax.named_scope``; or such a function itself.
        Primitives that JAX renamed between versions match by their old and their new name.
      name: the operator's name; by default the target's.
      tags: the operator's tags.
    """

    target: str
    name: str | None = None
    tags: frozenset[str] = frozenset()

    def __init__(self, target: str | Callable[..., Any], *, name: str | None = None, tags: Iterable[str] | str = ()):
        found = target if isinstance(target, str) else getattr(target, "__name__", None)
        if not isinstance(found, str) or not found:
            raise RuleError(f"df.SplitFunc takes the name of a primitive or function, or a function, not {target!r}.")
        object.__setattr__(self, "target", found)
        object.__setattr__(self, "name", None if name is None else _check_name(name, "df.SplitFunc"))
        object.__setattr__(self, "tags", _check_tags(tags, repr(self)))

    def label(self, index: int) -> Label:
        """The label of what this names, where it is the rule of that index."""
        return Label(self.name or self.target, self.tags, 0, index)

    def __repr__(self) -> str:
        return f"SplitFunc({self.target!r})"


Rule = SplitModule | SplitFunc | tuple[SplitModule | SplitFunc, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Partition rules in the form the cutter uses.

    Attributes:
      atoms: the single rules, those inside tuples too; a label's ``rule`` is an index into them.
      sequences: for each tuple rule, the indices of its members.
    """

    atoms: tuple[SplitModule | SplitFunc, ...]
    sequences: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(rules: Iterable[Rule]) -> Rules:
        """Checks the user's rules."""
        is_one = isinstance(rules, (SplitModule, SplitFunc, str)) or not isinstance(rules, Iterable)
        entries: list[Any] = [rules] if is_one else [*rules]
        atoms: list[SplitModule | SplitFunc] = []
        sequences: list[tuple[int, ...]] = []
        for rule in entries:
            members = rule if isinstance(rule, tuple) else (rule,)
            for member in members:
                if not isinstance(member, (SplitModule, SplitFunc)):
                    raise RuleError(f"A rule is a df.SplitModule, a df.SplitFunc or a tuple of them, not {member!r}.")
            if len(members) > 1:
                sequences.append(tuple(range(len(atoms), len(atoms) + len(members))))
            elif not members:
                raise RuleError("An empty tuple is not a rule: name the neighbours that form one operator.")
            atoms.extend(members)
        return Rules(tuple(atoms), tuple(sequences))

    @functools.cached_property
    def modules(self) -> tuple[tuple[int, SplitModule], ...]:
        """The module rules with their indices."""
        return tuple((i, rule) for i, rule in enumerate(self.atoms) if isinstance(rule, SplitModule))

    @functools.cached_property
    def funcs(self) -> tuple[tuple[int, SplitFunc], ...]:
        """The function rules with their indices."""
        return tuple((i, rule) for i, rule in enumerate(self.atoms) if isinstance(rule, SplitFunc))


# -- labelling while a function is traced --------------------------------------------------------------------------


class _Tracing(threading.local):
    """What a thread is tracing for ``dynaflow``, if anything."""

    rules: Rules | None = None
    modules: tuple[tuple[Any, str], ...] = ()  # the modules whose calls are under way, with their paths


_tracing = _Tracing()
# Never starts again: JAX may find a function that was traced earlier, with its labels, in its caches.
_instances = itertools.count()


def _scope(name: str, tags: frozenset[str], rule: int | None) -> contextlib.AbstractContextManager[Any]:
    if _tracing.rules is None:
        return jax.named_scope(name)
    return jax.named_scope(Label(name, tags, next(_instances), rule).encode())


# Encloses what a call of a function under ``jax.remat`` does.
_CALL = re.compile(r"df:call#\d+")


def is_call(scope: Any) -> bool:
    """Whether a scope of the name stack tells one call of a function from others, for functions that JAX traces once.

    What such a function computes forward is no call any more once it is differentiated; what it computes again is one.
    """
    return isinstance(scope, str) and _CALL.fullmatch(scope) is not None


def is_labelling() -> bool:
    """Whether ``labelling`` is open in this thread: whether a scheduled function is being traced."""
    return _tracing.rules is not None


@contextlib.contextmanager
def labelling(rules: Rules) -> Iterator[None]:
    """While this is open, marks write labels in this thread, and calls that a rule names are labelled."""
    outer = (_tracing.rules, _tracing.modules)
    _tracing.rules, _tracing.modules = rules, ()
    try:
        with contextlib.ExitStack() as stack:
            # What JAX traced and cached without these labels must not be used.
            stack.enter_context(compat.distinct_trace(("dynaflow", rules)))
            if rules.modules:
                _intercept_linen(stack)
                _intercept_calls(stack, rules)
            if rules.funcs:
                _intercept_derivatives(stack)
            _intercept_remat(stack)
            yield
    finally:
        _tracing.rules, _tracing.modules = outer


def _is_called(module: Any) -> bool:
    """Whether a call of the module is under way, as in ``super().__call__``: it is the same operator then."""
    return any(module is active for active, _ in _tracing.modules)


def _call_labelled(module: Any, path: str, call: Callable[[], Any], at: str | None = None) -> Any:
    """Calls a module, under a label if a rule names it.

    Args:
      module: the module.
      path: where it is; empty for the outermost one, and where that is not known.
      call: calls it.
      at: the path that modules inside it are below, if not ``path``.
    """
    outer = _tracing.modules
    _tracing.modules = (*outer, (module, path if at is None else at))
    try:
        for index, rule in _tracing.rules.modules if _tracing.rules else ():
            if rule.matches(module, path):
                name = rule.name or path.rpartition("/")[2] or type(module).__name__
                with _scope(name, rule.tags, index):
                    return call()
        return call()
    finally:
        _tracing.modules = outer


def _intercept_linen(stack: contextlib.ExitStack) -> None:
    """Has Flax Linen tell of every method call."""
    if "flax.linen" not in sys.modules:  # no Linen module can exist
        return
    import flax.linen as nn

    def interceptor(next_fun, args, kwargs, context):
        module = context.module
        is_its_own = context.method_name != "setup" and not _is_lifted(context.method_name)
        if _tracing.rules is None or not is_its_own or _is_called(module):
            return next_fun(*args, **kwargs)
        return _call_labelled(module, "/".join(module.path), lambda: next_fun(*args, **kwargs))

    stack.enter_context(nn.intercept_methods(interceptor))


def _is_lifted(method_name: str) -> bool:
    # nn.remat, nn.scan and their like wrap the class; the call of the wrapper is not the module's own.
    return method_name == "<lambda>"


_patch_lock = threading.Lock()
_patched: dict[Any, tuple[int, Any]] = {}  # how often, and what the owner had of its own


# Classes whose instances are modules, found by their place among the attributes of their callers.
_MODULE_CLASSES = (("flax.nnx", "Module"), ("equinox", "Module"))


def _intercept_calls(stack: contextlib.ExitStack, rules: Rules) -> None:
    """Wraps ``__call__`` of the classes that rules name, for modules whose library tells nobody of its calls."""
    roots = {rule.target for _, rule in rules.modules if isinstance(rule.target, type)}
    by_path = any(isinstance(rule.target, str) for _, rule in rules.modules)
    for library, name in _MODULE_CLASSES:
        base = getattr(sys.modules.get(library), name, None)
        if base is not None and (by_path or any(issubclass(root, base) for root in roots)):
            roots.add(base)  # parents too, since a module's path is found from its callers
    for cls in _with_subclasses(roots):
        if "__call__" in vars(cls) and not _is_linen(cls):
            _patch(stack, cls, _call_module)


def _call_module(module: Any, run: Callable[[], Any]) -> Any:
    if _is_called(module):
        return run()
    base, steps = _place_of(module)
    path = "/".join((base, *steps) if base else steps)
    if not steps:
        return _call_labelled(module, "", run, at=base)
    # What is inside is written below this scope, and below that of its caller. So a function that JAX traces once for
    # several modules, such as a layer under jit, has each one's path around it where it is called.
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.named_scope("/".join(steps)))
        if rules := _tracing.rules:
            inside = frozenset(_named_below(module, path, rules))
            stack.enter_context(compat.distinct_trace(("dynaflow", rules, inside)))
        return _call_labelled(module, path, run)


def _named_below(module: Any, path: str, rules: Rules) -> Iterator[tuple[tuple[str, ...], int]]:
    """Which modules inside a module are named by their path, and by which rule.

    What JAX traced of another module, where other rules apply, must not be used.
    """
    by_path = [(i, rule) for i, rule in rules.modules if isinstance(rule.target, str)]
    for steps, found in _below(module) if by_path else ():
        for i, rule in by_path:
            if rule.matches(found, "/".join((path, *steps))):
                yield steps, i


def _intercept_derivatives(stack: contextlib.ExitStack) -> None:
    """Has functions with derivative rules of their own tell of their calls.

    Once differentiated such a call is only the equations of its rule, which do not say whose they are.
    """
    for cls in (jax.custom_jvp, jax.custom_vjp):
        _patch(stack, cls, _call_with_derivative)


def _call_with_derivative(fun: Any, run: Callable[[], Any]) -> Any:
    for index, rule in _tracing.rules.funcs if _tracing.rules else ():
        if rule.target == getattr(fun, "__name__", None):
            with _scope(rule.name or rule.target, rule.tags, index):
                return run()
    return run()


def _with_subclasses(roots: Iterable[type]) -> list[type]:
    found: dict[type, None] = {}
    pending = list(roots)
    while pending:
        cls = pending.pop()
        if cls not in found:
            found[cls] = None
            pending.extend(type.__subclasses__(cls))
    return list(found)


def _is_linen(cls: type) -> bool:
    return "flax.linen" in sys.modules and issubclass(cls, sys.modules["flax.linen"].Module)


def _intercept_remat(stack: contextlib.ExitStack) -> None:
    """Has calls of functions under ``jax.remat`` keep a scope of their own, whatever becomes of them."""

    def intercept(primitive: Any, run: Callable[[], Any]) -> Any:
        # The rules for differentiating such a call make others, which are the same.
        if any(is_call(scope) for scope, _ in compat.scopes(compat.current_name_stack())):
            return run()
        with jax.named_scope(f"df:call#{next(_instances)}"):
            return run()

    _patch(stack, compat.remat_p, intercept, "bind")


def _patch(
    stack: contextlib.ExitStack,
    owner: Any,
    intercept: Callable[[Any, Callable[[], Any]], Any],
    method: str = "__call__",
) -> None:
    """Has ``intercept`` make the calls of a method of an object, or of a class's instances, until ``stack`` closes.

    In traces of ours only, and in this thread only.
    """
    stack.callback(_unpatch, owner, method)
    with _patch_lock:
        count, before = _patched.get(owner, (0, vars(owner).get(method)))
        _patched[owner] = (count + 1, before)
        if count:
            return
        original = before if before is not None else getattr(owner, method)

        @functools.wraps(original)
        def call(*args, **kwargs):
            run = functools.partial(original, *args, **kwargs)
            if _tracing.rules is None:  # another thread may trace, not this one
                return run()
            return intercept(args[0] if isinstance(owner, type) else owner, run)

        _set(owner, method, call)


def _unpatch(owner: Any, method: str) -> None:
    with _patch_lock:
        count, before = _patched[owner]
        if count > 1:
            _patched[owner] = (count - 1, before)
            return
        del _patched[owner]
        if before is None:  # what it has is its class's
            delattr(owner, method)
        else:
            _set(owner, method, before)


def _set(owner: Any, method: str, value: Any) -> None:
    # Past what a library's metaclass may make of it.
    (type if isinstance(owner, type) else object).__setattr__(owner, method, value)


def _place_of(module: Any) -> tuple[str, tuple[str, ...]]:
    """Where a module sits: the path of a module that is calling it, and the steps from there.

    There are no steps to the outermost module, nor to one that is in no other. Transformations call copies of modules
    (``nnx.remat``, ``nnx.scan``, ``eqx.filter_jit``, everything that takes a module for a pytree): a copy is where its
    caller has a module of its class, least deep inside. Where several are, it goes by what their paths begin with.
    """
    for caller, base in reversed(_tracing.modules):
        if steps := next((steps for steps, found in _below(caller) if found is module), ()):
            return base, steps
    for caller, base in reversed(_tracing.modules):
        if alike := [steps for steps, found in _below(caller) if type(found) is type(module)]:
            alike = [steps for steps in alike if len(steps) == len(alike[0])]
            pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(alike), max(alike), strict=True))
            return base, tuple(step for step, _ in pairs)
    return _tracing.modules[-1][1] if _tracing.modules else "", ()


def _below(root: Any, depth: int = 4) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What ``root`` holds, breadth first and once, with the attribute names and indices that lead there."""
    level: list[tuple[tuple[str, ...], Any]] = [((), root)]
    seen = {id(root)}
    for _ in range(depth):
        following = []
        for steps, node in level:
            for key, child in _children(node):
                if id(child) not in seen:
                    seen.add(id(child))
                    yield (*steps, key), child
                    following.append(((*steps, key), child))
        level = following


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, (list, tuple)):
        return [(str(i), child) for i, child in enumerate(node)]
    if hasattr(node, "__iter__") and hasattr(node, "__len__") and type(node).__name__ in ("List", "Sequential"):
        return [(str(i), child) for i, child in enumerate(node)]
    names = getattr(node, "__dict__", {})
    return [(key, child) for key, child in names.items() if not key.startswith("_") and not _is_leaf(child)]


def _is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float, type)) or compat.is_array(value)
