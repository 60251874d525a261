"""Properties of any program and any schedule: results, plans, derivatives, random draws.

The profile ``ci`` is what every test run does; ``HYPOTHESIS_PROFILE=long`` looks twenty times as long. What fails is
printed as a program and a schedule, with a blob for ``@reproduce_failure``.
"""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="needs the extra 'dev'")

from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st
from programs import Program, RandomSchedule, Replacement, check_same, programs, rules, schedules
from scheduling import lowered

import dynaflow_jax as df
from dynaflow_jax.errors import PlanError, RuleError

# What takes time is compilation. These tests ask what a program computes, not how fast.
FAST = {"xla_backend_optimization_level": 0}

pytestmark = pytest.mark.filterwarnings("ignore::dynaflow_jax.RuleWarning")


def cases(count):
    """So many cases where a profile has 100, and in proportion where it has other numbers."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


def flow_of(program, schedule, rules=(), **kwargs):
    return df.dynaflow(
        program,
        scheduler=schedule,
        rules=rules,
        batch_axes=program.batch_axes,
        out_axes=program.out_axes,
        **kwargs,
    )


def compiled(fun):
    return jax.jit(fun, compiler_options=FAST)


@contextlib.contextmanager
def refusals(schedule, rules=()):
    """Passes over the programs that may be refused.

    Rules of several members may cut through a dependency. And where an axis has size one JAX traces other equations:
    it neither broadcasts along it nor, in the backward pass, sums. So a micro-batch of one row may have another program
    than the batch, of which nothing is proven.
    """
    try:
        yield
    except RuleError:
        if not any(isinstance(rule, tuple) for rule in rules):
            raise
    except df.BatchMixingError as error:
        if 1 not in schedule.sizes or "depends on the batch size" not in str(error):
            raise
    else:
        return
    event("refused")
    reject()


def both(program: Program, flow, args):
    """What the scheduled function gives, and what the function itself does: in one compilation, which saves time."""
    return compiled(lambda *args: (flow(*args), program(*args)))(*args)


@cases(500)
@given(programs(), schedules(), rules())
def test_results_are_those_of_the_unscheduled_program(program, schedule, rules):
    args = program.arguments(sum(schedule.sizes))
    with refusals(schedule, rules):
        got, want = both(program, flow_of(program, schedule, rules), args)
    check_same(program, got, want)


@cases(150)
@given(programs(outputs="mean"), schedules(), st.booleans())
def test_a_scalar_mean_is_weighted_by_rows(program, schedule, as_function):
    args = program.arguments(sum(schedule.sizes))
    flow = flow_of(program, schedule)
    if as_function:  # the parts as they come, joined by the user

        def weighted(parts):
            return sum(part * (size / sum(schedule.sizes)) for part, size in zip(parts, schedule.sizes, strict=True))

        flow = df.dynaflow(
            program,
            scheduler=schedule,
            batch_axes=program.batch_axes,
            out_axes=weighted if schedule.sizes[1:] else None,
        )
    got, want = both(program, flow, args)
    check_same(program, got, want)


@cases(40)
@given(schedules(), st.integers(2, 3), st.booleans(), st.booleans())
def test_a_masked_mean_is_weighted_by_what_is_masked(schedule, width, in_loop, marked):
    """A sum over the batch that divides others is each micro-batch's own, however its operators are merged."""
    rows = sum(schedule.sizes)
    x, mask = np.arange(rows * width, dtype=np.float32).reshape(rows, width), np.arange(rows) % 3 != 1

    def count(mask):
        with df.mark("count" if marked else "masked"):
            return mask.sum(dtype=jnp.float32)

    def masked_mean(x, mask):
        if in_loop:
            total = jax.lax.scan(lambda total, _: (total + count(mask), None), 0.0, length=2)[0] / 2
        else:
            total = count(mask)
        with df.mark("masked"):
            picked = jnp.where(mask[:, None], x, 0)
        with df.mark("sum"):
            summed = picked.sum()
        with df.mark("mean"):
            return summed / total

    flow = df.dynaflow(
        masked_mean, scheduler=schedule, batch_axes=0, out_axes="mean", weights=lambda x, mask: mask.sum()
    )
    # A micro-batch without anything to average is not a number with any schedule.
    assume(all(part.any() for part in np.split(mask, np.cumsum(schedule.sizes)[:-1])))
    got, want = both(masked_mean, flow, (x, mask))
    np.testing.assert_allclose(got, want, rtol=1e-6)  # whole numbers, divided and weighted


