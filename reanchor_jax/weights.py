"""One folder of weights in Orbax's layout: written a few leaves at a time, restored onto any devices.

In: leaves by path (`layers/0/mlp/down/kernel`): arrays, or rows that are read when they are written.
Out: the folder; or its leaves as arrays.
Source: Orbax StandardCheckpoint, which is one zarr array a leaf in tensorstore's OCDBT. Restoring takes an abstract tree with shardings, so
    weights saved anywhere load anywhere.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from reanchor_jax.files import changed_files, read_provenance

# Bytes of a chunk, and of the chunks written at once: they are held as they are and compressed, which takes three to four times as much
# memory. Larger ones gain no speed, smaller ones make more files.
_CHUNK_BYTES = 1 << 26
_GROUP_BYTES = 1 << 27

_GIGABYTE = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """A leaf that is read when it is written. (A dataclass, because a NamedTuple would be a branch of the tree of leaves.)

    shape, dtype: of the leaf.
    read: (start, stop) to the rows start..stop-1 of the leaf, of its dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements; Orbax before 0.12 asks for it."""
        return math.prod(self.shape)


def write_weights(folder: Path, leaves: Mapping[str, Any]) -> None:
    """Write a folder that `restore_weights` reads. Leaves given as `Rows` cost memory for a few chunks, whatever their size."""
    handlers = [(kind, ocp.type_handlers.get_type_handler(kind)) for kind in (np.ndarray, jax.Array)]
    registry = ocp.type_handlers.create_type_handler_registry(*handlers, (Rows, _RowsHandler()))
    tree = _nest(leaves)
    save_args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    marker = folder / "commit_success.txt"
    if marker.exists():  # Orbax writes the path on this machine into it, of a folder that will be renamed
        marker.write_text("Checkpoint commit was successful\n", encoding="utf-8")


def num_bytes(leaf: Any) -> int:
    """Bytes of an array, of `Rows`, or of anything else with a shape and a dtype."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def stored_leaves(folder: Path) -> dict[str, Any]:
    """Shapes and dtypes of the leaves a folder (`DIR/target`, `DIR/drafter`) lists, by path; no weights are read.

    Raises FileNotFoundError if the folder is missing, ValueError if it cannot be read.
    """
    folder = folder.absolute()
    check_whole(folder)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(folder).item_metadata
    except Exception as error:
        raise _unreadable(folder, error) from error
    if metadata is None:
        raise ValueError(f"{folder} cannot be read, a file in it is truncated, damaged or missing; write it again.")
    return _flatten(metadata.tree)


def restore_weights(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read leaves with the shapes, dtypes (cast while reading) and shardings wanted, which must be all that `stored_leaves` lists.

    Memory: the arrays, and on the host what is being read: a gigabyte or the largest leaf.
    Raises ValueError if the folder cannot be read.
    """
    largest = max(num_bytes(leaf) for leaf in wanted.values())
    # Orbax refuses a leaf that does not fit into its limit, and counts whole chunks
    limit = math.ceil((largest + 2 * _CHUNK_BYTES) / _GIGABYTE)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler(restore_concurrent_gb=limit)) as checkpointer:
            return _flatten(checkpointer.restore(folder.absolute(), args=ocp.args.StandardRestore(_nest(wanted))))
    except Exception as error:  # tensorstore has no common base class for damaged files
        raise _unreadable(folder, error) from error


def check_whole(folder: Path, *, hashes: bool = False) -> int:
    """Compare a folder with the record beside it, if there is one, and return the number of files compared.

    hashes: whether to compare contents too, not only which files there are and their sizes.
    Tensorstore tells less of a damage, and its late threads write to the terminal.
    Raises FileNotFoundError if the folder is missing, ValueError naming the files that differ or a damaged record.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing although its config is there; convert or train it again.")
    recorded = read_provenance(folder.parent).get("weights", {}).get(folder.name, {})
    if changed := changed_files(folder, recorded, hashes=hashes):
        raise ValueError(f"{folder} is damaged: {'; '.join(changed)}. Copy it again from its source, or convert or train it again.")
    return len(recorded)


class _RowsHandler(ocp.type_handlers.NumpyHandler):
    """Writes `Rows` as Orbax writes numpy arrays, which all readers take them for."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Write all leaves, chunk by chunk; nothing is left to be awaited."""
        transaction, held = ts.Transaction(), 0
        for rows, info in zip(values, infos, strict=True):
            row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
            chunk_rows = min(rows.shape[0], max(1, _CHUNK_BYTES // row_bytes))
            spec = _zarr_spec(rows, chunk_rows, folder=info.parent_dir, name=info.name)
            store = await ts.open(spec, create=True, open=True, context=info.ts_context, transaction=transaction)
            for start in range(0, rows.shape[0], chunk_rows):
                stop = min(start + chunk_rows, rows.shape[0])
                if held and held + (stop - start) * row_bytes > _GROUP_BYTES:
                    await transaction.commit_async()
                    transaction, held = ts.Transaction(), 0
                    store = store.with_transaction(transaction)
                await store[start:stop].write(rows.read(start, stop))
                held += (stop - start) * row_bytes
        await transaction.commit_async()
        return []


def _zarr_spec(rows: Rows, chunk_rows: int, *, folder: Any, name: str) -> ts.Spec:
    """Where and how Orbax looks for an array. It merges the databases of all processes into one when all is written."""
    return ts.Spec(
        {
            "driver": "zarr",
            "dtype": rows.dtype.name,
            "metadata": {"shape": rows.shape, "chunks": (chunk_rows, *rows.shape[1:]), "compressor": {"id": "zstd", "level": 1}},
            "store_data_equal_to_fill_value": True,  # what is missing is damage, not zeros
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{folder}/ocdbt.process_0/"},
                "path": name,
                "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
            },
        }
    )


def _unreadable(folder: Path, error: Exception) -> ValueError:
    line = (str(error) or type(error).__name__).splitlines()[0][:200]
    return ValueError(f"{folder} cannot be read, a file in it is truncated or damaged ({line}); write it again.")


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[name] = leaf
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
