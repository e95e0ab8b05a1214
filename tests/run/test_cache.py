"""The cache keeps what it is given, gives back nothing else, and survives what happens to directories."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from terrazzo.errors import UserError
from terrazzo.run import cache as cache_module
from terrazzo.run.cache import Cache, digest

KEY = digest("a source")
LIMIT = 1 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", LIMIT)


def files_under(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_is_put_is_found_by_another_instance(cache: Cache) -> None:
    assert cache.get(KEY, ".so") is None
    path = cache.put(KEY, ".so", b"code")
    assert path.read_bytes() == b"code"
    assert Cache(cache.directory, LIMIT).get(KEY, ".so") == path
    assert cache.get(KEY, ".cpp") is None
    assert cache.get(digest("another source"), ".so") is None
    assert files_under(cache.directory) == [path]


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")


def test_a_key_that_is_no_digest_is_refused(cache: Cache) -> None:
    with pytest.raises(ValueError, match="not a key"):
        cache.put("../../etc/passwd", "", b"")
    assert not cache.directory.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
    ids=["emptied", "truncated", "one byte changed", "one byte added"],
)
def test_a_damaged_entry_is_dropped_and_can_be_rebuilt(cache: Cache, damage: Callable[[Path], object]) -> None:
    path = cache.put(KEY, ".so", b"code")
    damage(path)
    assert cache.get(KEY, ".so") is None
    assert not path.exists()
    assert cache.put(KEY, ".so", b"code") == path
    assert cache.get(KEY, ".so") == path


def test_foreign_files_are_neither_found_nor_removed(cache: Cache) -> None:
    path = cache.put(KEY, ".so", b"code")
    foreign = [path.with_name("notes.txt"), path.with_name(KEY + ".so"), cache.directory / "README"]
    for file in foreign:
        file.write_bytes(b"mine")
    path.with_name(f"{KEY}.{digest('z')}.so").symlink_to(foreign[0])
    assert cache.get(KEY, ".so") == path
    assert cache.status().entries == 1
    assert cache.clear().entries == 1
    assert all(file.read_bytes() == b"mine" for file in foreign)
    assert cache.get(KEY, ".so") is None


def test_two_builds_of_one_key_do_not_disturb_each_other(cache: Cache) -> None:
    first, second = cache.put(KEY, ".so", b"one build"), cache.put(KEY, ".so", b"another build")
    assert {first.read_bytes(), second.read_bytes()} == {b"one build", b"another build"}
    assert cache.get(KEY, ".so") in (first, second)


def test_the_entries_unused_for_longest_are_evicted(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit_bytes=250)
    keys = [digest(str(number)) for number in range(3)]
    for number, key in enumerate(keys[:2]):
        age(cache.put(key, "", bytes(100)), seconds=1000 - number)
    cache.get(keys[0])  # now the other one is the oldest
    cache.put(keys[2], "", bytes(100))
    assert [cache.get(key) is not None for key in keys] == [True, False, True]
    assert cache.status().bytes == 200


def test_an_entry_that_was_just_used_is_not_evicted(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit_bytes=1)
    for number in range(3):
        cache.put(digest(str(number)), "", bytes(100))
    assert cache.status().entries == 3


def test_what_a_killed_process_left_is_swept(cache: Cache) -> None:
    shard = cache.put(KEY, "", b"code").parent
    abandoned, fresh = shard / ".writing-old", shard / ".writing-new"
    for path in (abandoned, fresh):
        path.write_bytes(b"half")
    age(abandoned, seconds=2 * cache_module.ABANDONED_SECONDS)
    cache.evict()
    assert not abandoned.exists()
    assert fresh.exists()
    cache.clear()
    assert files_under(cache.directory) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_write_leaves_nothing(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(source: object, target: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(type(error)):
        cache.put(KEY, "", b"code")
    assert files_under(cache.directory) == []


def fail_with(number: int, only_under: Path) -> Callable[[str, str], None]:
    replace = os.replace

    def failing(source: str, target: str) -> None:
        if only_under in Path(target).parents:
            raise OSError(number, os.strerror(number))
        replace(source, target)

    return failing


def test_a_full_disk_is_said_once_and_compiling_goes_on(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", fail_with(errno.ENOSPC, cache.directory))
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(No space left on device\).*TERRAZZO_CACHE_DIR"):
        path = cache.put(KEY, ".so", b"code")
    assert path.read_bytes() == b"code"
    assert files_under(cache.directory) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(digest("next"), ".so", b"more")
    assert cache.get(KEY, ".so") == path


def test_no_space_anywhere_is_a_users_error(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", fail_with(errno.ENOSPC, Path("/")))
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match=r"neither the cache .* nor the temporary directory .* TMPDIR"),
    ):
        cache.put(KEY, ".so", b"code")


def test_a_directory_that_cannot_be_created_is_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    cache = Cache(tmp_path / "file" / "cache", LIMIT)
    assert cache.get(KEY) is None
    with pytest.warns(RuntimeWarning, match="Not a directory"):
        assert cache.put(KEY, "", b"code").read_bytes() == b"code"


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_in_which_others_write_is_refused(cache: Cache, mode: int) -> None:
    cache.put(KEY, ".so", b"code")
    cache.directory.chmod(mode)
    for use in (lambda: cache.get(KEY, ".so"), lambda: cache.put(KEY, ".so", b"code"), cache.clear):
        with pytest.raises(UserError, match=r"other users can write in the cache .*chmod go-w"):
            use()


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_in_which_others_write_is_refused(cache: Cache, mode: int) -> None:
    path = cache.put(KEY, ".so", b"code")
    path.parent.chmod(mode)
    for use in (lambda: cache.get(KEY, ".so"), lambda: cache.put(KEY, ".so", b"code")):
        with pytest.raises(UserError, match=rf"other users can write in the cache {path.parent}, .*chmod go-w"):
            use()
    assert cache.get(digest("a key elsewhere"), ".so") is None


def test_the_directory_of_another_user_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(KEY, ".so", b"code")
    real_stat = Path.stat

    def owned_by_another(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        stat = real_stat(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*stat[:4], os.geteuid() + 1, *stat[5:10]))

    monkeypatch.setattr(Path, "stat", owned_by_another)
    with pytest.raises(UserError, match=r"belongs to another user \(uid \d+\).* directory of your own"):
        cache.get(KEY, ".so")


def test_a_new_directory_is_private(cache: Cache) -> None:
    cache.put(KEY, "", b"code")
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def put_many(directory: Path, worker: int) -> None:
    cache = Cache(directory, limit_bytes=20_000)
    for round_number in range(40):
        key = digest(str(round_number % 10))
        # Half of the workers agree on the content, the others each write their own.
        content = bytes([worker if worker % 2 else 0]) * 1000
        cache.put(key, ".so", content)
        found = cache.get(key, ".so")
        assert found is not None
        assert len(found.read_bytes()) == 1000


def test_many_processes_share_one_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=put_many, args=(tmp_path / "cache", number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    status = Cache(tmp_path / "cache", LIMIT).status()
    assert 10 <= status.entries <= 30
    assert not [path for path in files_under(tmp_path) if path.name.startswith(".writing-")]
