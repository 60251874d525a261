"""Everything that depends on the JAX version or is private to JAX lives here, and nowhere else.

`tests/test_compat.py` checks each of these against the installed version and fails loudly on a version that nobody
has looked at yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Private, and with no public counterpart in any supported version: the name stack of an equation, the context that
# sets it while an equation is bound, and what of JAX's configuration a trace depends on.
from jax._src import config, source_info_util
from jax.extend import core as jex_core

from dynaflow_jax.errors import DynaFlowError

TESTED_VERSIONS = ("0.10", "0.11", "0.12")
"""Versions of JAX, by minor release, whose private corners used here were checked by hand."""

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

Var = jex_core.Var
DropVar = jex_core.DropVar
Literal = jex_core.Literal
JaxprEqn = jex_core.JaxprEqn
Jaxpr = jex_core.Jaxpr
ClosedJaxpr = jex_core.ClosedJaxpr


def is_literal(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a constant written into the equation."""
    return isinstance(atom, Literal)


def is_dropped(var: Any) -> bool:
    """Whether an output of an equation is discarded at once."""
    return isinstance(var, DropVar)


def new_var(aval: Any) -> Any:
    """A variable that no other jaxpr holds."""
    return Var(aval)


def var_like(var: Any, aval: Any) -> Any:
    """A new variable in place of another one, dropped if that one is."""
    return DropVar(aval) if is_dropped(var) else Var(aval)


def consts_of(jaxpr: Any) -> tuple[Any, ...]:
    """The values of a jaxpr's constant variables (JAX 0.11 keeps them on the jaxpr itself)."""
    return tuple(getattr(jaxpr, "consts", ()))


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed one; since JAX 0.11 the two are one class."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def all_invars(jaxpr: Any) -> tuple[Any, ...]:
    """Constant variables, then inputs."""
    inner = open_jaxpr(jaxpr)
    return (*inner.constvars, *inner.invars)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def closed_jaxpr(
    invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], debug_name: str = "operator"
) -> Any:
    """A closed jaxpr without constants, of the given equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    debug = jex_core.DebugInfo(debug_name, f"dynaflow {debug_name}", None, None)
    effects = {e for e in effects if not _is_input_effect(e)}
    return ClosedJaxpr(Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug), ())


def with_equations(jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """A jaxpr, open or closed, with other inputs, outputs and equations; its constants stay."""
    parts = {"invars": list(invars), "outvars": list(outvars), "eqns": list(eqns)}
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(**parts)) if hasattr(jaxpr, "jaxpr") else jaxpr.replace(**parts)


def _is_input_effect(effect: Any) -> bool:
    return hasattr(effect, "input") or hasattr(effect, "input_index")


def has_effects(eqn: Any) -> bool:
    """Whether an equation does more than its results show, beyond communicating over a mesh axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def sub_jaxprs(eqn: Any) -> Iterator[tuple[str, Any]]:
    """The jaxprs among an equation's parameters, with the parameter's name."""
    for name, value in eqn.params.items():
        if is_jaxpr(value):
            yield name, value
        elif isinstance(value, (tuple, list)):
            for item in value:
                if is_jaxpr(item):
                    yield name, item


def replace_eqn(
    eqn: Any, *, invars: Any = None, outvars: Any = None, params: Any = None, name_stack: Any = None
) -> Any:
    """A copy of an equation with some parts exchanged; what is not given stays."""
    source = eqn.source_info if name_stack is None else eqn.source_info.replace(name_stack=name_stack)
    return JaxprEqn(
        list(eqn.invars if invars is None else invars),
        list(eqn.outvars if outvars is None else outvars),
        eqn.primitive,
        eqn.params if params is None else params,
        eqn.effects,
        source,
        eqn.ctx,
    )


def name_stack(eqn: Any) -> Any:
    """The name stack of an equation, relative to the jaxpr that holds it; stacks add with ``+``."""
    return eqn.source_info.name_stack


def current_name_stack() -> Any:
    """The name stack of what is traced now."""
    return source_info_util.current_name_stack()


def scopes(stack: Any) -> tuple[tuple[str, bool], ...]:
    """A name stack as ``(name, is_transform)``, outermost first; transforms are ``jvp``, ``transpose``, ``vmap``..."""
    return tuple((entry.name, isinstance(entry, source_info_util.Transform)) for entry in stack.stack)


def source_line(eqn: Any) -> str:
    """``file:line (function)`` of the user's code that made an equation, or an empty string."""
    return source_info_util.summarize(eqn.source_info)


