"""What holds for every test: no silent promotion of dtypes or ranks, and full float32 products.

Compilation takes most of the time of tests this small, so the compiler's expensive passes are left out.
"""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)
