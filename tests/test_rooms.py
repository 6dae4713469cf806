"""The order of the rooms, read from the sources: imports go one way, conversion stays outside, PyTorch never comes in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import reanchor_jax

# the sources of this checkout: an installed package holds convert/ inside it
PACKAGE = Path(__file__).parents[1] / "reanchor_jax"
CONVERT = PACKAGE.parent / "convert"

# a room may import what stands before it; rooms of one entry (a whole folder) may import each other
ORDER = (
    "fields",
    "config",
    "huggingface",
    "cache",
    "kernels",
    "models.layers",
    "models.heads",
    "models.target",
    "models.drafter",
    "statistics",
    "decoding.config",
    "decoding.sampling",
    "decoding.attach",
    "decoding.trie",
    "decoding.expand",
    "decoding.retain",
    "decoding.confidence",
    "decoding.schedule",
    "decoding.draft",
    "decoding.verify",
    "decoding.walk",
    "decoding.state",
    "decoding.request",
    "decoding.propose",
    "decoding.rounds",
    "decoding.loop",
    "files",
    "weights",
    "checkpoint",
    "pairs",
    "inspection",
    "text",
    "streaming",
    "generation",
    "generator",
    "mapping",
    "training",
    "bench",
    "arguments",
    "cli",
)
# peers runs other people's loops beside ours, so it exports weights for them and imports them inside its functions
PEERS = "bench.peers"
MAY_IMPORT_CONVERT = {"cli", PEERS}


def sources(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """Dotted names a file imports, wherever in it; `from package import module` counts as the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.is_relative_to(CONVERT), f"{path} imports relatively; write the whole name."
            if node.level == 0:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rank(room):
    """Place in ORDER of a module, or of a name inside one."""
    found = [index for index, entry in enumerate(ORDER) if room == entry or room.startswith(f"{entry}.")]
    assert found, f"{room} has no place in the order of rooms; add it to design and to ORDER."
    return found[0]


LIBRARY = [path for path in sources(PACKAGE) if path != PACKAGE / "__init__.py" and path.stat().st_size]


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_a_room_imports_only_rooms_before_it(path):
    room = name_of(path)
    for name in imported(path):
        if name.startswith("reanchor_jax.convert"):
            assert room in MAY_IMPORT_CONVERT, f"{room} imports {name}; of the library only {', '.join(MAY_IMPORT_CONVERT)} may."
        elif name.startswith("reanchor_jax."):
            other = name.removeprefix("reanchor_jax.")
            is_same_folder = rank(other) == rank(room) and "." in room
            assert rank(other) < rank(room) or is_same_folder, f"{room} imports {other}, which stands behind it."


def test_scripts_run_in_a_clone_where_conversion_is_not_installed():
    for path in LIBRARY:
        if name_of(path) != "cli":
            at_import = [node.module or "" for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
            wrong = [name for name in at_import if name.startswith("reanchor_jax.convert")]
            assert not wrong, f"{path} imports {', '.join(wrong)}; do it inside the function that needs it."


def test_every_entry_of_the_order_is_a_room():
    rooms = {name_of(path) for path in sources(PACKAGE)}
    assert [entry for entry in ORDER if entry not in rooms] == []


def test_conversion_imports_the_library_and_never_the_command_line():
    names = {name for path in sources(CONVERT) for name in imported(path)}
    assert any(name.startswith("reanchor_jax.checkpoint") for name in names)
    assert not [name for name in names if name.startswith(("reanchor_jax.cli", "reanchor_jax.bench", "reanchor_jax.training"))]


def test_no_source_imports_torch():
    for path in [*sources(PACKAGE), *sources(CONVERT)]:
        if path.is_relative_to(CONVERT) or name_of(path) != PEERS:
            wrong = [name for name in imported(path) if name.split(".")[0] in ("torch", "tensorflow", "dflash")]
            assert not wrong, f"{path} imports {', '.join(wrong)}"


def test_importing_the_package_loads_no_torch_and_no_command_line():
    program = "import sys, reanchor_jax; print(*[name for name in ('torch', 'transformers', 'reanchor_jax.cli') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == []


def test_the_public_names_are_listed_once_and_exist():
    assert sorted(set(reanchor_jax.__all__)) == sorted(reanchor_jax.__all__)
    for name in reanchor_jax.__all__:
        assert hasattr(reanchor_jax, name)
