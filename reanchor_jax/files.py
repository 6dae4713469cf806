"""Files that are whole or absent: JSON read with a clear error, directories that appear at once, a record that tells lost or cut files.

A directory is written as `.NAME.partial-RANDOM` beside its place and renamed; what it replaces waits as `.NAME.replaced-RANDOM` meanwhile.
The writer holds a lock on `.NAME.lock`, which the system lets go when the process dies: whoever holds it next clears what is left.

In: paths.
Out: dicts, directories, errors that name the file and what to do.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, so nothing that may be another's is cleared
    fcntl = None

_HASH_BLOCK = 1 << 24  # bytes hashed at once

PROVENANCE = "provenance.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist. Raises ValueError naming the file if it is not a JSON object."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again from its source.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(value).__name__}.")
    return value


def check_vacant(path: Path, *, may_replace: Callable[[Path], bool] | None = None) -> None:
    """Raise FileExistsError unless nothing stands at the path, an empty directory does, or one that may be replaced.

    may_replace: tells whether a directory is one that may go; None if nothing may.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir() or path.is_symlink():
        raise FileExistsError(f"{path} exists and is not a plain directory; choose another path.")
    if not any(path.iterdir()):
        return
    if may_replace is None:
        raise FileExistsError(f"{path} is not empty; choose another path, or pass overwrite to replace a directory written before.")
    if not may_replace(path):
        raise FileExistsError(
            f"{path} was not written by this package, so it is not overwritten; remove it yourself or choose another path."
        )


@contextmanager
def fresh_directory(path: Path, *, may_replace: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield a temporary directory beside `path`; it becomes `path` when the block succeeds and vanishes when it fails.

    What a killed process left of writing the same path is cleared first.
    Raises FileExistsError as `check_vacant`, BlockingIOError if another process is writing the path.
    """
    path = path.absolute()
    clear_leftovers(path)
    check_vacant(path, may_replace=may_replace)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _sole_writer(path):
        check_vacant(path, may_replace=may_replace)  # again: another may have written it before we held the lock
        suffix = secrets.token_hex(4)
        fresh, old = (path.with_name(f".{path.name}.{kind}-{suffix}") for kind in ("partial", "replaced"))
        fresh.mkdir()
        try:
            yield fresh
            if path.exists():
                os.rename(path, old)
            try:
                os.rename(fresh, path)
            except OSError:
                if old.exists():
                    os.rename(old, path)
                raise
            if old.exists():
                os.rename(old, fresh)  # to be removed under this name: one named `replaced` is always whole
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def clear_leftovers(path: Path) -> None:
    """Undo what a killed process left of writing a path: the directory it was about to replace returns, the unfinished one goes.

    Raises BlockingIOError if another process is writing the path.
    """
    path = path.absolute()
    if not _leftovers(path):
        return
    with _sole_writer(path) as is_sole:
        for leftover in _leftovers(path) if is_sole else ():
            if leftover.name.rpartition(".")[2].startswith("replaced") and not path.exists():
                os.rename(leftover, path)
            else:
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _sole_writer(path: Path) -> Iterator[bool]:
    """Hold the lock of a path; yield False where the system or the file system has no locks."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as file:
            try:
                is_locked = fcntl is not None and fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) is None
            except BlockingIOError:
                raise BlockingIOError(f"{path} is being written by another process; wait for its end, or choose another path.") from None
            except OSError:
                is_locked = False
            if is_locked and not _is_at(file, lock):
                continue  # its holder removed the file between our opening and locking it
            try:
                yield is_locked
            finally:
                if is_locked:
                    lock.unlink()
        if not is_locked:
            lock.unlink(missing_ok=True)
        return


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _leftovers(path: Path) -> list[Path]:
    """Temporary directories of a path that exist, the replaced ones first."""
    if not path.parent.is_dir():
        return []
    pattern = re.compile(re.escape(f".{path.name}.") + "(partial|replaced)-[0-9a-f]{8}")
    return sorted((other for other in path.parent.iterdir() if pattern.fullmatch(other.name)), reverse=True)


def sha256(path: Path, progress: Callable[[int], Any] = lambda num_bytes: None) -> str:
    """Hash a file; progress is told the bytes of every block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def record_files(folder: Path, progress: Callable[[int], Any] = lambda num_bytes: None) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file below a folder, by its relative path; progress as in `sha256`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path, progress)} for path in files}


def changed_files(folder: Path, recorded: Mapping[str, Mapping[str, Any]], *, hashes: bool) -> list[str]:
    """Tell what of a record does not hold any more: files lost, of another size and, if hashes are compared, of other content."""
    found = []
    for name, entry in recorded.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            found.append(f"{name} has {path.stat().st_size:,} bytes, not {entry['bytes']:,}")
        elif hashes and sha256(path) != entry["sha256"]:
            found.append(f"{name} has other content than when it was written")
    return found
