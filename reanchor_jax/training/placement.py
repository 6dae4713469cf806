"""Where the parts of training lie on a mesh: rows of a batch along one axis, the largest axis of every weight along another.

In: a mesh with axes `data` and `model`, arrays.
Out: the same arrays, placed; the compiler adds what must be sent.
Source: GSPMD (arXiv 2105.04663).
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "model")


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of data * model of this machine's devices. Raises ValueError if there are fewer."""
    devices = jax.devices()
    if data < 1 or model < 1:
        raise ValueError(f"both axes of a mesh must be at least 1; got {data} by {model}.")
    if data * model > len(devices):
        raise ValueError(f"a mesh of {data} by {model} needs {data * model} devices; there are {len(devices)}.")
    return jax.make_mesh((data, model), AXES, devices=devices[: data * model], axis_types=(jax.sharding.AxisType.Auto,) * 2)


def check_batch(mesh: Mesh, batch_size: int) -> None:
    """Raise ValueError for a mesh with other axes, or if the rows of a batch do not fill its data axis evenly."""
    if tuple(mesh.axis_names) != AXES:
        raise ValueError(f"the mesh must have the axes {', '.join(AXES)}; got {', '.join(mesh.axis_names)}.")
    if batch_size % mesh.shape["data"]:
        raise ValueError(f"batch_size ({batch_size}) must be a multiple of the mesh's data axis ({mesh.shape['data']}).")


def place_weights(tree: Any, mesh: Mesh) -> Any:
    """Lay the largest axis of every array that the model axis divides along it; what has none is repeated."""

    def place(leaf):
        size = mesh.shape["model"]
        divided = [axis for axis, length in enumerate(leaf.shape) if length % size == 0 and length > 1]
        spec = [None] * leaf.ndim
        if divided:
            spec[max(divided, key=lambda axis: leaf.shape[axis])] = "model"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, tree)


def place_rows(tree: Any, mesh: Mesh) -> Any:
    """Lay the first axis of every array along the data axis."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data"))), tree)