# -- plans ----------------------------------------------------------------------------------------------------------


@cases(350)
@given(programs(size=4), schedules(), rules())
def test_plans_are_data(program, schedule, rules):
    """The same plan each time; through JSON the same plan again, which lowers to the same program."""
    Replacement.registry.clear()
    args = program.arguments(sum(schedule.sizes))
    flow = flow_of(program, schedule, rules)
    with refusals(schedule, rules):
        plan = flow.plan(*args)
    text = plan.to_json()
    functions = dict(Replacement.registry)
    again = flow_of(program, RandomSchedule(schedule.sizes, schedule.tape), rules).plan(*shapes(args))
    assert again.to_json() == text
    read = df.Plan.from_json(text, functions)
    assert read == plan
    assert hash(read) == hash(plan)
    assert read.to_json() == text
    assert read.show() == plan.show()
    replayed = flow_of(program, read, rules)
    assert replayed.plan(*args) == plan
    if '"fn"' not in text:  # a replacement here holds the jaxprs of the function it was made for
        assert lowered(replayed, *args) == lowered(flow, *args)


def shapes(args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    7,
    10**30,
    1.5,
    float("nan"),
    "",
    "compute",
    "nothing:here",
    "os:system",
    [],
    [0],
    [[]],
    {},
]


def places(value, path=()):
    """Every place in a tree of JSON."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*path, i))


def mutated(data, draw):
    """JSON with one thing that is not as it was."""
    path = draw(st.sampled_from([path for path in places(data) if path]))
    *outer, last = path
    parent = data
    for key in outer:
        parent = parent[key]
    how = draw(st.sampled_from(["replace", "replace", "delete", "repeat", "swap", "number"]))
    if how == "delete":
        del parent[last]
    elif how == "repeat" and isinstance(parent, list):
        parent.insert(draw(st.integers(0, len(parent))), parent[last])
    elif how == "swap" and isinstance(parent, list):
        other = draw(st.integers(0, len(parent) - 1))
        parent[last], parent[other] = parent[other], parent[last]
    elif how == "number" and isinstance(parent[last], int):
        parent[last] += draw(st.integers(-2, 2))
    else:
        parent[last] = draw(st.sampled_from(JUNK))
    return data


@cases(350)
@given(programs(size=4, depth=2), schedules(), st.data())
def test_a_damaged_plan_is_refused_or_right(program, schedule, data):
    """Whatever happens to the JSON of a plan: an error that says so, or a plan of the same function."""
    args = program.arguments(sum(schedule.sizes))
    plan = flow_of(program, schedule).plan(*args)
    text = plan.to_json()
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 3))):
            text = json.dumps(mutated(json.loads(text), data.draw))
    else:
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 20)))
        text = text[:start] + data.draw(st.text('[]{},:"0129-.e truefalsn\\', max_size=3)) + text[end:]
    try:
        read = df.Plan.from_json(text, Replacement.registry)
        flow = flow_of(program, read)
        flow.plan(*args)
    except PlanError:
        event("refused")
    else:
        event("accepted")
        assert df.Plan.from_json(read.to_json(), Replacement.registry) == read
        jax.eval_shape(flow, *args)


# -- derivatives and other transforms -------------------------------------------------------------------------------


def total_of(program):
    """The program's only output."""
    name = f"v{program.outputs[0]}"
    return lambda weights, inputs: program(weights, inputs)[name]


