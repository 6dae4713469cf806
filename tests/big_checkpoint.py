"""A large Hugging Face checkpoint of cheap random weights, and what converting it costs.

In: a `config.json` dict; or `python tests/big_checkpoint.py DIR`, which needs 20 GB in DIR and 10 GB of memory.
Out: shards of very different sizes, written tensor by tensor; seconds and peak memory of converting, killing, converting again and loading.
Source: the safetensors format (eight bytes of length, a JSON header, the tensors); /proc/PID/status of Linux.
"""

import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from reanchor_jax import checkpoint
from reanchor_jax.convert.plan import share_index, sources
from reanchor_jax.convert.tables import target_table

# a prime, so that no two rows, tensors or chunks of whole powers of two hold the same numbers
_PERIOD = 1_000_003
_SHARD_BYTES = (2 << 30, 5 << 20, 300 << 20)

# programs to be measured: arguments are the checkpoint and the directory
CONVERT = """
import sys
from reanchor_jax.convert.engine import convert
print("ready", flush=True)
convert(sys.argv[1], None, sys.argv[2], show_progress=False)
"""
_LOAD = """
import sys
from reanchor_jax import checkpoint
print("ready", flush=True)
checkpoint.load(sys.argv[2])
"""

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}


class Cost(NamedTuple):
    """What a command took.

    seconds: from its line `ready` to its end. status: its exit status, negative if it was killed.
    anonymous, resident: most bytes beyond what it held at `ready`; resident counts mapped files too, which the system takes back at need.
    """

    seconds: float
    status: int
    anonymous: int
    resident: int


def layer_shapes(config: dict[str, Any], prefix: str, *, has_qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of every layer's tensors in PyTorch, written from transformers' documentation and not from our tables."""
    width, mlp, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {}
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, queries),
            "mlp.gate_proj.weight": (mlp, width),
            "mlp.up_proj.weight": (mlp, width),
            "mlp.down_proj.weight": (width, mlp),
        }
        if has_qk_norm:
            layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        shapes |= {f"{prefix}layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def target_shapes(config: dict[str, Any], prefix: str = "model.") -> dict[str, tuple[int, ...]]:
    """Shapes of a target's state dict."""
    shapes = {
        f"{prefix}embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        f"{prefix}norm.weight": (config["hidden_size"],),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    return shapes | layer_shapes(config, prefix, has_qk_norm=config["model_type"] == "qwen3")


def write_checkpoint(directory: Path, config: dict[str, Any], shard_bytes: Sequence[int] = _SHARD_BYTES, *, seed: int = 0) -> int:
    """Write config.json, shards whose sizes follow `shard_bytes` in turn, and their index; return the bytes of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = target_shapes(config)
    dtype = np.dtype(config["dtype"])
    shards: list[list[str]] = [[]]
    limits = cycle(shard_bytes)
    limit, filled = next(limits), 0
    for key in sorted(shapes):
        num_bytes = math.prod(shapes[key]) * dtype.itemsize
        if shards[-1] and filled + num_bytes > limit:
            shards.append([])
            limit, filled = next(limits), 0
        shards[-1].append(key)
        filled += num_bytes
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    numbers = (np.random.default_rng(seed).standard_normal(_PERIOD) / 64).astype(dtype)
    phase = 0
    for name, keys in zip(names, shards, strict=True):
        phase = _write_shard(directory / name, {key: shapes[key] for key in keys}, numbers, phase)
    weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return total


def measure(program: str, *arguments: Path, kill_after: float = math.inf) -> Cost:
    """Run a Python program that prints `ready` after its imports, follow its memory from outside, kill it after so many seconds."""
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the program failed before it was ready"
    start, base = time.monotonic(), _memory(process.pid)
    most = base
    while process.poll() is None:
        most = tuple(map(max, most, _memory(process.pid)))
        if time.monotonic() - start > kill_after:
            process.kill()
        time.sleep(0.005)
    seconds = time.monotonic() - start
    process.stdout.close()
    return Cost(seconds=seconds, status=process.returncode, anonymous=most[0] - base[0], resident=most[1] - base[1])


def assert_equals_source(directory: Path, source: Path) -> int:
    """Compare every leaf of a converted Qwen3 target with the tensor it came from, bit for bit; return the number of leaves."""
    target = checkpoint.load_target(directory)
    leaves, table = checkpoint.leaves(target), target_table(target.config)
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    for leaf, value in leaves.items():
        for key, rule in sources(leaf, table):
            with safe_open(source / weight_map[key], framework="np") as tensors:
                tensor = tensors.get_tensor(key)
            expected = tensor.T if "_proj." in key else tensor
            share = np.ascontiguousarray(np.asarray(value)[share_index(rule.share)]).reshape(expected.shape)
            assert share.dtype == expected.dtype, key
            assert np.array_equal(share.view(np.uint16), np.ascontiguousarray(expected).view(np.uint16)), key
    return len(leaves)


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], numbers: np.ndarray, phase: int) -> int:
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    header, offset = {}, 0
    for key, shape in shapes.items():
        end = offset + math.prod(shape) * numbers.itemsize
        header[key] = {"dtype": names[numbers.dtype.name], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = math.prod(shape)
            while left:
                piece = numbers[phase : phase + left]
                file.write(piece.tobytes())
                left -= len(piece)
                phase = (phase + len(piece)) % _PERIOD
    return phase


def _memory(process_id: int) -> tuple[int, ...]:
    """Anonymous and resident bytes of a process; zeros if it is gone."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return tuple(1024 * int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "VmRSS"))


def _main(folder: Path) -> None:
    source, out = folder / "source", folder / "out"
    total = write_checkpoint(source, QWEN3_4B)
    print(f"{total:,} bytes in shards of {', '.join(f'{file.stat().st_size:,}' for file in sorted(source.glob('*.safetensors')))}")
    whole = measure(CONVERT, source, out)
    print(_line("convert", whole))
    print(_line("load", measure(_LOAD, source, out)))
    print(f"{assert_equals_source(out, source)} leaves equal their tensors")
    for seed in range(3):
        shutil.rmtree(out)
        print(_line("killed", measure(CONVERT, source, out, kill_after=random.Random(seed).uniform(0, 1) * whole.seconds)))
        print(f"left: {', '.join(sorted(path.name for path in folder.iterdir() if path != source))}")
        print(_line("convert again", measure(CONVERT, source, out)))
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["out", "source"], names
        print(f"{assert_equals_source(out, source)} leaves equal their tensors")


def _line(name: str, cost: Cost) -> str:
    return (
        f"{name}: {cost.seconds:.0f} s, status {cost.status}, at most {cost.anonymous / 2**20:,.0f} MiB anonymous "
        f"and {cost.resident / 2**20:,.0f} MiB resident beyond imports"
    )


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
