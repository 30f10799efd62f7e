"""The floors of the building: who may import whom (docs/architecture.md)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = {"shared", "services", "cli", "deploy", "simulator", "examples"}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return {n for n in names if n.split(".")[0] in OURS}


def sources(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if "cpu_shims" not in p.parts]


def test_kernel_imports_nothing_of_ours() -> None:
    for path in sources("shared"):
        assert {n for n in imports(path) if not n.startswith("shared")} == set(), path


def test_services_import_only_the_kernel_and_themselves() -> None:
    for path in sources("services"):
        own = ".".join(path.relative_to(ROOT).parts[:2])
        foreign = {n for n in imports(path) if not n.startswith("shared") and not n.startswith(own)}
        assert foreign == set(), path


def test_cores_do_no_io() -> None:
    """A core never awaits, sleeps, reads a clock or draws unseeded randomness."""
    cores = [*(ROOT / "services").glob("*/core.py"), ROOT / "services/scheduler/policy.py"]
    assert len(cores) >= 4
    for path in cores:
        tree = ast.parse(path.read_text())
        kinds = (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
        assert not [n for n in ast.walk(tree) if isinstance(n, kinds)], path
        names = {
            alias.name.split(".")[0]
            for n in ast.walk(tree)
            if isinstance(n, ast.Import | ast.ImportFrom)
            for alias in (n.names if isinstance(n, ast.Import) else [ast.alias(n.module or "")])
        }
        assert names.isdisjoint({"time", "asyncio", "secrets", "socket", "subprocess", "nats"}), path


def test_examples_harness_knows_nothing_of_gyre() -> None:
    for path in (ROOT / "examples/harness").rglob("*.py"):
        assert imports(path) == set(), path
