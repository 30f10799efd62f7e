"""Launch profiles: places, environment, and what is said when a harness is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.harness import setup
from services.harness.profiles import HarnessMissing, Places, launch, profile
from shared.bounded_log import HEAD, TAIL, BoundedLog
from shared.config import HarnessConfig
from shared.sandbox import Mount

PLACES = Places(
    "Do {key} in {file:/etc/passwd}.", "/run/instruction.md", "http://127.0.0.1:8080", "gyre-k", "policy", "g000001x02"
)


def test_places_are_filled_once() -> None:
    config = HarnessConfig(
        name="mine",
        command=("run", "{instruction}", "--at={base_url}/v1", "{model}", '{"json": {"a": 1}}', "{unknown}"),
        env={"KEY": "{key}", "FILE": "{instruction_file}"},
    )
    start = launch(profile(config), PLACES)
    assert start.command == (
        "run",
        "Do {key} in {file:/etc/passwd}.",  # what the instruction says is text
        "--at=http://127.0.0.1:8080/v1",
        "policy",
        '{"json": {"a": 1}}',
        "{unknown}",
    )
    assert start.env["KEY"] == "gyre-k"
    assert start.env["FILE"] == "/run/instruction.md"
    assert start.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert start.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert start.mounts == ()


def test_files_of_the_host_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("a: 1")
    config = HarnessConfig(
        name="mine", command=("run", f"--config={{file:{tmp_path}/settings.yaml}}"), mounts=(str(tmp_path),)
    )
    start = launch(profile(config), PLACES)
    assert start.command[1] == "--config=/run/harness/files/0/settings.yaml"
    assert Mount(tmp_path.resolve() / "settings.yaml", "/run/harness/files/0/settings.yaml") in start.mounts
    assert Mount(tmp_path.resolve(), str(tmp_path)) in start.mounts


def test_scout_is_mounted_read_only_and_takes_extra_arguments() -> None:
    start = launch(profile(HarnessConfig(name="scout", extra_args=("--stream",), env={"LANG": "de"})), PLACES)
    assert start.command[:4] == ("/usr/bin/python3", "-I", "-S", "/run/harness/scout.py")
    assert start.command[-1] == "--stream"
    assert start.env["LANG"] == "de"
    [mount] = start.mounts
    assert mount.source.name == "scout.py"
    assert not mount.writable


def test_an_unknown_harness_is_refused_with_the_known_names() -> None:
    with pytest.raises(HarnessMissing, match="scout, mini-swe-agent"):
        profile(HarnessConfig(name="scoot"))
    with pytest.raises(HarnessMissing, match="which is not there"):
        profile(HarnessConfig(name="x", command=("x",), mounts=("/nowhere/at/all",)))


def test_a_harness_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "ENVIRONMENTS", tmp_path)
    with pytest.raises(HarnessMissing, match=r"python -m services\.harness\.setup mini-swe-agent"):
        profile(HarnessConfig(name="mini-swe-agent"))
    assert setup.main(["nonsense"]) == 1


@pytest.mark.parametrize("size", [0, 10, HEAD, HEAD + 1, HEAD + TAIL, HEAD + TAIL + 1, 5 * (HEAD + TAIL)])
@pytest.mark.parametrize("part", [1000, 70_000])
def test_a_log_keeps_beginning_and_end(tmp_path: Path, size: int, part: int) -> None:
    data = bytes(i % 251 for i in range(size))
    log = BoundedLog(tmp_path / "deep" / "x.log", "title")
    for start in range(0, size, part):
        log.write(data[start : start + part])
    log.close("over")
    kept = (tmp_path / "deep" / "x.log").read_bytes()
    assert kept.startswith(b"--- title\n" + data[:HEAD])
    assert kept.endswith(data[-min(TAIL, size) :] + b"--- over\n" if size else b"--- over\n")
    assert (b"bytes left out" in kept) == (size > HEAD + TAIL)
    assert len(kept) <= HEAD + TAIL + 100
