"""A directory of compiled kernels, shared by all processes of one user.

One entry is one file, and its name says everything: `<key[:2]>/<key>.<sha256 of the content><suffix>`.
The key is a digest of what the entry was made from, the second digest is checked before an entry is handed out. So an
entry that was damaged, truncated or put there by something else is never loaded, two processes that build the same key
differently do not disturb each other, and there is no index that could disagree with the files.

A file appears under its name only when it is complete (a temporary file, renamed). There are no locks: at worst two
processes build the same kernel, and either result is good.

When the directory cannot be written (disk full, read-only), compiling still works: new entries go to a private
temporary directory that lives as long as the process, and one warning says so.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.errors import UserError

_NAME = re.compile(r"(?P<key>[0-9a-f]{64})\.(?P<content>[0-9a-f]{64})(?P<suffix>(?:\.[a-z0-9]+)?)")
_TEMPORARY = ".writing-"

# An entry used within the last minute is never evicted: another process may be about to load it.
GRACE_SECONDS = 60.0
# A temporary file this old belongs to a process that was killed.
ABANDONED_SECONDS = 3600.0


def digest(*parts: str) -> str:
    """A key for what is made from these parts; ("ab", "c") and ("a", "bc") differ."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


@dataclass(frozen=True)
class Entry:
    """One file of the cache, as seen when the directory was listed."""

    path: Path
    bytes: int
    used: float


@dataclass(frozen=True)
class Status:
    """What `terrazzo cache status` shows; sizes are in bytes."""

    directory: Path
    entries: int
    bytes: int
    limit_bytes: int


