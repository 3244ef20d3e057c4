from __future__ import annotations

from collections.abc import Mapping

import pytest

from controlplane.errors import InvalidRequest
from services.frontend.routing import Routing, key_tenant, read_routing


def read(headers: Mapping[str, str], tenant: str = "") -> Routing:
    return read_routing(lambda name: headers.get(name, ""), tenant)


def test_without_headers_a_request_may_run_anywhere() -> None:
    assert read({}) == Routing()
    assert Routing().allows("d-1", {})
    assert Routing().session_id == ""


def test_every_header_is_read() -> None:
    routing = read(
        {
            "x-tokenmill-priority": " -3 ",
            "x-tokenmill-tenant": "team-a",
            "x-tokenmill-session": "chat/17",
            "x-tokenmill-session-hard": "True",
            "x-tokenmill-worker": "d-1",
            "x-tokenmill-labels": "zone=eu, gpu=h200",
        }
    )
    assert routing == Routing(-3, "team-a", "chat/17", True, "d-1", {"zone": "eu", "gpu": "h200"})
    assert routing.allows("d-1", {"zone": "eu", "gpu": "h200", "rack": "3"})
    assert not routing.allows("d-2", {"zone": "eu", "gpu": "h200"})
    assert not routing.allows("d-1", {"zone": "eu"})


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"x-tokenmill-priority": "high"}, 'x-tokenmill-priority is "high", and it must be a whole number'),
        ({"x-tokenmill-priority": "99999999999"}, "must be a whole number between"),
        ({"x-tokenmill-tenant": "a b"}, 'x-tokenmill-tenant is "a b", and it may have'),
        ({"x-tokenmill-session": "x" * 129}, "x-tokenmill-session is "),
        ({"x-tokenmill-session": "s", "x-tokenmill-session-hard": "yes"}, "must be true or false"),
        ({"x-tokenmill-session-hard": "true"}, "without a session; name it with x-tokenmill-session"),
        ({"x-tokenmill-labels": "zone"}, "must be name=value pairs"),
        ({"x-tokenmill-labels": "zone=eu,zone=us"}, "must be name=value pairs"),
        ({"x-tokenmill-worker": "<script>"}, "x-tokenmill-worker is "),
    ],
)
def test_a_wrong_header_is_refused_by_name(headers: Mapping[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        read(headers)
    assert refused.value.param in headers


def test_where_keys_are_asked_for_the_key_is_the_tenant() -> None:
    tenant = key_tenant(b"sk-secret")
    assert "secret" not in tenant
    assert tenant == key_tenant(b"sk-secret") != key_tenant(b"sk-other")
    assert read({}, tenant).tenant == tenant
    with pytest.raises(InvalidRequest, match="here the API key is the tenant"):
        read({"x-tokenmill-tenant": "another"}, tenant)


def test_tenants_share_no_session() -> None:
    one, other = Routing(tenant="a", session="chat"), Routing(tenant="b", session="chat")
    assert one.session_id == Routing(tenant="a", session="chat").session_id != other.session_id
    assert "chat" not in one.session_id


def test_a_priority_may_stand_in_the_body_or_in_the_header() -> None:
    assert read({}).with_priority(5) == Routing(priority=5)
    named = read({"x-tokenmill-priority": "5"})
    assert named.with_priority(None) == named.with_priority(5) == named
    with pytest.raises(InvalidRequest, match="priority is 7, but the header x-tokenmill-priority says 5"):
        named.with_priority(7)
