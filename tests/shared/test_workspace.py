"""Workspace archives: round trip, determinism, and archives that try to get out."""

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.workspace import ArchiveLimits, ArchiveRefused, WorkspaceTooLarge, make, preserve, remove, unpack

LETTERS = st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",))
NAMES = st.text(LETTERS, min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
FILES = st.tuples(st.just("file"), st.binary(max_size=300), st.sampled_from([0o644, 0o755, 0o400, 0o000, 0o666]))
LINKS = st.tuples(st.just("link"), st.sampled_from(["a", "../..", "/etc/passwd", "nowhere", "."]))
TREES = st.recursive(
    FILES | LINKS,
    lambda children: st.tuples(
        st.just("folder"), st.dictionaries(NAMES, children, max_size=4), st.sampled_from([0o755, 0o700, 0o500, 0o000])
    ),
    max_leaves=12,
)


def write_tree(path: Path, tree: tuple) -> None:
    if tree[0] == "file":
        path.write_bytes(tree[1])
        path.chmod(tree[2])
    elif tree[0] == "link":
        path.symlink_to(tree[1])
    else:
        path.mkdir()
        for name, child in tree[1].items():
            write_tree(path / name, child)
        path.chmod(tree[2])


def read_tree(path: Path) -> tuple:
    if path.is_symlink():
        return ("link", os.readlink(path))
    mode = path.stat().st_mode & 0o777
    path.chmod(0o700)
    if path.is_dir():
        return ("folder", {child.name: read_tree(child) for child in path.iterdir()}, mode)
    return ("file", path.read_bytes(), mode)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, TREES, max_size=5))
def test_unpacking_gives_back_what_was_preserved(tmp_path_factory: pytest.TempPathFactory, children: dict) -> None:
    base = tmp_path_factory.mktemp("tree")
    write_tree(base / "one", ("folder", children, 0o755))
    first = preserve(base / "one")
    unpack(first.data, base / "two")
    assert preserve(base / "two").data == first.data
    unpack(first.data, base / "three")  # preserving may have opened locked folders of "two"
    assert read_tree(base / "three") == ("folder", children, 0o755)
    assert first.left_out == ()
    remove(base)
    assert not base.exists()


def test_the_same_tree_gives_the_same_bytes_whatever_its_times_and_order(tmp_path: Path) -> None:
    for name, files in (("one", ["a", "b", "c"]), ("two", ["c", "a", "b"])):
        (tmp_path / name).mkdir()
        for number, file in enumerate(files):
            (tmp_path / name / file).write_text(file)
            os.utime(tmp_path / name / file, (number * 1000, number * 2000))
    assert preserve(tmp_path / "one").data == preserve(tmp_path / "two").data


def test_links_are_preserved_but_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("hidden away")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "out").symlink_to(secret)
    (tmp_path / "w" / "key").symlink_to(secret / "key")
    preserved = preserve(tmp_path / "w")
    assert b"hidden away" not in zstandard.ZstdDecompressor().decompress(preserved.data, max_output_size=1 << 20)
    unpack(preserved.data, tmp_path / "x")
    assert os.readlink(tmp_path / "x" / "out") == str(secret)


def test_special_files_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    os.mkfifo(tmp_path / "w" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "w" / "socket"))
    (tmp_path / "w" / "file").write_text("kept")
    preserved = preserve(tmp_path / "w")
    assert (preserved.files, preserved.left_out) == (1, ("pipe", "socket"))


def test_a_tree_beyond_the_limits_is_refused(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"f{number}").write_bytes(b"x" * 100)
    with pytest.raises(WorkspaceTooLarge):
        preserve(tmp_path, ArchiveLimits(files=4))
    with pytest.raises(WorkspaceTooLarge):
        preserve(tmp_path, ArchiveLimits(size=499))
    assert preserve(tmp_path, ArchiveLimits(files=5, size=500)).files == 5


def archive(*entries: tarfile.TarInfo) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(b"x" * entry.size) if entry.size else None)
    return zstandard.compress(plain.getvalue())


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize(
    "entries",
    [
        (entry("../out"),),
        (entry("/out"),),
        (entry("a/b"),),
        (entry("d", tarfile.DIRTYPE), entry("d/../../out")),
        (entry("link", tarfile.SYMTYPE, ".."), entry("link/out")),
        (entry("link", tarfile.SYMTYPE, "../out"), entry("link", size=3)),
        (entry("hard", tarfile.LNKTYPE, "/etc/passwd"),),
        (entry("device", tarfile.CHRTYPE),),
        (entry("big", size=2000),),
    ],
)
def test_an_archive_that_tries_to_get_out_is_refused(tmp_path: Path, entries: tuple[tarfile.TarInfo, ...]) -> None:
    with pytest.raises(ArchiveRefused):
        unpack(archive(*entries), tmp_path / "w", ArchiveLimits(size=1000))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", zstandard.compress(b"nonsense" * 200)])
def test_a_damaged_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ArchiveRefused):
        unpack(data, tmp_path / "w")


def test_a_new_workspace_is_a_writable_copy(tmp_path: Path) -> None:
    (tmp_path / "start" / "sub").mkdir(parents=True)
    (tmp_path / "start" / "sub" / "file").write_text("x")
    (tmp_path / "start" / "sub" / "file").chmod(0o444)
    (tmp_path / "start" / "link").symlink_to("sub/file")
    make(tmp_path / "w", tmp_path / "start")
    (tmp_path / "w" / "sub" / "file").write_text("changed")
    assert (tmp_path / "start" / "sub" / "file").read_text() == "x"
    assert os.readlink(tmp_path / "w" / "link") == "sub/file"