def float_leaves(args):
    return [leaf for leaf in jax.tree.leaves(args) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def check_gradients(got, want, exact):
    """Gradients of sums of whole numbers are whole numbers, and exact while they are not too large.

    Means divide by the number of rows first, or by that of the micro-batch and later by its share. Every term of the
    chain rule that follows is off by a few roundings of itself; terms are whole numbers over the number of rows, and
    sums of up to some hundred of them, so roundings of the largest bound what the sum is off by.
    """
    largest = max((float(np.max(np.abs(leaf), initial=1.0)) for leaf in float_leaves(want)), default=1.0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if exact and largest < 2**20:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=300 * 2.0**-23 * largest)


@cases(150)
@given(programs(differentiable=True, outputs="sum"), schedules(), rules(), st.booleans())
def test_gradient_of_a_scheduled_function(program, schedule, rules, closed):
    args = program.arguments(sum(schedule.sizes))
    fun = total_of(program)
    options = {"scheduler": schedule, "rules": rules, "out_axes": "sum"}
    flow = df.dynaflow(fun, batch_axes=program.batch_axes, **options)
    with refusals(schedule, rules):
        flow.plan(*args)
    if closed:  # what is differentiated is closed over

        def flow(weights, inputs):
            return df.dynaflow(lambda inputs: fun(weights, inputs), batch_axes=program.batch_axes[1:], **options)(
                inputs
            )

    grads = [jax.value_and_grad(f, (0, 1)) for f in (flow, fun)]
    got, want = compiled(lambda *args: [grad(*args) for grad in grads])(*args)
    check_gradients(got, want, exact=True)


@cases(150)
@given(programs(differentiable=True, outputs="sum"), schedules(), rules())
def test_schedule_of_a_gradient(program, schedule, rules):
    """Forward and backward operators; the gradients of rows are rows, those of weights are sums."""
    args = program.arguments(sum(schedule.sizes))
    grad = jax.value_and_grad(total_of(program), (0, 1))
    axes = program.batch_axes
    flow = df.dynaflow(grad, scheduler=schedule, rules=rules, batch_axes=axes, out_axes=("sum", ("sum", None)))
    with refusals(schedule, rules):
        got, want = both(grad, flow, args)
    check_gradients(got, want, exact=True)


@cases(100)
@given(programs(differentiable=True, outputs="mean"), schedules())
def test_schedule_of_the_gradient_of_a_mean(program, schedule):
    args = program.arguments(sum(schedule.sizes))
    grad = jax.value_and_grad(total_of(program))
    flow = df.dynaflow(grad, scheduler=schedule, batch_axes=program.batch_axes, out_axes="mean")
    with refusals(schedule):
        got, want = both(grad, flow, args)
    check_gradients(got, want, exact=False)
    # With respect to the rows it says 1/n, of another n in a micro-batch: refused, unless it is zero.
    rows = jax.value_and_grad(total_of(program), (0, 1))
    out_axes = ("mean", ("mean", None))
    flow = df.dynaflow(rows, scheduler=schedule, batch_axes=program.batch_axes, out_axes=out_axes)
    try:
        flow.plan(*args)
    except df.BatchMixingError:
        event("refused")
    else:
        got, want = both(rows, flow, args)
        check_gradients(got, want, exact=False)


TRANSFORMS = ["jit", "remat", "scan", "vmap", "nested jit", "jvp"]


@cases(150)
@given(programs(size=4), schedules(), st.sampled_from(TRANSFORMS))
def test_a_scheduled_function_under_transforms(program, schedule, transform):
    weights, inputs = program.arguments(sum(schedule.sizes))
    flow = flow_of(program, schedule)

    def apply(fun, weights, inputs):
        if transform in ("jit", "nested jit"):
            return jax.jit(lambda *args: jax.jit(fun)(*args))(weights, inputs)
        if transform == "remat":
            return jax.checkpoint(fun)(weights, inputs)
        if transform == "scan":
            step = lambda carry, inputs: (carry, fun(weights, inputs))  # noqa: E731
            stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x)]), inputs)
            return jax.lax.scan(step, 0, stacked)[1]
        if transform == "vmap":
            stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x)], -1), inputs)
            return jax.vmap(fun, (None, -1))(weights, stacked)
        primals = (weights, inputs)
        tangents = jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0), primals
        )
        return jax.jvp(fun, primals, tangents)[0]

    got, want = compiled(lambda *args: (apply(flow, *args), apply(program, *args)))(weights, inputs)
    check_same(program, got, want)


# -- random draws ---------------------------------------------------------------------------------------------------


