from __future__ import annotations

import pytest

from transfer import NoSuchInterface, digest, ucx_environment
from transfer.ucx import interface_of


def test_loopback_by_any_name_is_its_interface() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(NoSuchInterface, match=r"203\.0\.113\.9"):
        interface_of("203.0.113.9")


def test_what_the_operator_set_stays() -> None:
    added = ucx_environment("203.0.113.9", {"UCX_NET_DEVICES": "mlx5_0:1"})
    assert "UCX_NET_DEVICES" not in added


def test_a_digest_is_of_the_bytes() -> None:
    assert digest(b"a") == digest(memoryview(b"a"))
    assert digest(b"a") != digest(b"b")
    assert len(digest(b"")) == 16