@dataclass
class Cache:
    """The cache under `directory`, kept below `limit_bytes` by dropping what was not used for longest.

    The directory is created by the first `put`. A directory in which other users can write, or a folder in it, is
    refused with a `UserError`, since what lies in it is loaded into this process.
    """

    directory: Path
    limit_bytes: int
    _unchecked_bytes: int | None = field(default=None, init=False, repr=False)
    _private: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.directory = self.directory.absolute()  # the paths handed out must outlive a chdir

    def get(self, key: str, suffix: str = "") -> Path | None:
        """The file stored under `key`, its content verified; None when there is none that is sound."""
        for root in self._roots():
            _refuse_shared(root)
            _refuse_shared(_shard(root, key))
            for entry in _entries(_shard(root, key)):
                name = _NAME.fullmatch(entry.path.name)
                if name and (name["key"], name["suffix"]) == (key, suffix) and _is_sound(entry.path, name["content"]):
                    return entry.path
        return None

    def put(self, key: str, suffix: str, data: bytes) -> Path:
        """Store `data` under `key` and return the file that holds it; complete or not at all, also on Ctrl-C."""
        name = f"{key}.{hashlib.sha256(data).hexdigest()}{suffix}"
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a key from digest() and a short suffix: {key!r}, {suffix!r}")
        try:
            path = _write(_shard(self.directory, key) / name, data, self.directory)
        except OSError as error:
            path = self._put_privately(_shard(Path(), key) / name, data, error)
        else:
            self._written(len(data))
        return path

    def refuse_shared(self) -> None:
        """Raise a UserError unless only this user (or root) can put files into the directory."""
        _refuse_shared(self.directory)

    def status(self) -> Status:
        """How many entries there are and how large they are together."""
        entries = list(self._all_entries())
        return Status(self.directory, len(entries), sum(entry.bytes for entry in entries), self.limit_bytes)

    def clear(self) -> Status:
        """Remove every entry, and nothing that the cache did not write; returns what was removed."""
        _refuse_shared(self.directory)
        removed = [entry for entry in self._all_entries() if _remove(entry.path)]
        self._sweep_temporaries(older_than=0.0)
        return Status(self.directory, len(removed), sum(entry.bytes for entry in removed), self.limit_bytes)

    def evict(self) -> None:
        """Drop the entries that were not used for longest until the rest fits the limit."""
        entries = sorted(self._all_entries(), key=lambda entry: entry.used)
        excess = sum(entry.bytes for entry in entries) - self.limit_bytes
        spared = time.time() - GRACE_SECONDS
        for entry in entries:
            if excess <= 0 or entry.used > spared:
                break
            if _remove(entry.path):
                excess -= entry.bytes
        self._sweep_temporaries(older_than=ABANDONED_SECONDS)

    def _written(self, size: int) -> None:
        # Listing the whole directory after each write would cost more than many writes: a look at first, and then one
        # each time this process has added a thirty-second of the limit.
        if self._unchecked_bytes is None or (self._unchecked_bytes + size) * 32 > self.limit_bytes:
            self.evict()
            self._unchecked_bytes = 0
        else:
            self._unchecked_bytes += size

    def _roots(self) -> Iterator[Path]:
        yield self.directory
        if self._private is not None:
            yield Path(self._private.name)

    def _all_entries(self) -> Iterator[Entry]:
        for shard in _shards(self.directory):
            yield from (entry for entry in _entries(shard) if _NAME.fullmatch(entry.path.name))

    def _sweep_temporaries(self, older_than: float) -> None:
        oldest = time.time() - older_than
        for shard in _shards(self.directory):
            for entry in _entries(shard):
                if entry.path.name.startswith(_TEMPORARY) and entry.used <= oldest:
                    _remove(entry.path)

    def _put_privately(self, relative: Path, data: bytes, reason: OSError) -> Path:
        try:
            if self._private is None:
                self._private = tempfile.TemporaryDirectory(prefix="terrazzo-")
                warnings.warn(
                    f"the cache {self.directory} cannot be written ({reason.strerror or reason}); what is compiled now "
                    "is lost when this process ends. Set TERRAZZO_CACHE_DIR to a writable directory with free space.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            root = Path(self._private.name)
            return _write(root / relative, data, root)
        except OSError as error:
            raise UserError(
                f"neither the cache {self.directory} ({reason.strerror or reason}) nor the temporary directory "
                f"{tempfile.gettempdir()} ({error.strerror or error}) can be written. Free some space, or set "
                "TERRAZZO_CACHE_DIR and TMPDIR to directories that have it."
            ) from error


def _shard(root: Path, key: str) -> Path:
    return root / key[:2]


def _shards(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as found:
            return [Path(entry.path) for entry in found if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _entries(shard: Path) -> list[Entry]:
    """The regular files of one folder; those that vanish while we look, evicted by another process, are left out."""
    entries = []
    try:
        with os.scandir(shard) as found:
            for item in found:
                with suppress(FileNotFoundError):
                    if item.is_file(follow_symlinks=False):
                        stat = item.stat(follow_symlinks=False)
                        entries.append(Entry(Path(item.path), stat.st_size, stat.st_mtime))
    except OSError:
        return []
    return entries


def _is_sound(path: Path, content: str) -> bool:
    """Whether the file holds what its name says. Marks it as used if so, and removes it if not."""
    try:
        sound = hashlib.sha256(path.read_bytes()).hexdigest() == content
    except OSError:
        return False
    if not sound:
        _remove(path)
        return False
    with suppress(OSError):  # on a read-only disk nothing is evicted either
        os.utime(path)
    return True


def _write(path: Path, data: bytes, root: Path) -> Path:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_shared(root)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _refuse_shared(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        # Not flushed to the disk: after a power cut the digest in the name tells.
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:  # KeyboardInterrupt too
        _remove(Path(temporary))
        raise
    return path


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _refuse_shared(root: Path) -> None:
    """Raise unless only this user (or root) can put files into the directory; one that does not exist is fine."""
    try:
        stat = root.stat()
    except OSError:
        return
    if stat.st_uid not in (0, os.geteuid()):
        raise UserError(
            f"the cache {root} belongs to another user (uid {stat.st_uid}), and compiled code is loaded from it. "
            "Set TERRAZZO_CACHE_DIR to a directory of your own."
        )
    if stat.st_mode & 0o022:
        raise UserError(
            f"other users can write in the cache {root}, and compiled code is loaded from it. "
            f"Run `chmod go-w {root}`, or set TERRAZZO_CACHE_DIR to a directory of your own."
        )
