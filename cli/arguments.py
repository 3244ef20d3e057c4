"""Flags that several user commands share. They follow the environment a service would follow."""

from __future__ import annotations

import argparse
import os

__all__ = ["add_deployment"]


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """--deployment NAME."""
    parser.add_argument(
        "--deployment",
        default=os.environ.get("TOKENMILL_DEPLOYMENT", "default"),
        metavar="NAME",
        help="name of the deployment [default %(default)s, env TOKENMILL_DEPLOYMENT]",
    )
