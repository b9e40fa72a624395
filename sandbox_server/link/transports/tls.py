"""`tls:HOST:PORT`: TCP with TLS. The agent shows the one certificate that was made for its sandbox, or nothing is said to whoever answers."""

from __future__ import annotations

import asyncio
import ssl

from sandbox_server.link.endpoint import Endpoint
from sandbox_server.link.errors import LinkLost


async def open_tls(protocol: asyncio.Protocol, endpoint: Endpoint) -> None:
    """Connect the protocol to the agent's port and see that it is the agent's certificate that was shown.

    Raises:
        OSError: nobody listens there.
        LinkLost: whoever listens there is not the agent: another program may have taken its port.
    """
    if endpoint.certificate is None:
        raise ValueError(f"{endpoint.address} needs the certificate that the agent shows")
    host, port = host_and_port(endpoint.address)
    context = pinning_context(endpoint.certificate)
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, host, port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        raise LinkLost(f"{_not_the_agent(endpoint)} ({error.verify_message})") from error
    except ssl.SSLError as error:
        raise LinkLost(f"what answers at {endpoint.address} does not speak TLS as an agent does: {error}; no token was sent to it") from error
    shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if shown != ssl.PEM_cert_to_DER_cert(endpoint.certificate):
        transport.abort()
        raise LinkLost(_not_the_agent(endpoint))


def _not_the_agent(endpoint: Endpoint) -> str:
    return f"what answers at {endpoint.address} does not have the certificate that was made for this sandbox; no token was sent to it"


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `tls:HOST:PORT`; an IPv6 address is in brackets.

    Raises:
        ValueError: it is no such address.
    """
    host, _, port = address.partition(":")[2].rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"{address!r} is not tls:HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def pinning_context(certificate: str) -> ssl.SSLContext:
    """What lets this one certificate pass, whatever the name or address of the machine that shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    return context
