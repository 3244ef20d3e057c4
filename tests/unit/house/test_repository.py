"""Promises the repository makes about itself."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from scripts import docs, protos

from .source import ROOT, Module, modules, tracked_files

TEXT = {".py", ".pyi", ".md", ".toml", ".proto", ".yml", ".yaml", ".json", ".sh", ""}

DECLARING = [module for module in modules() if "__all__" in module.path.read_text()]


def test_generated_code_is_fresh() -> None:
    assert protos.stale(protos.generate()) == []


@pytest.mark.parametrize(("path", "text"), docs.pages().items(), ids=lambda value: getattr(value, "name", ""))
def test_the_pages_that_list_settings_and_metrics_are_fresh(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make docs`"


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    private = re.compile(r"(?<![\w.\]}*])/(?:home|root|work|Users)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("module", DECLARING, ids=lambda module: module.name)
def test_a_module_exports_names_it_has(module: Module) -> None:
    exported: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "__all__" in targets:
                exported = set(ast.literal_eval(node.value))
            bound |= targets
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    assert exported - bound == set()


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    for target in targets[1].split():
        assert re.search(rf"^  make {target}\s+\S", listed, re.MULTILINE), target


def test_the_readme_names_the_two_commands_and_only_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`make ([a-z]+)\b[^`\n]*`", readme)) | set(
        re.findall(r"^    make ([a-z]+)", readme, re.MULTILINE)
    )
    assert {"up", "test"} <= named
    assert named <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_decision_is_listed_once() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert re.findall(r"\]\((0.*?\.md)\)", (folder / "README.md").read_text()) == pages
    assert [name[:4] for name in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert broken == []
