"""Flags that several user commands share, and what they mean. They follow the environment a service would follow."""

from __future__ import annotations

import argparse
import os

from controlplane.deployment import DeploymentState, running
from controlplane.errors import Unavailable

__all__ = ["add_deployment", "add_etcd", "running_here"]


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """--deployment NAME."""
    parser.add_argument(
        "--deployment",
        default=os.environ.get("TOKENMILL_DEPLOYMENT", "default"),
        metavar="NAME",
        help="name of the deployment [default %(default)s, env TOKENMILL_DEPLOYMENT]",
    )


def add_etcd(parser: argparse.ArgumentParser) -> None:
    """--etcd HOST:PORT."""
    parser.add_argument(
        "--etcd",
        default=os.environ.get("TOKENMILL_ETCD"),
        metavar="HOST:PORT",
        help="ask this etcd [env TOKENMILL_ETCD]; without: that of the deployment on this machine",
    )


def running_here(deployment: str) -> DeploymentState:
    """The deployment of this name on this machine. Raises `Unavailable` when none runs."""
    state = running(deployment)
    if state is None:
        raise Unavailable(
            f"deployment {deployment!r} does not run on this machine; start `tokenmill up`, or say with "
            "--etcd HOST:PORT where it is registered"
        )
    return state
