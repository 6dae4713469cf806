"""What holds for every test: no silent promotion of dtypes or ranks, and full float32 products.

Compilation takes most of the time of tests this small, so the compiler's expensive passes are left out.
"""

import os

# threads of XLA's pool, read when the first program runs: Pallas' GPU interpreter waits for ever where there are fewer than it has blocks
os.environ.setdefault("NPROC", "8")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def few_programs(request):
    """Slow tests compile hundreds of programs; a process that keeps them all runs out of memory maps, and the compiler crashes."""
    yield
    if request.node.get_closest_marker("slow"):
        jax.clear_caches()
