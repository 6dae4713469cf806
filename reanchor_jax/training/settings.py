"""Recipes: what a training run does otherwise than by default, as small JSON files.

In: a recipe's name, or a path.
Out: keyword arguments of RolloutConfig, DrafterShape and TrainConfig, and the drafter to start from.
Source: `recipes/`, one file a family for the embedded target, DBloom's longer blocks, Draft-OPD on prefixes; smollm2 for a chat target.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from reanchor_jax import pairs
from reanchor_jax.fields import is_integer, is_number
from reanchor_jax.files import read_json
from reanchor_jax.training.recipe import RolloutConfig
from reanchor_jax.training.shape import DrafterShape
from reanchor_jax.training.trainer import TrainConfig

_ROOT = Path(__file__).parent / "recipes"
_RECORDS = {"rollouts": RolloutConfig, "drafter": DrafterShape, "training": TrainConfig}


class Recipe(NamedTuple):
    """rollouts, drafter, training: fields of RolloutConfig, DrafterShape and TrainConfig. start: a pair's name, or a directory."""

    name: str
    rollouts: dict[str, Any]
    drafter: dict[str, Any]
    training: dict[str, Any]
    start: str | None


NO_RECIPE = Recipe(name="", rollouts={}, drafter={}, training={}, start=None)


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _ROOT.glob("*.json")))


def read_recipe(name_or_path: Path | str) -> Recipe:
    """Read a recipe by its name, or from a file; a `start` that is no pair's name is a path seen from the file's folder.

    Raises ValueError naming the entry that is unknown or of another type, and FileNotFoundError listing the names if there is none.
    """
    is_name = str(name_or_path) in recipe_names()
    path = _ROOT / f"{name_or_path}.json" if is_name else Path(name_or_path)
    found = read_json(path)
    if found is None:
        raise FileNotFoundError(f"{str(name_or_path)!r} is neither a file nor a recipe; recipes are: {', '.join(recipe_names())}.")
    if unknown := sorted(found.keys() - {*_RECORDS, "start"}):
        raise ValueError(f"{path} holds {', '.join(unknown)}; a recipe has {', '.join(_RECORDS)} and start.")
    start = found.get("start")
    if not (start is None or isinstance(start, str)):
        raise ValueError(f"{path}: start must be a pair's name or a path; got {start!r}.")
    if start is not None and start not in pairs.names():
        start = str(path.parent / start)
    return Recipe(name=path.stem, start=start, **{name: _values(path, name, found.get(name, {})) for name in _RECORDS})


def _values(path: Path, section: str, given: Any) -> dict[str, Any]:
    """Fields of a record, each of its type; lists become tuples."""
    kinds = {field.name: field.type for field in dataclasses.fields(_RECORDS[section])}
    if not isinstance(given, dict) or given.keys() - kinds.keys():
        raise ValueError(f"{path}: {section} must be an object of {', '.join(kinds)}; got {given!r}.")
    values = {}
    for name, value in given.items():
        kind = kinds[name]
        is_ids = isinstance(value, list) and all(map(is_integer, value))
        fits = {
            int: is_integer(value),
            float: is_number(value),
            str: isinstance(value, str),
            bool: isinstance(value, bool),
            int | None: value is None or is_integer(value),
        }
        if not fits.get(kind, value is None or is_ids):
            raise ValueError(f"{path}: {section}.{name} must be {getattr(kind, '__name__', kind)}; got {value!r}.")
        values[name] = tuple(value) if isinstance(value, list) else value
    return values
