"""The Supervisor service over its Unix socket."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import pytest

from controlplane.child_process import ChildSpec
from controlplane.errors import NotFound
from controlplane.grpc_errors import from_rpc_error
from controlplane.supervisor import Supervisor
from controlplane.supervisor_service import supervisor_called, supervisor_served
from tokenmill.supervisor.v1 import supervisor_pb2


@pytest.mark.parametrize("depth", [1, 12], ids=["near", "deeper than a socket's path may be long"])
async def test_children_are_listed_and_restarted_by_whoever_may_enter_the_folder(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["a-folder-in-a-folder"] * depth)
    folder.mkdir(parents=True)
    up = folder / "up"
    code = f"import time; open({str(up)!r}, 'a').write('x'); time.sleep(60)"
    spec = ChildSpec("etcd", (sys.executable, "-IS", "-c", code), answers=up.exists)
    supervisor = Supervisor([spec], folder, lambda name, text: None, drain_timeout_s=10)
    async with (
        asyncio.timeout(60),
        supervisor,
        supervisor_served(supervisor, folder),
        supervisor_called(folder) as calls,
    ):
        await supervisor.until_ready("etcd")
        (child,) = (await calls.List(supervisor_pb2.ListRequest())).children
        assert (child.name, child.state, child.instance_id) == ("etcd", supervisor_pb2.CHILD_STATE_RUNNING, "")
        again = (await calls.Restart(supervisor_pb2.RestartRequest(name="etcd"))).child
        assert again.pid not in (0, child.pid)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.Restart(supervisor_pb2.RestartRequest(name="etc"))
        assert isinstance(from_rpc_error(refused.value), NotFound)
        assert "'etcd'" in str(refused.value.details())
