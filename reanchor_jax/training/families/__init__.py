"""Drafter families: what is particular to the config and to the training of each, one short file a family.

In: sizes of a causal head; or drafter, target and Blocks.
Out: entries of a config.json; or a loss.
Source: each file's.
"""

from reanchor_jax.training.families import dblast, dflare, dflash, domino, draft_opd, dspark, xpress
from reanchor_jax.training.families.family import Family

FAMILIES: dict[str, Family] = {
    "dflash": dflash.FAMILY,
    "dflare": dflare.FAMILY,
    "domino": domino.FAMILY,
    "dspark": dspark.FAMILY,
    "xpress": xpress.FAMILY,
    "dblast": dblast.FAMILY,
    "draft-opd": draft_opd.FAMILY,
    "draft-opd-prefixes": draft_opd.PREFIXES,
}
