"""Read single fields of a JSON dict, each by its type and bounds, so that nothing else reaches the records.

In: a dict, a field's name, what stands for an absent field (null counts as absent; without a default the field must be there).
Out: the value; ValueError with the field, the rule, the value got and what to do.
Source: JSON (RFC 8259). A bool is no number here, and a float no integer.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

D = TypeVar("D")
T = TypeVar("T")

LARGEST = 2**31 - 1  # of int32, in which tokens and sizes are counted
MOST_LAYERS = 1000  # a layer is built at a time, so a wrong number would take forever
_REQUIRED: Any = object()
_FLOAT32 = 3e38  # a larger number is infinite once it is cast,
_SMALLEST = 1e-30  # and what is divided by a much smaller one


def integer(config: Mapping[str, Any], name: str, default: D = _REQUIRED, *, least: int | None = 1, most: int = LARGEST) -> int | D:
    """An integer in least..most; least=None sets no lower bound (a record checks it)."""

    def holds(value: Any) -> bool:
        return is_integer(value) and (least is None or least <= value) and value <= most

    value = config.get(name)
    is_plain = most == LARGEST and not (isinstance(value, int) and value > most)
    rule = "an integer" if least is None else "a positive integer" if least == 1 and is_plain else f"an integer in {least}..{most}"
    return _read(config, name, default, holds, rule)


def integers(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> list[int] | D:
    """A list of integers of any sign, at most LARGEST."""
    return _read(
        config,
        name,
        default,
        lambda value: _is_list(value, is_integer) and max(map(abs, value), default=0) <= LARGEST,
        "a list of integers",
    )


def number(
    config: Mapping[str, Any], name: str, default: D = _REQUIRED, *, above: float = 0, most: float = _FLOAT32, or_zero: bool = False
) -> float | D:
    """A finite number above a bound and not beyond another; or_zero: also 0, which switches something off."""

    def holds(value: Any) -> bool:
        return is_number(value) and (above < value <= most or (or_zero and value == 0))

    kind = "a positive float32 number" if above == 0 and most == _FLOAT32 else f"a float32 number above {above}"
    rule = f"{'0 or ' if or_zero else ''}{kind}{'' if most == _FLOAT32 else f' and at most {most}'}"
    found = _read(config, name, default, holds, rule)
    return float(found) if is_number(found) else found


def numbers(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> list[float] | D:
    """A list of positive, finite numbers."""
    return _read(config, name, default, lambda value: _is_list(value, is_positive), "a list of positive float32 numbers")


def boolean(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> bool | D:
    """True or false, never 0, 1 or a word."""
    return _read(config, name, default, lambda value: isinstance(value, bool), "true or false")


def string(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> str | D:
    return _read(config, name, default, lambda value: isinstance(value, str), "a string")


def strings(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> list[str] | D:
    return _read(config, name, default, lambda value: _is_list(value, lambda entry: isinstance(entry, str)), "a list of strings")


def section(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> Mapping[str, Any] | D:
    """A JSON object."""
    return _read(config, name, default, lambda value: isinstance(value, Mapping), "an object")


def sections(config: Mapping[str, Any], name: str, default: D = _REQUIRED) -> list[Mapping[str, Any]] | D:
    """A list of JSON objects."""
    return _read(config, name, default, lambda value: _is_list(value, lambda entry: isinstance(entry, Mapping)), "a list of objects")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number float32 can work with: neither a bool nor NaN, infinite or almost 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or _SMALLEST <= abs(value) <= _FLOAT32)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_list(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_entry, value))


def _read(config: Mapping[str, Any], name: str, default: Any, holds: Callable[[Any], bool], rule: str) -> Any:
    value = config.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"config.json lacks {name!r}; add it.")
        return default
    if not holds(value):
        raise ValueError(f"{name} must be {rule}; got {reprlib.repr(value)}; fix config.json.")
    return value
