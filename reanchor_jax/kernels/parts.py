"""What new tokens attend to: entries held beside the cache, and the cache of one layer.

In: keys and values in one array, keys in rows 0..G-1, values in rows G..2G-1.
Out: records that every kernel takes.
Source: ours.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # finite, so that (masked - masked) is 0 and not NaN


class DensePart(NamedTuple):
    """Keys and values held beside the cache.

    mask: True where query t sees entry n; windows must be in it already.
    """

    keys_values: Float[Array, "B 2G N A"]
    mask: Bool[Array, "#B T N"]


class CachePart(NamedTuple):
    """Committed keys and values of one layer; every query's position is at or past its row's length.

    keys_values: S is a multiple of 64. lengths: number of committed positions of each row.
    """

    keys_values: Float[Array, "B 2G S A"]
    lengths: Int[Array, " B"]
