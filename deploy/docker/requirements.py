"""Prints what Tokenmill needs, and the extras that are named, as pip requirements. Standard library only.

So that a build installs packages before it looks at any code: they change rarely.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Extras of our own inside an extra are left out: name them too."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
    for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        if not requirement.startswith("tokenmill["):
            print(requirement)


if __name__ == "__main__":
    main()
