"""DFlare: a mixture of taps for each drafter layer, and maps of their own for keys and values of the context; trained as DFlash.

In: Blocks.
Out: as `dflash`.
Source: DFlare (arXiv 2606.02091).
"""

from reanchor_jax.training.families import dflash
from reanchor_jax.training.families.family import Family

FAMILY = Family(
    settings=lambda causal_size, causal_width: {"architectures": ["QwenDFlareDraftModel"]}, loss=dflash.loss, fusion="per_layer"
)
