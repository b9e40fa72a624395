"""`tls:HOST:PORT`: TCP with TLS. Nothing is sent to a server that does not present the certificate that was made for the agent's sandbox."""

from __future__ import annotations

import asyncio
import ssl

from sandbox_server.link.endpoint import AgentEndpoint
from sandbox_server.link.errors import LinkLost


async def open_tls(protocol: asyncio.Protocol, endpoint: AgentEndpoint) -> None:
    """Connect the protocol to the agent's port and check the certificate.

    Raises:
        OSError: nothing listens there.
        LinkLost: the server there is not the agent: another program may have taken its port.
        ValueError: the endpoint has no certificate, or its address is not of this form.
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
    presented = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if presented != ssl.PEM_cert_to_DER_cert(endpoint.certificate):
        transport.abort()
        raise LinkLost(_not_the_agent(endpoint))


def _not_the_agent(endpoint: AgentEndpoint) -> str:
    return f"what answers at {endpoint.address} does not have the certificate that was made for this sandbox; no token was sent to it"


def host_and_port(address: str) -> tuple[str, int]:
    """Split `tls:HOST:PORT`. An IPv6 address is in brackets.

    Raises:
        ValueError: the address is not of this form.
    """
    host, _, port = address.partition(":")[2].rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"{address!r} is not tls:HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def pinning_context(certificate: str) -> ssl.SSLContext:
    """A TLS context that accepts only this certificate, whatever the host name. The certificate is in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    return context
