"""The address of a program in a slot, as both clients give it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from env_client import AsyncSandboxClient, InvalidRequest, PortAddress, SandboxClient
from env_client.leases import AsyncLease, Lease
from env_client.messages.ports import port_address
from env_client.values import LeaseInfo

URL = "https://pool.example/base"
NO_REQUESTS = httpx.MockTransport(lambda request: pytest.fail(f"{request.url} was requested"))
INFO = LeaseInfo(lease_id="l-1", pool="default", sandbox_id="s", slot_id="s/0", workspace="/workspace", expires_at=1.0)
ADDRESS = PortAddress(port=8000, url=f"{URL}/v1/leases/l-1/ports/8000/", headers={"Authorization": "Bearer secret"})


async def test_both_clients_and_both_leases_give_the_same_address_without_a_request() -> None:
    client, async_client = SandboxClient(URL, "secret", transport=NO_REQUESTS), AsyncSandboxClient(URL, "secret", transport=NO_REQUESTS)

    assert client.port("l-1", 8000) == async_client.port("l-1", 8000) == ADDRESS
    assert Lease(client, INFO).port(8000) == AsyncLease(async_client, INFO).port(8000) == ADDRESS
    assert ADDRESS.ws_url == "wss://pool.example/base/v1/leases/l-1/ports/8000/"
    assert "secret" not in repr(ADDRESS)
    client.close()
    await async_client.aclose()


def test_a_service_without_tokens_needs_no_headers() -> None:
    address = port_address("http://127.0.0.1:8700", None, "l/1", 80)

    assert (address.url, address.ws_url, address.headers) == (
        "http://127.0.0.1:8700/v1/leases/l%2F1/ports/80/", "ws://127.0.0.1:8700/v1/leases/l%2F1/ports/80/", {},
    )  # fmt: skip


@pytest.mark.parametrize("port", [0, 65536, "80", True, None])
def test_what_is_no_port_is_refused(port: Any) -> None:
    with pytest.raises(InvalidRequest, match="port"):
        port_address("http://127.0.0.1:8700", None, "l-1", port)
