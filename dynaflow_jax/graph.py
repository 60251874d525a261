"""The operator graph: a flat program's equations, grouped into the units that a strategy schedules.

Every group is convex: no path of dependencies leaves it and comes back, so each can run as one piece. Equations of
one label that outside work separates become several operators.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from dynaflow_jax import compat, cost
from dynaflow_jax.annotate import Rules, SplitModule
from dynaflow_jax.errors import RuleError, RuleWarning, warn_user
from dynaflow_jax.inline import DRAWS, Flat, Node, Place
from dynaflow_jax.program import Program
from dynaflow_jax.text import si, table
from dynaflow_jax.visualize import Node as Box
from dynaflow_jax.visualize import draw_graph, inline


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """The schedulable unit: a convex group of equations.

    Attributes:
      index: position in the graph's order.
      key: a name that no other operator of the graph has, the same for every batch size.
      name: the name given by the mark, the rule, or the heaviest equation.
      module_path: scopes of modules and of the user around it, joined by ``/``.
      phase: ``"forward"``, ``"backward"`` or ``"recompute"``.
      tags: the tags given, and ``"network"`` if it holds a collective.
      bound: ``"compute"``, ``"memory"`` or ``"network"``.
      flops: floating-point operations, estimated.
      bytes: bytes of device memory read and written, estimated.
      predecessors: indices of the operators whose results it reads.
      program: its equations; inputs and outputs are the variables that cross its edge.
      body: for a loop or ``shard_map``, the graph that is scheduled inside it.
      draw: for a random draw over the batch, the equations that make it for the whole batch.
    """

    index: int
    key: str
    name: str
    module_path: str
    phase: str
    tags: frozenset[str]
    bound: str
    flops: float
    bytes: float
    predecessors: tuple[int, ...]
    program: Program
    body: OpGraph | None = None
    draw: tuple[Any, ...] | None = None

    @property
    def runs_once(self) -> bool:
        """Whether it runs once for all micro-batches: loops, ``shard_map``, random draws over the batch."""
        return self.body is not None or self.draw is not None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Shapes and dtypes of what it reads, in the order in which a replacement function gets them."""
        return tuple(var.aval for var in self.program.invars)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Shapes and dtypes of what it gives to others, in the order in which a replacement function returns them."""
        return tuple(var.aval for var in self.program.outvars)

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The equations as a closed jaxpr from ``inputs`` to ``outputs``."""
        return compat.closed_jaxpr(self.program.invars, self.program.outvars, self.program.eqns, self.name)

    @functools.cached_property
    def draw_jaxpr(self) -> Any:
        """The draw for the whole batch as a closed jaxpr, from ``inputs``."""
        assert self.draw is not None
        outvars = [v for v in self.draw[-1].outvars if not compat.is_dropped(v)]
        return compat.closed_jaxpr(self.program.invars, outvars, self.draw, self.name)

    def __repr__(self) -> str:
        tags = f", tags={{{', '.join(sorted(self.tags))}}}" if self.tags else ""
        size = f"{si(self.flops)}FLOP, {si(self.bytes)}B"
        return f"Operator({self.index}: {self.key}{tags}, {size}, {self.bound}-bound)"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OpGraph:
    """The operators of a function, in an order that respects their dependencies.

    Attributes:
      operators: the operators.
      program: the flat program that was cut; operators share its variables.
      opened: calls with derivative rules of their own that had to be opened.
    """

    operators: tuple[Operator, ...]
    program: Program
    opened: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.operators)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def __getitem__(self, key: int | str) -> Operator:
        """An operator by index, or by its ``key``."""
        if isinstance(key, str):
            if key not in self._by_key:
                raise KeyError(f"No operator {key!r}; there are {', '.join(self._by_key)}.")
            return self._by_key[key]
        return self.operators[key]

    @functools.cached_property
    def _by_key(self) -> dict[str, Operator]:
        return {op.key: op for op in self.operators}

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the indices of those that read its results."""
        found: list[list[int]] = [[] for _ in self.operators]
        for op in self.operators:
            for index in op.predecessors:
                found[index].append(op.index)
        return tuple(map(tuple, found))

    @functools.cached_property
    def reductions(self) -> frozenset[int]:
        """The indices of the collectives behind the backward pass, such as those of gradients; none without one."""
        if all(op.phase == "forward" for op in self.operators):
            return frozenset()
        needed = set()  # what the backward pass depends on, and the backward pass
        for op in reversed(self.operators):
            if any(i in needed or self[i].phase != "forward" for i in self.successors[op.index]):
                needed.add(op.index)
        return frozenset(op.index for op in self.operators if op.bound == "network" and op.index not in needed)

    def behind(self, operators: Collection[int]) -> dict[int, frozenset[int]]:
        """What depends on operators, directly or not, and on which of them.

        Args:
          operators: their indices.

        Returns:
          From the index of each other operator that does to the indices of those.
        """
        wanted = frozenset(operators)
        found: dict[int, frozenset[int]] = {}
        for op in self.operators:
            direct = wanted.intersection(op.predecessors)
            found[op.index] = direct.union(*(found[i] for i in op.predecessors))
        return {i: before for i, before in found.items() if before and i not in wanted}

    def table(self) -> str:
        """The operators as a table; the bodies of loops are indented below them."""
        rows = [("#", "operator", "module", "tags", "FLOP", "bytes", "bound", "reads"), *self._rows("")]
        return "\n".join(table(rows, right={0, 4, 5}))

    def _rows(self, indent: str) -> list[tuple[str, ...]]:
        rows = []
        for op in self.operators:
            reads = ",".join(map(str, op.predecessors))
            name = indent + op.name + ("" if op.phase == "forward" else f" ({op.phase})")
            size = (si(op.flops), si(op.bytes), op.bound)
            rows.append((indent + str(op.index), name, op.module_path, ",".join(sorted(op.tags)), *size, reads))
            if op.body is not None:
                rows.extend(op.body._rows(indent + "  "))
        return rows

    def to_svg(self) -> str:
        """The operators as a picture in SVG, from top to bottom; what is inside a loop lies inside its box.

        Colours and words say what bounds an operator; the mouse shows its shapes.
        """
        return draw_graph(self._boxes(), f"{len(self)} operators")

    def _boxes(self) -> tuple[Box, ...]:
        boxes = []
        for op in self.operators:
            shapes = [", ".join(aval.str_short() for aval in avals) for avals in (op.inputs, op.outputs)]
            title = f"{op!r}\nreads {shapes[0]}\ngives {shapes[1]}"
            detail = f"{si(op.flops)}FLOP  {si(op.bytes)}B"
            body = None if op.body is None else op.body._boxes()
            boxes.append(Box(op.key, op.bound, detail, title, op.predecessors, body))
        return tuple(boxes)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return inline(self.to_svg(), f"Graph of {len(self)} operators", 480)

    def __repr__(self) -> str:
        return f"OpGraph of {len(self)} operators\n{self.table()}"


# Constants of at most this many elements are evaluated by each operator that reads them.
_SMALL = 1 << 16

# -- cutting -------------------------------------------------------------------------------------------------------


def cut(flat: Flat, rules: Rules, ridge: float, *, warn: bool = True) -> OpGraph:
    """Groups the equations of a flat program into operators.

    Args:
      flat: the program.
      rules: the partition rules; those with several members join neighbouring operators.
      ridge: operations per byte above which an operator counts as bound by compute.
      warn: whether to warn of rules without effect.

    Returns:
      The graph; loops and ``shard_map`` with boundaries inside have graphs of their own as ``body``.

    Raises:
      RuleError: if a tuple rule would join operators around a third that lies between them.
    """
    cutter = _Cutter(rules, ridge)
    graph = cutter.cut(flat)
    if warn:
        _warn_unused(rules, cutter.used, flat)
    return graph


def _warn_unused(rules: Rules, used: Counter[int], flat: Flat) -> None:
    places = ", ".join(call.where for call in flat.unopened)
    inside = f" It may lie inside {places}, which cannot be scheduled." if places else ""
    for index, rule in enumerate(rules.atoms):
        if not used[index]:
            hint = (
                "no such module is called, its path is another, or marks inside it leave nothing over"
                if isinstance(rule, SplitModule)
                else "no primitive, jitted function or scope has that name (wrap a plain function in df.mark)"
            )
            warn_user(f"{rule!r} matched nothing: {hint}.{inside}", RuleWarning)
    for sequence in rules.sequences:
        names = ", ".join(repr(rules.atoms[i]) for i in sequence)
        if all(used[i] for i in sequence) and not used[~sequence[0]]:
            warn_user(f"The rule ({names}) matched no neighbours.", RuleWarning)
    for call in flat.unopened:
        if call.marks:
            names = ", ".join(map(repr, call.marks))
            warn_user(f"The marks {names} inside {call.where} have no effect: it runs as one operator.", RuleWarning)


class _Cutter:
    def __init__(self, rules: Rules, ridge: float):
        self.rules = rules
        self.ridge = ridge
        self.used: Counter[int] = Counter()  # equations by rule; ~i counts the joins of the sequence that starts at i

    def cut(self, flat: Flat) -> OpGraph:
        """The graph of one level."""
        nodes, outvars = flat.nodes, flat.program.outvars
        outputs = {var for var in outvars if not compat.is_literal(var)}
        self.used.update(rule for node in nodes if (rule := _rule_of(node)) is not None)
        groups = _Groups(nodes, outputs)
        for sequence in self.rules.sequences:
            _join_sequence(groups, nodes, self.rules, sequence, self.used)
        order = _topological(groups)
        rank = {group: i for i, group in enumerate(order)}
        read_by = _readers(nodes, groups.members)
        names = _Names()
        operators = []
        for group in order:
            contents = [nodes[i] for i in groups.members[group]]
            fixed = [nodes[i].eqn for i in sorted(set(groups.constants[group]))]
            made = {var: None for node in contents for var in node.eqn.outvars}
            outvars = tuple(
                var
                for var in made
                if not compat.is_dropped(var) and (var in outputs or read_by.get(var, set()) - {group})
            )
            predecessors = tuple(sorted(rank[p] for p in groups.reads[group]))
            operators.append(self._operator(len(operators), contents, fixed, outvars, predecessors, names))
        return OpGraph(tuple(operators), flat.program, flat.opened)

    def _operator(
        self,
        index: int,
        nodes: list[Node],
        fixed: list[Any],
        outvars: tuple[Any, ...],
        predecessors: tuple[int, ...],
        names: _Names,
    ) -> Operator:
        eqns = (*fixed, *(node.eqn for node in nodes))
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not compat.is_literal(v) and v not in made)
        labels = list(dict.fromkeys(node.place.label for node in nodes if node.place.label is not None))
        name, path = _name(nodes, labels, self.rules)
        phase = nodes[0].place.phase
        body = self.cut(nodes[0].body) if nodes[0].body is not None else None
        if body is not None:
            repeats = nodes[0].eqn.params.get("length", 1)
            flops = repeats * sum(op.flops for op in body.operators)
            traffic = repeats * sum(op.bytes for op in body.operators)
        else:
            flops = sum(map(cost.flops, eqns))
            traffic = cost.traffic(eqns, outvars)
        tags = frozenset().union(*(label.tags for label in labels))
        if any(map(cost.communicates, eqns)):
            tags |= {"network"}
        bound = "compute" if flops > self.ridge * traffic else "memory"
        if "network" in tags and body is None:
            bound = "network"
        # A module that a rule names gives its own name to the last scope of its path.
        is_last_scope = path.rpartition("/")[2] == name and any(label.rule is not None for label in labels)
        key = names.key(path if is_last_scope else f"{path}/{name}" if path else name, nodes[0].place)
        program = Program(tuple(read), outvars, eqns)
        draw = None if nodes[0].draw is None else (*fixed, nodes[0].draw)
        return Operator(index, key, name, path, phase, tags, bound, flops, traffic, predecessors, program, body, draw)


class _Names:
    """Keys of operators: equal names are numbered by the mark that was entered, forward and backward alike."""

    def __init__(self):
        self.entries: dict[str, dict[Any, int]] = {}
        self.pieces: Counter[str] = Counter()

    def key(self, name: str, place: Place) -> str:
        """A new key."""
        entries = self.entries.setdefault(name, {})
        entry = place.key[:2] if isinstance(place.key, tuple) else (len(entries), None)
        if place.phase != "forward" and entry not in entries:
            # Once differentiated, a jitted function is called again backward: another call site, but the same mark.
            alike = [known for known in entries if known[1] == entry[1] is not None]
            entry = alike[0] if len(alike) == 1 else entry
        number = entries.setdefault(entry, len(entries) + 1)
        key = name if number == 1 else f"{name}:{number}"
        key += "" if place.phase == "forward" else f".{place.phase}"
        self.pieces[key] += 1
        return key if self.pieces[key] == 1 else f"{key}~{self.pieces[key]}"


class _Groups:
    """Equations put into convex groups, in program order.

    An equation joins the open group of its key unless that would close a cycle: unless something it reads, outside
    the group, depends on the group. Sets of groups are bit masks, so that each test is one operation.

    Attributes:
      members: for each group, the indices of its nodes.
      constants: for each group, the indices of the small constants that it evaluates for itself.
      reads: for each group, the groups whose results it reads.
    """

    def __init__(self, nodes: Sequence[Node], outputs: set[Any]):
        self.members: list[list[int]] = []
        self.constants: list[list[int]] = []
        self.reads: list[set[int]] = []
        self._ancestors: list[int] = []
        self._descendants: list[int] = []
        self._outputs = outputs
        self._sunk: dict[Any, tuple[int, Any]] = {}  # small constants, by variable
        self._pulled: set[tuple[int, int]] = set()
        group_of: dict[Any, int] = {}  # by variable
        opened: dict[Any, int] = {}  # the group that takes equations of a key
        effectful: int | None = None
        for i, node in enumerate(nodes):
            if self._sink(i, node):
                continue
            key = (node.place.key, node.place.phase)
            sources = {group_of[var] for var in node.eqn.invars if not compat.is_literal(var) and var in group_of}
            if compat.has_effects(node.eqn) and effectful is not None:
                sources.add(effectful)
            group = opened.get(key)
            if group is None or any(s != group and self._ancestors[s] >> group & 1 for s in sources):
                group = opened[key] = self._new_group()
            self.members[group].append(i)
            self._pull(group, node.eqn)
            self._add_sources(group, sources - {group})
            group_of.update(dict.fromkeys(node.eqn.outvars, group))
            if compat.has_effects(node.eqn):
                effectful = group

    def _new_group(self) -> int:
        self.members.append([])
        self.constants.append([])
        self.reads.append(set())
        self._ancestors.append(0)
        self._descendants.append(0)
        return len(self.members) - 1

    def _sink(self, index: int, node: Node) -> bool:
        """Leaves a small constant to whoever reads it, so that it makes no operator and no dependency of its own."""
        eqn = node.eqn
        if (
            compat.has_effects(eqn)
            or cost.communicates(eqn)
            or eqn.primitive.name in DRAWS
            or any(not compat.is_literal(var) and var not in self._sunk for var in eqn.invars)
            or any(var in self._outputs for var in eqn.outvars)
            or any(cost.size_of(var.aval) > _SMALL for var in node.sized.outvars)
            or any(True for _ in compat.sub_jaxprs(eqn))
        ):
            return False
        self._sunk.update((var, (index, eqn)) for var in eqn.outvars)
        return True

    def _pull(self, group: int, eqn: Any) -> None:
        """Adds the sunk constants that an equation of the group reads."""
        for var in eqn.invars:
            if not compat.is_literal(var) and var in self._sunk:
                index, source = self._sunk[var]
                if (group, index) not in self._pulled:
                    self._pulled.add((group, index))
                    self._pull(group, source)
                    self.constants[group].append(index)

    def _add_sources(self, group: int, sources: set[int]) -> None:
        self.reads[group] |= sources
        above = 0
        for source in sources:
            above |= self._ancestors[source] | 1 << source
        new = above & ~self._ancestors[group]
        if not new:
            return
        below = self._descendants[group] | 1 << group
        for ancestor in _bits(new):
            self._descendants[ancestor] |= below
        for descendant in _bits(below):
            self._ancestors[descendant] |= above

    def join(self, parent: Sequence[int]) -> None:
        """Moves the contents of every group into its parent; groups that lose theirs stay, empty."""
        count = len(self.members)
        members: list[list[int]] = [[] for _ in range(count)]
        constants: list[list[int]] = [[] for _ in range(count)]
        reads: list[set[int]] = [set() for _ in range(count)]
        for group in range(count):
            members[parent[group]] += self.members[group]
            constants[parent[group]] += self.constants[group]
            reads[parent[group]] |= {parent[source] for source in self.reads[group]}
        for group in range(count):
            members[group].sort()
            reads[group].discard(group)
        self.members, self.constants, self.reads = members, constants, reads


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _topological(groups: _Groups) -> list[int]:
    """Groups in the order of their first equation, as far as dependencies allow."""
    members = groups.members
    waiting = {g: len(groups.reads[g]) for g in range(len(members)) if members[g]}
    readers = _inverted(groups.reads)
    ready = [(members[g][0], g) for g, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, group = heapq.heappop(ready)
        order.append(group)
        for reader in readers[group]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (members[reader][0], reader))
    if len(order) != len(waiting):
        raise RuleError("The operators depend on each other in a circle: a rule joins what other operators separate.")
    return order


def _inverted(edges: Sequence[set[int]]) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in edges]
    for group, sources in enumerate(edges):
        for source in sources:
            found[source].add(group)
    return found


def _join_sequence(
    groups: _Groups, nodes: Sequence[Node], rules: Rules, sequence: Sequence[int], used: Counter[int]
) -> None:
    """Joins neighbours that a tuple rule names, with the unlabelled work between them, into one operator each."""
    members = groups.members
    rule_of = [_rule_of(nodes[group[0]]) if group else None for group in members]
    labelled = [bool(group) and nodes[group[0]].place.label is not None for group in members]
    readers = _inverted(groups.reads)
    order = {group: i for i, group in enumerate(_topological(groups))}
    parent = list(range(len(members)))
    for start in order:
        if rule_of[start] != sequence[0] or parent[start] != start:
            continue
        joined = [start]
        for rule in sequence[1:]:
            step = _next_neighbour(joined[-1], rule, rule_of, labelled, readers, order)
            if step is None:
                break
            joined += step
        if rule_of[joined[-1]] != sequence[-1] or any(parent[group] != group for group in joined):
            continue
        hull = _convex_hull(set(joined), groups.reads, readers, order)
        if between := [group for group in hull - set(joined) if labelled[group]]:
            names = ", ".join(repr(rules.atoms[i]) for i in sequence)
            label = nodes[members[between[0]][0]].place.label
            raise RuleError(
                f"The rule ({names}) cuts through a dependency: the operator {label.name if label else '?'!r} lies "
                "between its members. Name it in the rule too, or split the rule."
            )
        used[~sequence[0]] += 1
        for group in hull:
            parent[group] = start
    groups.join(parent)


def _rule_of(node: Node) -> int | None:
    return None if node.place.label is None else node.place.label.rule


def _next_neighbour(
    group: int,
    rule: int,
    rule_of: Sequence[int | None],
    labelled: Sequence[bool],
    readers: Sequence[set[int]],
    order: dict[int, int],
) -> list[int] | None:
    """The nearest reader that ``rule`` names, behind the unlabelled groups on the way to it."""
    pending: list[tuple[int, list[int]]] = [(group, [])]
    seen = {group}
    for current, path in pending:  # grows while it is read: breadth first
        for reader in sorted(readers[current], key=order.__getitem__):
            if rule_of[reader] == rule:
                return [*path, reader]
            if not labelled[reader] and reader not in seen:
                seen.add(reader)
                pending.append((reader, [*path, reader]))
    return None


def _convex_hull(
    joined: set[int], reads: Sequence[set[int]], readers: Sequence[set[int]], order: dict[int, int]
) -> set[int]:
    """``joined`` and whatever lies on a path of dependencies between two of its groups."""
    last = max(map(order.__getitem__, joined))
    below = _reachable(joined, readers, lambda group: order[group] <= last)
    return _reachable(joined, reads, below.__contains__)


def _reachable(start: set[int], edges: Sequence[set[int]], inside: Callable[[int], bool]) -> set[int]:
    found, pending = set(start), list(start)
    while pending:
        for group in edges[pending.pop()]:
            if group not in found and inside(group):
                found.add(group)
                pending.append(group)
    return found


def _readers(nodes: Sequence[Node], members: Sequence[Sequence[int]]) -> dict[Any, set[int]]:
    """For each variable, the groups that read it."""
    found: dict[Any, set[int]] = {}
    for group, contents in enumerate(members):
        for i in contents:
            for var in nodes[i].eqn.invars:
                if not compat.is_literal(var):
                    found.setdefault(var, set()).add(group)
    return found


def _name(nodes: list[Node], labels: list[Any], rules: Rules) -> tuple[str, str]:
    """Name and module path of a group."""
    if len(labels) > 1:
        of_rules = (rules.atoms[label.rule].name for label in labels if label.rule is not None)
        named = next(filter(None, of_rules), None)
        name = named or "+".join(dict.fromkeys(label.name for label in labels))
        return name, _common([node.place.path for node in nodes if node.place.label is not None])
    if labels:
        return labels[0].name, "/".join(nodes[0].place.path)
    heaviest = max(nodes, key=lambda node: (cost.flops(node.sized), max(map(_size, node.sized.outvars), default=0)))
    return _called(heaviest.eqn), _common([node.place.path for node in nodes])


def _called(eqn: Any) -> str:
    name = eqn.params.get("name")
    return name if isinstance(name, str) and name.isidentifier() else eqn.primitive.name


def _size(var: Any) -> int:
    return cost.bytes_of(var.aval)


def _common(paths: Sequence[tuple[str, ...]]) -> str:
    """The longest common beginning."""
    first, last = min(paths), max(paths)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return "/".join(first[:length])
