import socket

import pytest

from cli.up.ports import FrontendPorts
from controlplane.errors import Unavailable


def test_clients_may_come_before_anybody_accepts_them() -> None:
    with FrontendPorts("127.0.0.1", http=0, grpc=0, metrics=0) as ports:
        with socket.create_connection(("127.0.0.1", ports.http), timeout=10):
            pass
        assert len(ports.sockets) == 1


def test_the_grpc_port_is_kept_from_strangers_and_shared_among_those_who_say_so() -> None:
    with FrontendPorts("127.0.0.1", http=0, grpc=0, metrics=0) as ports:
        address = ("127.0.0.1", ports.grpc)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        with socket.socket() as one, socket.socket() as other:
            for frontend in (one, other):
                frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                frontend.bind(address)
                frontend.listen()
        with pytest.raises(ConnectionRefusedError):  # who only keeps the port takes no client away
            socket.create_connection(address, timeout=10)


@pytest.mark.parametrize("flag", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_named_with_the_flag_that_changes_it(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = {"http": 0, "grpc": 0, "metrics": 0} | {flag: port}
        name = "--port" if flag == "http" else f"--{flag}-port"
        with pytest.raises(Unavailable, match=f"port {port} .* {name} PORT"):
            FrontendPorts("127.0.0.1", **wanted)
