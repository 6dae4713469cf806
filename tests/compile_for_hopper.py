"""Compile the kernel and a whole round for an H200 without having one, and tell what became of them.

    python tests/compile_for_hopper.py              the kernel in every shipped shape: registers, spills, shared memory
    python tests/compile_for_hopper.py --round      a round of Qwen3-8B's shape too: copies, temporaries, kernels by stage, command buffers

Needs, beside jax, `jax-cuda13-plugin` and `jax-cuda13-pjrt` of its version (`pip install --no-deps`) and `nvidia-cuda-nvcc`, `nvidia-nvvm`,
`nvidia-cuda-nvdisasm`, whose `ptxas` must be on the PATH. XLA_FLAGS=--xla_gpu_enable_triton_gemm=false takes cuBLAS for all products; on a
GPU, XLA times both. Exit status: 0 only if nothing spills, no cache is copied, and a round is one command buffer.
"""

import argparse
import collections
import functools
import math
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # the GPU is described, not looked for
_DUMP = tempfile.mkdtemp(prefix="mosaic-")
_SCHEDULES = tempfile.mkdtemp(prefix="schedules-")
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": _DUMP}
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={_SCHEDULES} --xla_dump_hlo_module_re=jit_rounds"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from test_mosaic import SHIPPED  # noqa: E402
from test_published import DRAFTERS, TARGETS  # noqa: E402

from reanchor_jax import DecodeConfig, prefill, step  # noqa: E402
from reanchor_jax.huggingface import read_drafter, read_target  # noqa: E402
from reanchor_jax.kernels.parts import CachePart, DensePart  # noqa: E402
from reanchor_jax.kernels.tree_attention import attend  # noqa: E402
from reanchor_jax.models.drafter import Drafter, Models  # noqa: E402
from reanchor_jax.models.target import Target  # noqa: E402

# published figures of an H200, in the form that XLA reads
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 device_address_bits: 64
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
_CONTEXT = 4096
_STAGES = "noise|draft|attach|merge|expand|verify|walk|retain|commit"


