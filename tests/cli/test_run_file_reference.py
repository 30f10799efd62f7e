from pathlib import Path

from cli.run_file_reference import reference


def test_page_is_current() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "run-file.md"
    assert page.read_text() == reference(), "run: gyre run-file > docs/run-file.md"
