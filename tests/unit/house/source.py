"""The repository as its own tests see it: tracked files, and what each Python module imports."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "Module", "modules", "tracked_files"]

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("kvcache", "controlplane", "transfer", "engines", "services", "simulator", "cli")


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file of ours, parsed."""

    name: str
    """Dotted, as it is imported; a package's own name for its __init__."""
    path: Path
    tree: ast.Module

    @property
    def docstring(self) -> str:
        """Empty when there is none."""
        return ast.get_docstring(self.tree) or ""

    def imports(self) -> set[str]:
        """Every module it imports, anywhere in the file, dotted. `from a import b` counts as a.b: b may be a module."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found


def modules() -> list[Module]:
    """Every module of the packages that are shipped, generated code left out."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def tracked_files() -> list[Path]:
    """Files under version control; without git (in a source archive), none."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