def on_an_h200(values):
    """The shapes of values, placed on the described device."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
    sharding = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values)


def compile_kernels() -> bool:
    """A line a shipped shape. Returns whether nothing spills."""
    print(
        "| nodes | heads / key heads | head size | window | registers | spilled bytes | shared memory, KiB |\n|---|---|---|---|---|---|---|"
    )
    is_clean = True
    for count, heads, groups, size, window in SHIPPED:
        for file in Path(_DUMP).iterdir():
            file.unlink()

        def shape(dtype, *sizes):
            return jax.ShapeDtypeStruct(sizes, dtype)

        part = DensePart(keys_values=shape(jnp.bfloat16, 1, 2 * groups, count, size), mask=shape(jnp.bool_, 1, count, count))
        cache = CachePart(keys_values=shape(jnp.bfloat16, 1, 2 * groups, _CONTEXT, size), lengths=shape(jnp.int32, 1))
        given = shape(jnp.bfloat16, 1, count, heads, size), shape(jnp.int32, 1, count), (part,), cache

        def run(queries, positions, parts, cache, window=window):
            return attend(queries, positions, parts, cache=cache, window=window)

        jax.jit(run).lower(*on_an_h200(given)).compile()
        told = "".join(file.read_text(errors="replace") for file in sorted(Path(_DUMP).iterdir()))
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", told)))
        registers = max(map(int, re.findall(r"Used (\d+) registers", told)))
        shared = int(re.search(r"smem_scratch_bytes=(\d+)", told)[1]) / 1024
        is_clean &= not spilled
        print(f"| {count} | {heads} / {groups} | {size} | {window or '-'} | {registers} | {spilled} | {shared:.0f} |", flush=True)
    return is_clean


def compile_round(num_layers: int, num_nodes: int, preset: str) -> bool:
    """Counts of a loop of rounds. Returns whether nothing of a cache's size is made but the writes."""
    drafter = DRAFTERS["z-lab/Qwen3-8B-DFlash-b16"][1] | {"num_target_layers": num_layers}
    if num_layers < 36:
        drafter["dflash_config"] = drafter["dflash_config"] | {"target_layer_ids": [num_layers - 3, num_layers - 2]}
    target_config, drafter_config = read_target(TARGETS["Qwen3-8B"] | {"num_hidden_layers": num_layers}), read_drafter(drafter)
    models = nnx.eval_shape(
        lambda: Models(
            target=Target(target_config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
            drafter=Drafter(drafter_config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        )
    )
    make = {"reanchor": DecodeConfig.reanchor, "reanchor-tree": DecodeConfig.reanchor_tree}[preset]
    config = make(num_nodes=num_nodes, cache_length=_CONTEXT - 31, block_buckets=(), node_buckets=())
    prompt = jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state, _ = jax.eval_shape(functools.partial(prefill, config=config, max_new_tokens=64), models, *prompt, keys)

    def rounds(models, state, count):
        return jax.lax.fori_loop(0, count, lambda _, state: step(models, state, config=config)[0], state)

    compiled = jax.jit(rounds, donate_argnums=1).lower(*on_an_h200((models, state, jax.ShapeDtypeStruct((), jnp.int32)))).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    buffers = [*state.target_cache, *state.drafter_cache]
    sizes = {math.prod(buffer.shape) for buffer in buffers}
    made = re.findall(r" = bf16\[([\d,]+)\]\S* ([\w-]+)\(", text)
    operations = collections.Counter(name for shape, name in made if math.prod(map(int, shape.split(","))) in sizes and "," in shape)
    kernels = kernels_of_the_loop(text)
    stages = collections.Counter((re.findall(rf"(?:^|[/(])({_STAGES})(?=[/)])", name) or ["other"])[-1] for name in kernels)
    print(f"{preset}, {num_layers} + {drafter_config.num_layers} layers, {num_nodes} nodes, context {_CONTEXT}, bfloat16")
    print(f"temporaries {memory.temp_size_in_bytes / 1e6:.0f} MB, caches and state in place {memory.alias_size_in_bytes / 1e6:.0f} MB")
    print(f"of a cache's size: {dict(operations)} ({len(buffers)} caches)")
    scheduled = schedule_of_the_loop()
    print(f"loops inside a round: {sum(' while(' in line for line in text.splitlines()) - 1}; the loop's body is {dict(scheduled)}")
    attentions = [index for index, name in enumerate(kernels) if "verify" in name and "launch_kernel" in name]
    layer = sorted(np.diff(attentions))[len(attentions) // 2]  # from one layer's attention to the next's
    print(f"kernels of a round: {len(kernels)}, by stage {dict(stages)}, a layer of verify {layer}")
    return not operations.keys() & {"copy", "transpose"} and operations["fusion"] == len(buffers) and scheduled == {"kCommandBuffer": 1}


def schedule_of_the_loop() -> collections.Counter[str]:
    """What the runtime does in each turn of the loop, by kind; a command buffer is one CUDA graph."""
    (file,) = Path(_SCHEDULES).glob("*jit_rounds*thunk_sequence_after_thunk_passes.txt")
    body = re.search(r"\n  body:\n((?:    .*\n)*)", file.read_text())
    return collections.Counter(re.findall(r"^    \d+: (\w+)", body[1], re.MULTILINE))


def kernels_of_the_loop(text: str) -> list[str]:
    """Names of what the loop's body launches; a conditional (here: whether a row samples) counts as one, whatever its branches hold."""
    computations, name = collections.defaultdict(list), ""
    for line in text.splitlines():
        begins = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if begins:
            name = begins[1]
        computations[name].append(line)

    def launched(name):
        for line in computations[name][1:]:
            found = re.search(r" (fusion|custom-call|copy|conditional|call)\(", line)
            if found and found[1] == "call":
                yield from launched(re.search(r"to_apply=%?([\w.\-]+)", line)[1])
            elif found:
                named = re.search(r'op_name="([^"]*)"', line)
                yield named[1] if named else ""

    body = next(re.search(r"body=%?([\w.\-]+)", line)[1] for line in text.splitlines() if " while(" in line and "ENTRY" not in line)
    return list(launched(body))


def main() -> int:
    """Compile what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round", action="store_true", help="a whole round too; minutes")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--preset", choices=("reanchor", "reanchor-tree"), default="reanchor")
    args = parser.parse_args()
    is_clean = compile_kernels()
    if args.round:
        is_clean &= compile_round(args.layers, args.nodes, args.preset)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
