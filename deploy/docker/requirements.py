"""Writes what Tokenmill needs as pip requirements, one file an extra and core.txt. Standard library only.

So that a build installs packages again only when they change, not with every line of pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Into the folder that is named. An extra's own extras of Tokenmill are left out: install their files too."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = Path(sys.argv[1])
    folder.mkdir()
    for name, requirements in {"core": project["dependencies"], **project["optional-dependencies"]}.items():
        wanted = [one for one in requirements if not one.startswith("tokenmill[")]
        (folder / f"{name}.txt").write_text("\n".join(wanted) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
