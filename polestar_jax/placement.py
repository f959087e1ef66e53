"""Where parameters and state lie on a mesh: batch rows over the axis `data`, heads and feed-forward over `model`.

Only the layout is decided here; the program is that of one device, which XLA partitions. A sum that is split over
`model` is added up in another order, so logits agree within rounding, not bit by bit.
"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polestar_jax.types import DecodeState, Model, Spec

DATA, MODEL = "data", "model"

_OUTPUTS = ("query", "key", "value", "gate", "up", "head")  # split by the rows of `[out, in]`, biases with them
_INPUTS = ("output", "down")  # split by the columns: they sum over what the others split


def check_mesh(model: Model, mesh: Mesh, batch: int | None = None) -> Mesh:
    """The mesh as the layouts here use it: its axes left to XLA (`jax.make_mesh` makes them explicit).

    Args:
      model: to be split.
      mesh: with axes "data" and "model", in any order.
      batch: B, if it is known.

    Raises:
      ValueError: naming the axes, or every size that the mesh does not divide.
    """
    if set(mesh.axis_names) != {DATA, MODEL}:
        raise ValueError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}: it must have 'data' and 'model', for example"
            " jax.make_mesh((2, 2), ('data', 'model'))"
        )
    ways, copies = mesh.shape[MODEL], mesh.shape[DATA]
    layer = model.abstract_params()["layers"][0]
    split = {"attention heads": model.config.heads, "feed-forward rows": layer["gate"]["weight"].shape[0]}
    problems = [
        f"{size} {name} do not split over the {ways} devices of 'model': use a size that divides both"
        for name, size in split.items()
        if size % ways
    ]
    if batch is not None and batch % copies:
        problems.append(
            f"a batch of {batch} does not split over the {copies} devices of 'data': pad it to a multiple of {copies}"
        )
    if problems:
        raise ValueError(f"the mesh {dict(mesh.shape)} does not fit: {'; '.join(problems)}")
    return Mesh(mesh.devices, mesh.axis_names)


def param_shardings(model: Model, mesh: Mesh) -> Any:
    """The tree of `NamedSharding` for `model.abstract_params()`, as `jax.device_put` takes it.

    Queries, keys, values and the feed-forward part are split by head and by inner row, the projections back by column,
    embedding and head by vocabulary. What does not divide (key heads fewer than the devices, an odd vocabulary) and the
    norms are on every device.

    Raises:
      ValueError: as `check_mesh`.
    """
    mesh = check_mesh(model, mesh)
    ways, config = mesh.shape[MODEL], model.config

    def place(path, leaf) -> NamedSharding:
        names = [str(key.key) for key in path]
        whole = config.kv_heads % ways if {"key", "value"} & {*names} else leaf.shape[0] % ways
        if not whole and ("embedding" in names or {*_OUTPUTS} & {*names}):
            return NamedSharding(mesh, PartitionSpec(MODEL))
        if {*_INPUTS} & {*names}:
            return NamedSharding(mesh, PartitionSpec(None, MODEL))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, model.abstract_params())


def row_shardings(spec: Spec, tree: Any) -> Any:
    """The tree of `NamedSharding` for leaves that lead with the batch axis.

    An axis of heads behind it, `[B, H, rows, ...]`, is split over `model` where it divides: keys, values, attention.
    """
    mesh = spec.mesh
    assert mesh is not None
    heads = {count for count in (spec.model.config.heads, spec.model.config.kv_heads) if not count % mesh.shape[MODEL]}

    def place(leaf) -> NamedSharding:
        split = leaf.ndim == 4 and leaf.shape[1] in heads
        return NamedSharding(mesh, PartitionSpec(DATA, MODEL) if split else PartitionSpec(DATA))

    return jax.tree.map(place, tree)


def pin_rows[Tree](spec: Spec, tree: Tree) -> Tree:
    """The tree, which XLA must lay out as `row_shardings` says; as it is without a mesh."""
    return tree if spec.mesh is None else jax.lax.with_sharding_constraint(tree, row_shardings(spec, tree))


def put_rows_on_mesh[Tree](spec: Spec, tree: Tree) -> Tree:
    """The tree with its leaves moved to where `row_shardings` says; as it is without a mesh or in a trace."""
    leaves = jax.tree.leaves(tree)
    if spec.mesh is None or any(isinstance(leaf, Tracer) for leaf in leaves):
        return tree
    return jax.device_put(tree, row_shardings(spec, tree))


def mesh_of(state: DecodeState) -> Mesh | None:
    """The mesh that a state was made for; None for one device, and inside a trace."""
    sharding = None if isinstance(state.keys, Tracer) else state.keys.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and {*mesh.axis_names} == {DATA, MODEL} else None


def check_places(params: Any, mesh: Mesh | None) -> None:
    """Refuses parameters that do not lie where the state does.

    Raises:
      ValueError: with the remedy.
    """
    devices = None if mesh is None else {*mesh.devices.flat}
    for leaf in jax.tree.leaves(params):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            continue
        if devices is None and len(leaf.sharding.device_set) > 1:
            raise ValueError("the parameters lie on several devices, the state on one: pass mesh=... to decode.init")
        if devices is not None and leaf.sharding.device_set != devices:
            raise ValueError(
                f"the state lies on {len(devices)} devices, the parameters on {len(leaf.sharding.device_set)} other"
                " or fewer: load them with mesh=..., or jax.device_put(params, param_shardings(model, mesh))"
            )


def bytes_per_device(model: Model, mesh: Mesh) -> int:
    """Bytes of parameters on each device, from shapes alone."""
    shardings, shapes = param_shardings(model, mesh), model.abstract_params()
    sizes = jax.tree.map(
        lambda at, leaf: int(np.prod(at.shard_shape(leaf.shape))) * leaf.dtype.itemsize, shardings, shapes
    )
    return sum(jax.tree.leaves(sizes))
