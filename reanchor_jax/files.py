"""Files that are whole or absent: JSON read with a clear error, directories that appear at once, a record that tells lost or cut files.

A directory is written as `.NAME.partial-RANDOM` beside its place and renamed; what it replaces waits as `.NAME.replaced-RANDOM` meanwhile.
The writer holds a lock on `.NAME.lock`, which the system lets go when the process dies: whoever holds it next clears what is left.

In: paths.
Out: dicts, directories, errors that name the file and what to do.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, so nothing that may be another's is cleared
    fcntl = None

_HASH_BLOCK = 1 << 24  # bytes hashed at once

PROVENANCE = "provenance.json"


def check_writable(path: Path) -> None:
    """Raise OSError naming the file, before the work and not after it, if it cannot be written or made there."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory; give a file", str(path))
    if found is not None and not stat.S_ISREG(found.st_mode):  # a pipe or a device, which is not opened twice
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    try:
        with tempfile.NamedTemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist. Raises ValueError naming the file if it is not a JSON object."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again from its source.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(value).__name__}.")
    return value


def read_provenance(directory: Path) -> dict[str, Any]:
    """Read the `provenance.json` of a directory, empty if there is none; `weights`, the record of `record_files` by folder, is checked.

    Raises ValueError naming the file if it is no JSON object or if its record is not of that form.
    """
    path = directory / PROVENANCE
    found = read_json(path) or {}
    number, recorded = found.get("format", 1), found.get("weights", {})
    problems = []
    if not isinstance(number, str) and (type(number) is not int or number < 1):
        problems.append(f"format must be a whole number of at least 1; got {number!r}")
    if not isinstance(recorded, dict) or not all(isinstance(files, dict) for files in recorded.values()):
        problems.append("weights must hold an object of files for each folder")
    else:
        for folder, files in recorded.items():
            problems += [f"weights.{folder}: {problem}" for name, entry in files.items() if (problem := _record_problem(name, entry))]
    if problems:
        raise ValueError(f"{path} is damaged: {'; '.join(problems[:3])}. Copy it again from its source, or convert or train it again.")
    return found


def settle(path: Path) -> Path:
    """The path without `..`, so that making its parents makes none that it only passes through; a symbolic link at its end stays one."""
    if ".." not in path.parts:
        return path
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name


def error_text(error: Exception) -> str:
    """An error in one line for the terminal; one of the system is told with its file."""
    is_named = isinstance(error, OSError) and error.strerror and error.filename
    return f"{error.filename}: {error.strerror}" if is_named else str(error)  # pyright: ignore[reportAttributeAccessIssue]


def check_vacant(path: Path, *, foreign_entry: Callable[[Path], str | None] | None = None) -> None:
    """Raise FileExistsError unless nothing stands at the path, an empty directory does, or one that may be replaced.

    foreign_entry: names what in a directory is not ours, or None if it may go; without it no directory may.
    """
    place = settle(path)
    if not place.exists() and not place.is_symlink():
        return
    if not place.is_dir() or place.is_symlink():
        raise FileExistsError(f"{path} exists and is not a plain directory; choose another path.")
    if not any(place.iterdir()):
        return
    if foreign_entry is None:
        raise FileExistsError(f"{path} is not empty; choose another path, or pass overwrite (--overwrite) to replace one written before.")
    if found := foreign_entry(place):
        raise FileExistsError(
            f"{path} was not written by this package ({found}), so it is not overwritten; remove it yourself or choose another path."
        )


@contextmanager
def fresh_directory(path: Path, *, foreign_entry: Callable[[Path], str | None] | None = None) -> Iterator[Path]:
    """Yield a temporary directory beside `path`; it becomes `path` when the block succeeds and vanishes when it fails.

    What a killed process left of writing the same path is cleared first. Parents are made; they vanish too, unless another uses them.
    Raises FileExistsError as `check_vacant`, BlockingIOError if another process is writing the path.
    """
    path = settle(path).absolute()
    clear_leftovers(path)
    check_vacant(path, foreign_entry=foreign_entry)
    with _parents(path), _sole_writer(path):
        check_vacant(path, foreign_entry=foreign_entry)  # again: another may have written it before we held the lock
        suffix = secrets.token_hex(4)
        fresh, old = (path.with_name(f".{path.name}.{kind}-{suffix}") for kind in ("partial", "replaced"))
        fresh.mkdir()
        try:
            yield fresh
            try:
                if path.exists():
                    os.rename(path, old)
                os.rename(fresh, path)
            except BaseException:
                if old.exists() and not path.exists():
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
    path = settle(path).absolute()
    if not _leftovers(path):
        return
    with _sole_writer(path) as is_sole:
        for leftover in _leftovers(path) if is_sole else ():
            if leftover.name.rpartition(".")[2].startswith("replaced") and not path.exists():
                os.rename(leftover, path)
            else:
                shutil.rmtree(leftover, ignore_errors=True)


def _record_problem(name: str, entry: Any) -> str | None:
    """What is wrong with a file's entry in the record of weights."""
    file = PurePosixPath(name)
    if file.is_absolute() or ".." in file.parts or not file.parts:
        return f"{name!r} lies outside the folder"
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or not isinstance(entry.get("sha256"), str):
        return f"{name} must have bytes, a whole number, and sha256, a text"
    return None


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the parents of a path; those made are removed, as far as they are empty, if the block fails."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _sole_writer(path: Path) -> Iterator[bool]:
    """Hold the lock of a path; yield False where the system or the file system has no locks.

    Raises FileExistsError if what stands at the lock's place is not a lock.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with _open_lock(lock) as file:
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


@contextmanager
def _open_lock(lock: Path) -> Iterator[int]:
    """Yield the descriptor of a lock file, made if it is missing; what is not an empty plain file is neither followed nor changed."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    refusal = f"{lock} is not a lock left by this package; remove it yourself or choose another path."
    try:
        descriptor = os.open(lock, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a symbolic link, a directory, a socket
            raise FileExistsError(refusal) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            raise FileExistsError(refusal)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _leftovers(path: Path) -> list[Path]:
    """Temporary directories of a path that exist, the replaced ones first."""
    if not path.parent.is_dir():
        return []
    pattern = re.compile(re.escape(f".{path.name}.") + "(partial|replaced)-[0-9a-f]{8}")
    named = (other for other in path.parent.iterdir() if pattern.fullmatch(other.name))
    return sorted((other for other in named if other.is_dir() and not other.is_symlink()), reverse=True)


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