@st.composite
def random_programs(draw):
    """Functions of keys and rows whose results show the bits they drew, and what they are called."""
    kind = draw(st.sampled_from(["uniform", "bits", "bernoulli", "randint", "permuted"]))
    width = draw(st.integers(1, 3))
    axis = draw(st.integers(0, 1))

    def draws(key, x):
        """One draw of the shape of the rows."""
        match kind:
            case "uniform":
                return jax.random.uniform(key, x.shape) + x
            case "bits":
                return (jax.random.bits(key, x.shape) >> 8).astype(jnp.float32) + x
            case "bernoulli":
                return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 100)
            case "randint":
                return jax.random.randint(key, x.shape, -1000, 1000).astype(jnp.float32) + x
            case "permuted":
                return x + jax.random.permutation(key, 7)[0]

    def once(key, x):
        with df.mark("draw"):
            return draws(key, x)

    def split(key, x):
        for each in jax.random.split(key, 3):
            with df.mark("layer"):
                x = draws(each, x)
        return x

    def folded(key, x):
        for i in range(2):
            x = draws(jax.random.fold_in(key, i), x + 1)
        return x

    def jitted(key, x):
        with df.mark("first"):
            x = jax.jit(draws)(key, x)
        return jax.jit(lambda key, x: jax.jit(draws)(key, x) * 2)(jax.random.fold_in(key, 3), x)

    def looped(key, x):
        def step(carry, x_t):
            key, x = carry
            key, now = jax.random.split(key)
            with df.mark("step"):
                x = draws(now, x)
            return (key, x), x.sum(1 - axis) + x_t

        (key, x), ys = jax.lax.scan(step, (key, x), jnp.arange(3.0))
        return x, ys

    def looped_over_keys(key, x):
        return jax.lax.scan(lambda x, key: (draws(key, x), None), x, jax.random.split(key, 3))[0]

    def loops_in_loops(key, x):
        def outer(x, key):
            return jax.lax.fori_loop(0, 2, lambda i, x: draws(jax.random.fold_in(key, i), x), x), None

        return jax.lax.scan(outer, x, jax.random.split(key, 2))[0]

    def per_row(key, x):
        keys = jax.random.split(key, x.shape[axis])
        return jax.vmap(lambda key, row: draws(key, row), (0, axis), axis)(keys, x)

    def other_shapes(key, x):
        """Draws of the batch that are not of the shape of the rows, and one that is not of the batch."""
        first, second, third = jax.random.split(key, 3)
        mask = jax.random.bernoulli(first, 0.5, (x.shape[axis],))
        noise = jax.random.uniform(second, (2, x.shape[axis], 3))
        weight = jax.random.uniform(third, (width,))
        rows = jnp.where(jnp.expand_dims(mask, 1 - axis), x, 50) + jnp.expand_dims(weight, axis)
        return rows, noise

    def dropout_of_remat(key, x):
        return jax.checkpoint(lambda x: draws(key, jnp.tanh(draws(key, x)) * 0))(x)

    every = [once, split, folded, jitted, looped, looped_over_keys, loops_in_loops, per_row, other_shapes]
    every.append(dropout_of_remat)
    parts = draw(st.lists(st.sampled_from(every), min_size=1, max_size=2))
    typed = draw(st.booleans())
    several = draw(st.booleans())

    def fun(keys, x):
        outs = []
        for i, part in enumerate(parts):
            outs.append(part(keys[i] if several else keys[0], x))
        return outs

    fun.__name__ = f"{kind}: {', '.join(part.__name__ for part in parts)}"
    return fun, axis, width, typed


@cases(150)
@given(random_programs(), schedules())
def test_random_draws_are_those_of_the_whole_batch(drawn, schedule):
    fun, axis, width, typed = drawn
    rows = sum(schedule.sizes)
    shape = (rows, width) if axis == 0 else (width, rows)
    x = np.arange(rows * width, dtype=np.float32).reshape(shape)
    keys = [jax.random.key(i) if typed else jax.random.PRNGKey(i) for i in range(2)]
    flow = df.dynaflow(fun, scheduler=schedule, batch_axes=(None, axis))
    got, want = both(fun, flow, (keys, x))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@cases(50)
@given(random_programs(), schedules())
def test_separate_draws_are_draws(drawn, schedule):
    """With ``rng="per_micro_batch"``: any draws, but those of the function if there is one micro-batch."""
    fun, axis, width, typed = drawn
    rows = sum(schedule.sizes)
    x = np.zeros((rows, width) if axis == 0 else (width, rows), np.float32)
    keys = [jax.random.key(i) if typed else jax.random.PRNGKey(i) for i in range(2)]
    flow = df.dynaflow(fun, scheduler=schedule, batch_axes=(None, axis), rng="per_micro_batch")
    got, want = both(fun, flow, (keys, x))
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    if len(schedule.sizes) == 1:
        jax.tree.map(np.testing.assert_array_equal, got, want)