@contextlib.contextmanager
def scope_of(eqn: Any) -> Iterator[None]:
    """The name stack, mesh and configuration under which an equation was traced."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind(eqn: Any, *invals: Any) -> list[Any]:
    """Evaluate one equation in the current trace, under its own name stack, mesh and configuration."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with scope_of(eqn):
        out = eqn.primitive.bind(*invals, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
"""Primitives that do what their one body does, as versions of JAX name them."""

REMAT = frozenset({"remat", "remat2", "checkpoint"})
"""Those whose body is computed again when they are differentiated."""


# -- values -------------------------------------------------------------------------------------------------------


def is_tracer(value: Any) -> bool:
    """Whether a value belongs to a trace in progress, and so must not be kept."""
    return isinstance(value, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]


def is_array(value: Any) -> bool:
    """Whether a leaf is data: an array, a tracer or a ``ShapeDtypeStruct`` (a Python scalar is not)."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


# -- traces -------------------------------------------------------------------------------------------------------

remat_p = jex_core.primitives.remat_p
"""What a call of a function under ``jax.remat`` binds."""

_trace_key = jax.make_user_context(None)


def distinct_trace(key: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX keeps its caches of traced functions apart, by ``key``.

    A jitted function inside the model that was traced without labels would be found in the cache and come back
    without them.
    """
    return _trace_key(key)


_pjit_eqn: Any = None


def call_jaxpr(jaxpr: Any, args: Sequence[Any], name: str) -> list[Any]:
    """Call a closed jaxpr as a named function of the surrounding program: one function in the lowered module.

    Two calls of the same jaxpr object share the function. Binding the equation that ``jax.jit`` would make spares
    tracing the jaxpr again.
    """
    global _pjit_eqn
    if _pjit_eqn is None:
        _pjit_eqn = jax.make_jaxpr(jax.jit(lambda x: x))(np.float32(0)).eqns[0]
    n_in, n_out = len(jaxpr.in_avals), len(jaxpr.out_avals)
    params = dict(_pjit_eqn.params)
    params.update(jaxpr=jaxpr, name=name, donated_invars=(False,) * n_in)
    for key, count in (("in_shardings", n_in), ("in_layouts", n_in), ("out_shardings", n_out), ("out_layouts", n_out)):
        params[key] = (params[key][0],) * count
    params["ctx_mesh"] = jax.sharding.get_abstract_mesh()
    return list(_pjit_eqn.primitive.bind(*args, **params))


def function_name(jaxpr: Any) -> str | None:
    """The name of the Python function that a jaxpr was traced from."""
    debug = getattr(open_jaxpr(jaxpr), "debug_info", None)
    source = getattr(debug, "func_src_info", None)
    return source.split(" ")[0] if isinstance(source, str) and source else None


def scan_partition(eqn: Any) -> tuple[int, int]:
    """How many of a ``scan``'s inputs are constants, and how many carries follow them."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.11
    return len(consts), len(carry)


def region_params(eqn: Any, body: Any, extra: int) -> dict[str, Any]:
    """Parameters of a ``scan`` or ``shard_map`` whose body is replaced and takes ``extra`` more inputs, in front."""
    params = dict(eqn.params)
    jaxpr = closed_jaxpr(body.invars, body.outvars, body.eqns, eqn.primitive.name)
    if eqn.primitive.name == "shard_map":
        params["jaxpr"] = open_jaxpr(jaxpr)
        params["in_specs"] = (jax.sharding.PartitionSpec(),) * extra + tuple(params["in_specs"])
        return params
    params["jaxpr"] = jaxpr
    num_consts, _ = scan_partition(eqn)
    if "num_consts" in params:
        params["num_consts"] = num_consts + extra
    elif extra:
        flat_tree = sys.modules[type(params["ft_in"]).__module__]
        _, carry, xs = params["ft_in"].unpack()
        params["ft_in"] = flat_tree.pack((flat_tree.nones(num_consts + extra), carry, xs))
    return params


# -- what an equation says about itself ---------------------------------------------------------------------------


def replicated(aval: Any) -> bool:
    """Whether a value inside ``shard_map`` is known to be the same on every device."""
    manual = getattr(aval, "mat", None)  # tokens and references have none
    return manual is not None and not manual.varying


def varying_axes(value: Any) -> frozenset[Any]:
    """The mesh axes over which a value inside ``shard_map`` may differ from device to device, as its type says."""
    return axes_varied_by(jax.typeof(value))


def axes_varied_by(aval: Any) -> frozenset[Any]:
    """Likewise, for values of a type."""
    manual = getattr(aval, "mat", None)
    return frozenset() if manual is None else manual.varying


def shard_map_like(eqn: Any, fun: Any, in_specs: Any, out_specs: Any) -> Any:
    """``fun`` under ``shard_map`` over the mesh axes of a ``shard_map`` equation."""
    params = eqn.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )


def trace_context() -> Any:
    """Everything in JAX's configuration that a traced program depends on: part of the key of every cache of them."""
    return config.trace_context()


def aval_of(value: Any) -> Any:
    """The type of an array, tracer or ``ShapeDtypeStruct``, with weak type, sharding and manual axes."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.make_jaxpr(lambda x: x)(value).in_avals[0]
    return jax.typeof(value)


def resized(aval: Any, axis: int, size: int) -> Any:
    """The type with another size along one axis."""
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis + 1 :]))


def explicit_sharding(value: Any) -> Any:
    """The sharding of a value if it is part of its type (mesh axes of explicit type); else ``None``."""
    sharding = getattr(jax.typeof(value), "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.empty:
        return None
    return sharding if any(entry is not None for entry in sharding.spec) else None


def shards_of(leaf: Any, axis: int) -> int:
    """Over how many devices an array is split along an axis, as far as its type or its placement tells."""
    sharding = None if isinstance(leaf, jax.ShapeDtypeStruct) else explicit_sharding(leaf)
    if sharding is None and not is_tracer(leaf):
        sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return 1
    return spec_shards(sharding.mesh, sharding.spec, axis)


def is_spread(leaf: Any) -> bool:
    """Whether an array is known to lie on several devices, of which each has a part of it."""
    if not isinstance(leaf, jax.Array) or is_tracer(leaf):
        return False
    return not leaf.sharding.is_fully_replicated


def spec_shards(mesh: Any, spec: Any, axis: int) -> int:
    """Over how many devices of a mesh a partition spec splits an axis."""
    names = spec[axis] if axis < len(spec) else None
    names = () if names is None else (names,) if isinstance(names, str) else names
    return int(np.prod([mesh.shape[name] for name in names if isinstance(name, str)], dtype=int))


def input_shards(eqn: Any, position: int, axis: int) -> int:
    """Over how many devices an equation wants its input split along an axis: ``shard_map``, or a constraint."""
    if eqn.primitive.name == "shard_map":
        return spec_shards(eqn.params["mesh"], eqn.params["in_specs"][position], axis)
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    if isinstance(sharding, jax.sharding.NamedSharding):
        return spec_shards(sharding.mesh, sharding.spec, axis)
    return 1


def device() -> tuple[str, str]:
    """Platform and kind of the default device."""
    chosen = jax.config.values["jax_default_device"]
    found = chosen if hasattr(chosen, "device_kind") else jax.devices()[0]
    return found.platform, found.device_kind


# -- private clients ----------------------------------------------------------------------------------------------
#
# A second PJRT client of the process has no public interface in any supported version; these are the calls that
# work in all of them.


WRITES_INTO_GIVEN_MEMORY = JAX_VERSION >= (0, 11)
"""Whether an executable of a private CUDA client may be given memory of another client to write its results into.

It is donated, and comes back as a result. Seen on 0.11.2; XLA used to end the process where such memory was not reused.
"""


def make_client(platform: str, memory_fraction: float) -> Any:
    """A new client, apart from JAX's own."""
    from jaxlib import xla_client

    if platform == "cpu":
        return xla_client.make_cpu_client()
    options = {
        "platform_name": "cuda",
        "allocator": "bfc",
        "memory_fraction": memory_fraction,
        "preallocate": False,
    }
    return xla_client.make_c_api_client("cuda", options, None)


def device_of_client(client: Any, device_id: int) -> Any:
    """A client's device by id (an option that hides the others has no effect on a second client)."""
    return next(device for device in client.devices() if device.id == device_id)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on the host or on a device; errors of XLA and of CUDA say so in their text only."""
    while error is not None:
        said = str(error)
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "OUT_OF_MEMORY" in said:
            return True
        error = error.__cause__
    return False


def module_bytecode(lowered: Any) -> bytes:
    """The StableHLO module of ``jax.jit(...).lower(...)`` as bytes."""
    from jax._src.interpreters import mlir

    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))


def compile_for(client: Any, device: Any, bytecode: bytes) -> Any:
    """A loaded executable for one device, whose kernels are launched one by one: no graphs inside graphs.

    It is found and kept in JAX's persistent compilation cache, if there is one.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    devices, options = _placement(client, device)
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
    return compiler.compile_or_get_cached(client, module, np.array([device]), options, (), devices)


def load_for(client: Any, device: Any, executable: Any) -> Any:
    """The same executable for another device or client, whose device is of the same kind; nothing is compiled."""
    return client.deserialize_executable(executable.serialize(), *_placement(client, device))


def _placement(client: Any, device: Any) -> tuple[Any, Any]:
    """One device as XLA's list, and options for compiling for it."""
    from jax._src import compiler
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    overrides = {} if client.platform == "cpu" else {"xla_gpu_enable_command_buffer": ""}
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        env_options_overrides=overrides,
    )
    return _jax.DeviceList((device,)), options


