"""Limits the size of a model server's responses where atroposlib asks it with the client of openai, which reads a response whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: The longest response of a model server that is read, in bytes.
MAX_RESPONSE_BYTES = 64 << 20


class ResponseTooLong(Exception):
    """The response of the model server is longer than `MAX_RESPONSE_BYTES`. The client repeats the request, as after a lost connection."""


def bound_answers(servers: Iterable[Any], max_bytes: int = MAX_RESPONSE_BYTES) -> None:
    """Make the servers of atroposlib that use the client of openai refuse longer responses.

    Args:
        servers: the servers. Those of vLLM and SGLang, which use no such client, stay as they are.
        max_bytes: the longest response, in bytes.
    """
    for server in servers:
        client = getattr(server, "openai", None)
        if client is not None:
            server.openai = client.with_options(http_client=_make_bounded_client(max_bytes))


def _make_bounded_client(max_bytes: int) -> Any:
    """Return an HTTP client for openai that reads no more than some bytes of a response."""
    from openai import DefaultAsyncHttpxClient  # a dependency of atroposlib alone; which HTTP library it uses depends on its version

    class BoundedClient(DefaultAsyncHttpxClient):
        """The HTTP client of openai with a limit for responses."""

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            """Send a request, and read its response.

            Raises:
                ResponseTooLong: it is too long.
            """
            response = await super().send(request, stream=True, **options)
            if stream:
                return response
            content = bytearray()
            try:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > max_bytes:
                        raise ResponseTooLong(f"the response of the model server is longer than {max_bytes} bytes")
            finally:
                await response.aclose()
            headers = [(name, value) for name, value in response.headers.items() if name.lower() not in ("content-encoding", "transfer-encoding")]
            return type(response)(response.status_code, headers=headers, content=bytes(content), request=request)

    return BoundedClient()
