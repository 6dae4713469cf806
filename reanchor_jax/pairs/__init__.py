"""Embedded pairs: a target and its drafters, small enough to ship with the package.

In: the name of an embedded pair, PAIR or PAIR/DRAFTER, or a directory.
Out: Models, or the directories (in the layout of `checkpoint`) they come from.
Source: each directory's provenance.json.
"""

from pathlib import Path
from typing import Any, NamedTuple

from reanchor_jax import checkpoint
from reanchor_jax.config import check_pair
from reanchor_jax.models.drafter import Models

_ROOT = Path(__file__).parent
_ALIASES = {"stories260k/dflash": "stories260k"}  # the drafter that lies beside the target


class Location(NamedTuple):
    """Directories a pair is read from; the same where one holds both. drafter: may hold none."""

    target: Path
    drafter: Path


def names() -> tuple[str, ...]:
    """Names of the embedded pairs, sorted: a target's own stands for it with the drafter beside it."""
    alone = [folder.parent for folder in _ROOT.glob("*/target_config.json")]
    others = [folder.parent for folder in _ROOT.glob("*/drafters/*/drafter_config.json")]
    return tuple(sorted([*(folder.name for folder in alone), *(_name(folder) for folder in others), *_ALIASES]))


def path(name_or_directory: Path | str) -> Path:
    """Directory of an embedded pair (of PAIR/DRAFTER the drafter's), or the given one; a name wins over a directory (write ./NAME).

    Raises FileNotFoundError listing the embedded pairs if it is neither.
    """
    return find(name_or_directory).drafter


def find(name_or_directory: Path | str) -> Location:
    """Where the target and the drafter of a pair lie; errors as `path`."""
    name = _ALIASES.get(str(name_or_directory), str(name_or_directory))
    if name in names():
        pair, _, drafter = name.partition("/")
        return Location(target=_ROOT / pair, drafter=_ROOT / pair / "drafters" / drafter if drafter else _ROOT / pair)
    directory = Path(name_or_directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{str(name_or_directory)!r} is neither a directory nor an embedded pair; embedded are: {', '.join(names()) or 'none'}."
        )
    return Location(target=directory, drafter=directory)


def load_pair(name_or_directory: Path | str, *, dtype: Any = None, sharding: checkpoint.Shardings = None) -> Models:
    """Load an embedded pair by name, or any directory in the layout of `checkpoint`; arguments and errors as there."""
    where = find(name_or_directory)
    if where.target == where.drafter:
        return checkpoint.load(where.target, dtype=dtype, sharding=sharding)
    target = checkpoint.load_target(where.target, dtype=dtype, sharding=sharding)
    drafter = checkpoint.load_drafter(where.drafter, dtype=dtype, sharding=sharding)
    check_pair(target.config, drafter.config)
    return Models(target=target, drafter=drafter)


def _name(drafter: Path) -> str:
    return f"{drafter.parent.parent.name}/{drafter.name}"