def execute_single(executable: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs an executable for one device; returns its outputs as arrays of its client."""
    results = executable.execute_sharded(list(inputs))
    return [shards[0] for shards in results.disassemble_into_single_device_arrays()]


def buffer_from_dlpack(capsule: Any, device: Any) -> Any:
    """Memory as an array of a private client, without a copy."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None)


def has_host_callback(module: bytes) -> bool:
    """Whether a StableHLO module calls back into Python."""
    return b"xla_python_" in module or b"xla_ffi_python_" in module or b"xla_ffi_partitioned_python" in module


def wrap_key_data(bits: Any, dtype: Any) -> Any:
    """Random keys of a type from their bits."""
    return jax.random.wrap_key_data(bits, impl=dtype._impl.name)


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """A context without a mesh, inside ``shard_map`` too: for programs that run on one device.

    Nor is there a check of what varies from device to device: values that were traced in the mesh and values that were
    not may meet.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), config._check_vma(False):
        yield


def shapes_of(fun: Any, avals: Sequence[Any], axes: Mapping[str, int]) -> Any:
    """Shapes and dtypes of what a function returns.

    Args:
      fun: the function.
      avals: types of its arguments.
      axes: sizes of the mesh axes that it may communicate over, beside those that the trace under way has.
    """
    if not axes:
        return jax.eval_shape(fun, *avals)
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with no_mesh():
        return jax.make_jaxpr(fun, axis_env=list(axes.items()), return_shape=True)(*structs)[1]


def partitioned_axes() -> tuple[str, ...]:
    """The mesh axes over which XLA partitions what is traced here: all that ``shard_map`` has not taken for itself."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, size, kind in axes if size > 1 and kind != jax.sharding.AxisType.Manual)


def mesh_sizes() -> dict[str, int]:
    """The sizes of the axes of the mesh that is in use where this is traced, outermost first."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def retyped(aval: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The type of an array of another shape and dtype that varies over the same manual mesh axes."""
    return aval.update(shape=tuple(shape), dtype=dtype, weak_type=False)


def device_ordinals() -> list[int]:
    """The ordinals of the devices of this process that a program traced here may run on.

    Those of the mesh, or the default one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        chosen = jax.config.values["jax_default_device"]
        return [ordinal(chosen if hasattr(chosen, "device_kind") else jax.local_devices()[0])]
    return local_ordinals()


def local_ordinals() -> list[int]:
    """The ordinals of all devices of this process."""
    return [ordinal(device) for device in jax.local_devices()]


def tell_processes(key: str, text: str) -> None:
    """Puts a text under a key into the store that all processes of ``jax.distributed`` reach.

    Raises:
      DynaFlowError: if there is none.
    """
    _store().key_value_set(key, text)


def told_by_process(key: str, seconds: float) -> str | None:
    """The text that a process has put into the store under a key; ``None`` if it does not within some seconds."""
    try:
        return _store().blocking_key_value_get(key, max(int(seconds * 1000), 1))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _store() -> Any:
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise DynaFlowError("the processes do not know of each other (jax.distributed.initialize)")
    return client


def local_device(number: int) -> Any:
    """A device of this process by ordinal."""
    return next(device for device in jax.local_devices() if ordinal(device) == number)


def ordinal(device: Any) -> int:
    """A device's number in this process, as XLA's handlers are told it; ``None`` is the default device."""
    if device is None:
        return device_ordinals()[0]
    number = getattr(device, "local_hardware_id", None)
    return device.id if number is None else number


def scheduled_text(executable: Any) -> str:
    """The optimized HLO of a private client's executable, in the order of execution."""
    return executable.hlo_modules()[0].to_string()


def address(value: Any) -> int:
    """Where an array of one device lies in its memory; random keys lie where their bits do."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return value.addressable_shards[0].data.unsafe_buffer_pointer()


def cudnn_attention(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of cuDNN in a trace, on a machine that need not have cuDNN: to plan with, not to run.

    ``jax.nn.dot_product_attention(..., implementation="cudnn")`` traces to the same call, but only where it could run.

    Args:
      query: (batch, tokens, heads, width of a head).
      key: likewise.
      value: likewise.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    none = jnp.zeros(0, query.dtype)
    out, *_ = cudnn._dot_product_attention_fwd_p_wrapper.bind(
        query,
        key,
        value,
        *([none] * 7),
        scale=query.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=cudnn.MaskType.CAUSAL,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        is_training=False,
    )
    return out


# -- Pallas -------------------------------------------------------------------------------------------------------


def mosaic_interpreter() -> Any:
    """What simulates Mosaic GPU on the CPU: it has ``InterpretGPUParams`` and ``force_gpu_interpret_mode``."""
    from jax.experimental.pallas import mosaic_gpu

    if hasattr(mosaic_gpu, "InterpretGPUParams"):
        return mosaic_gpu
    from jax._src.pallas.mosaic_gpu.interpret import params  # before JAX 0.11 it had no public name

    return params
