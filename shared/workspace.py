"""Workspaces on disk: made from a task, preserved as one archive, unpacked again, removed.

Owns the archive's form: a zstd-compressed tar of folders, regular files and symbolic links, sorted, without owners,
times or special mode bits, so that the same tree always gives the same bytes.

Invariants: nothing here follows a symbolic link; unpack(preserve(tree)) == tree; unpacking never writes outside the
target, whatever the archive holds. Only for trees that no process works in (the sandbox has ended).
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

BLOCK = 1 << 20
LEVEL = 3


class WorkspaceTooLarge(ValueError):
    """The tree has more files or bytes than may be preserved."""


class ArchiveRefused(ValueError):
    """The archive is damaged, too large, or tries to leave its folder."""


@dataclass(frozen=True)
class ArchiveLimits:
    files: int = 200_000
    size: int = 2 << 30  # bytes, uncompressed


@dataclass(frozen=True)
class Preserved:
    data: bytes
    files: int
    size: int
    left_out: tuple[str, ...]  # sockets, pipes, devices


def make(workspace: Path, start: Path | None) -> None:
    """A new workspace at `workspace`, with the files of `start`."""
    if start is None:
        workspace.mkdir(parents=True)
    else:
        shutil.copytree(start, workspace, symlinks=True)
        for path in (workspace, *workspace.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o777 | (0o700 if path.is_dir() else 0o600))


def preserve(workspace: Path, limits: ArchiveLimits = ArchiveLimits()) -> Preserved:
    """The whole tree as one archive. Raises WorkspaceTooLarge."""
    sink = io.BytesIO()
    files = size = 0
    left_out: list[str] = []
    with (
        zstandard.ZstdCompressor(level=LEVEL).stream_writer(sink, closefd=False) as compressed,
        tarfile.open(
            fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape", bufsize=BLOCK
        ) as archive,
    ):
        for name, path, status in _walk(workspace):
            entry = _entry(name, path, status)
            if entry is None:
                left_out.append(name)
                continue
            files, size = files + 1, size + entry.size
            if files > limits.files or size > limits.size:
                raise WorkspaceTooLarge(
                    f"the workspace has more than {limits.files} files or {limits.size} bytes: it cannot be preserved"
                )
            _add(archive, entry, path, status)
    return Preserved(sink.getvalue(), files, size, tuple(left_out))


def unpack(data: bytes, workspace: Path, limits: ArchiveLimits = ArchiveLimits()) -> None:
    """Make the folder `workspace` (it must not exist) from an archive of `preserve`. Raises ArchiveRefused."""
    workspace.mkdir(parents=True)
    folders = {"": 0o755}
    files = size = 0
    try:
        with (
            zstandard.ZstdDecompressor().stream_reader(data) as plain,
            tarfile.open(fileobj=plain, mode="r|", errors="surrogateescape", bufsize=BLOCK) as archive,
        ):
            for entry in archive:
                files, size = files + 1, size + entry.size
                if files > limits.files or size > limits.size:
                    raise ArchiveRefused(f"the archive holds more than {limits.files} files or {limits.size} bytes")
                _extract(archive, entry, workspace, folders)
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise ArchiveRefused(f"the archive is damaged: {error}") from error
    for name, mode in sorted(folders.items(), reverse=True):  # last, because a folder may be read-only
        os.chmod(workspace / name, mode)


def remove(folder: Path) -> None:
    """Delete a tree, also one whose folders forbid it; nothing happens if there is none."""

    def unlock(_function: object, path: str, _error: object) -> None:
        parent = os.path.dirname(path)
        for locked in (parent, path):
            if os.path.isdir(locked) and not os.path.islink(locked):
                os.chmod(locked, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder, onerror=unlock)


def _walk(workspace: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Every (name, path, status) below `workspace`, parents first, in the order of their names. Folders that their
    owner cannot read are opened up; the status is from before."""
    pending = [("", os.fspath(workspace))]
    while pending:
        name, path = pending.pop()
        status = os.lstat(path)
        if name:
            yield name, path, status
        if stat.S_ISDIR(status.st_mode):
            if status.st_mode & 0o700 != 0o700:
                os.chmod(path, status.st_mode & 0o777 | 0o700)
            prefix = f"{name}/" if name else ""
            children = sorted(os.listdir(path), reverse=True)
            pending += [(prefix + child, os.path.join(path, child)) for child in children]


def _entry(name: str, path: str, status: os.stat_result) -> tarfile.TarInfo | None:
    """The archive's entry, or None for what cannot be preserved."""
    entry = tarfile.TarInfo(name)
    entry.mode = status.st_mode & 0o777
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
    elif stat.S_ISREG(status.st_mode):
        entry.size = status.st_size
    else:
        return None
    return entry


def _add(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str, status: os.stat_result) -> None:
    if not entry.isreg():
        archive.addfile(entry)
        return
    if not status.st_mode & 0o400:
        os.chmod(path, 0o600)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        archive.addfile(entry, file)


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo, workspace: Path, folders: dict[str, int]) -> None:
    """One entry; its parent must be a folder that this archive made before."""
    name = entry.name.rstrip("/")
    parent, _, last = name.rpartition("/")
    if name.startswith("/") or parent not in folders or last in ("", ".", "..") or "\0" in name:
        raise ArchiveRefused(f"the archive's entry {entry.name!r} leads out of its folder")
    target = workspace / name
    try:
        if entry.isdir():
            target.mkdir(mode=0o700)
            folders[name] = entry.mode & 0o777
        elif entry.issym():
            os.symlink(entry.linkname, target)
        elif entry.isreg():
            source = archive.extractfile(entry)
            assert source is not None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(target, flags, 0o600), "wb") as file:
                shutil.copyfileobj(source, file, BLOCK)
            os.chmod(target, entry.mode & 0o777)
        else:
            raise ArchiveRefused(f"the archive's entry {entry.name!r} is neither file, folder nor link")
    except FileExistsError:
        raise ArchiveRefused(f"the archive holds {entry.name!r} twice") from None
