"""What each transport does when the other end is another program, is missing, ends, or does not read."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox_server.agent import relay, wire
from sandbox_server.agent.server.tls_listener import make_context
from sandbox_server.backends.certificate import AgentCertificate, make_certificate
from sandbox_server.backends.process_pipe import ProcessPipe, open_process_pipe
from sandbox_server.link import AgentEndpoint, LinkLost, connect
from sandbox_server.link.transports.stdio import HIGH_WATER_BYTES, PipeTransport
from sandbox_server.link.transports.tls import host_and_port

TOKEN = "the token that nobody else may hear"
OURS = make_certificate("s-1")


class Listener(asyncio.Protocol):
    """Somebody who has taken an agent's port and keeps whatever is said to them. Answers with `answer`, if there is one."""

    def __init__(self) -> None:
        self.heard = b""
        self.answer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        if self.answer and self.transport is not None:
            self.transport.write(self.answer)


@asynccontextmanager
async def listening(make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Listen on a free port; its address."""
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=context)
    try:
        yield f"tls:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def context_of(made: AgentCertificate, folder: Path) -> ssl.SSLContext:
    return make_context(made.certificate, made.key, str(folder))


def tls(address: str) -> AgentEndpoint:
    return AgentEndpoint(address=address, token=TOKEN, certificate=OURS.certificate)


async def test_who_took_over_the_port_hears_no_token(tmp_path: Path) -> None:
    hostile = Listener()
    # The same name, the same validity, another key.
    async with listening(lambda: hostile, context_of(make_certificate("s-1"), tmp_path)) as address:
        with pytest.raises(LinkLost, match=r"does not have the certificate that was made for this sandbox.*no token was sent"):
            await connect(tls(address), 5)

    assert hostile.heard == b""


async def test_who_shows_a_certificate_that_ours_has_signed_is_not_the_agent(tmp_path: Path) -> None:
    """The pinned certificate is the only one, and no authority for others."""
    hostile = Listener()
    async with listening(lambda: hostile, _signed_by_ours(tmp_path)) as address:
        with pytest.raises(LinkLost, match="does not have the certificate"):
            await connect(tls(address), 5)

    assert hostile.heard == b""


def _signed_by_ours(folder: Path) -> ssl.SSLContext:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    ours = x509.load_pem_x509_certificate(OURS.certificate.encode())
    authority = serialization.load_pem_private_key(OURS.key.encode(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(ours.issuer, x509.Name([]), key.public_key(), 7, ours.not_valid_before_utc, ours.not_valid_after_utc)
    signed = builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    plain = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    return make_context(signed + OURS.certificate, plain, str(folder))


async def test_who_speaks_no_tls_hears_no_token() -> None:
    hostile = Listener()
    hostile.answer = wire.frame(wire.HELLO, 0, b'{"v":1}')
    async with listening(lambda: hostile) as address:
        with pytest.raises(LinkLost, match=r"does not speak TLS as an agent does.*no token was sent"):
            await connect(tls(address), 5)

    assert hostile.heard  # the first message of TLS
    assert TOKEN.encode() not in hostile.heard


async def test_who_accepts_and_says_nothing_is_not_waited_for() -> None:
    hostile = Listener()
    async with listening(lambda: hostile) as address:
        with pytest.raises(LinkLost, match=r"did not say hello within 0\.2 s"):
            await connect(tls(address), 0.2)

    assert TOKEN.encode() not in hostile.heard


async def test_nobody_on_the_port_is_said() -> None:
    async with listening(Listener) as address:
        pass

    with pytest.raises(LinkLost, match="nobody answers at tls:"):
        await connect(tls(address), 5)


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        (AgentEndpoint(address="tls:127.0.0.1:1"), "needs the certificate"),
        (AgentEndpoint(address="tls:127.0.0.1", certificate=OURS.certificate), "is not tls:HOST:PORT"),
        (AgentEndpoint(address="stdio:x"), "can start the agent's relay"),
        (AgentEndpoint(address="unix:"), "needs a path"),
        (AgentEndpoint(address="http://x"), "there is unix:, tls:, stdio:"),
        (AgentEndpoint(address="unix"), "there is unix:"),
    ],
)
async def test_an_endpoint_that_lacks_something_says_what(endpoint: AgentEndpoint, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        await connect(endpoint, 5)


def test_addresses_have_a_host_and_a_port() -> None:
    assert host_and_port("tls:127.0.0.1:80") == ("127.0.0.1", 80)
    assert host_and_port("tls:[::1]:443") == ("::1", 443)
    assert host_and_port("tls:node-7.example.org:20000") == ("node-7.example.org", 20000)


def test_what_is_printed_of_secrets_is_nothing() -> None:
    assert TOKEN not in repr(AgentEndpoint(address="unix:/x", token=TOKEN))
    assert "PRIVATE" not in repr(OURS)


# A relay's standard input and output.

AGENT_HELLO = wire.frame(wire.HELLO, 0, b'{"v":1,"boot":"b"}')


def program(*argv: str) -> tuple[AgentEndpoint, list[ProcessPipe]]:
    """An endpoint whose relay is this program, and the pipes that were opened to it."""
    opened: list[ProcessPipe] = []

    async def open_pipe() -> ProcessPipe:
        opened.append(await open_process_pipe(argv, {"PATH": os.environ["PATH"]}))
        return opened[-1]

    return AgentEndpoint(address="stdio:program", token=TOKEN, open_pipe=open_pipe), opened


def shell(script: str) -> tuple[AgentEndpoint, list[ProcessPipe]]:
    return program("/bin/sh", "-c", script)


def runs(pipe: ProcessPipe) -> bool:
    return Path(f"/proc/{pipe.pid}").exists()


async def test_a_relay_that_cannot_connect_is_quoted(tmp_path: Path) -> None:
    endpoint, (*_,) = program(sys.executable, "-I", "-S", relay.__file__, str(tmp_path / "none.sock"))

    with pytest.raises(LinkLost, match=r"relay ended with exit code 1: cannot connect to the agent at .*none\.sock: .*No such file"):
        await connect(endpoint, 20)


async def test_what_a_program_says_in_its_place_is_quoted_from_its_end() -> None:
    endpoint, _ = shell("head -c 300000 /dev/zero | tr '\\0' x >&2; echo 'no such container' >&2; exit 126")

    with pytest.raises(LinkLost, match=r"relay ended with exit code 126: x+no such container$") as caught:
        await connect(endpoint, 20)

    assert len(str(caught.value)) < 3000


async def test_a_relay_that_was_killed_is_said() -> None:
    endpoint, _ = shell("kill -9 $$")

    with pytest.raises(LinkLost, match="relay was ended by signal 9"):
        await connect(endpoint, 20)


async def test_a_program_that_cannot_be_started_is_said() -> None:
    endpoint, _ = program("/nowhere/docker", "exec")

    with pytest.raises(LinkLost, match=r"nobody answers at stdio:program:.*No such file"):
        await connect(endpoint, 20)


async def test_a_relay_that_says_nothing_is_ended() -> None:
    endpoint, opened = program("/bin/sleep", "1000")

    with pytest.raises(LinkLost, match="did not say hello"):
        await connect(endpoint, 0.3)

    assert not runs(opened[0])


async def test_a_relay_that_ignores_its_end_is_killed() -> None:
    hello = "".join(f"\\{byte:03o}" for byte in AGENT_HELLO)
    endpoint, opened = shell(f"trap '' TERM PIPE HUP; printf '{hello}'; while :; do /bin/sleep 1000; done")
    link = await connect(endpoint, 20)

    async with asyncio.timeout(10):
        await link.close()

    assert not runs(opened[0])


async def test_output_that_nobody_read_is_given_up_at_the_end() -> None:
    """Else descriptors of relays that were hung up on would stay."""
    before = len(os.listdir("/proc/self/fd"))

    async def open_and_close() -> None:
        opened = await open_process_pipe(["/bin/sh", "-c", "head -c 5000000 /dev/zero; exec /bin/sleep 1000"], {})
        assert await opened.read()
        await opened.end_program()
        assert not runs(opened)

    await asyncio.gather(*(open_and_close() for _ in range(3)))

    assert len(os.listdir("/proc/self/fd")) <= before + 3  # those of the loop's own watching of children


class MemoryPipe:
    """A pipe as an engine's API would give: `incoming` is what comes, `written` what arrived; writes wait until they may."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.written = b""
        self.may_write = asyncio.Event()
        self.is_closed = False
        self.said = ""

    async def read(self) -> bytes:
        came = await self.incoming.get()
        if isinstance(came, Exception):
            raise came
        return came

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.written += data

    async def wait_for_exit(self) -> str:
        return self.said

    async def end_program(self) -> None:
        self.is_closed = True


class Recorder(asyncio.Protocol):
    """What a transport tells its protocol."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.data = b""
        self.error: Exception | None = None
        self.news = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.news.set()

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")
        self.error = exc
        self.news.set()


async def until(happens: Callable[[], bool], protocol: Recorder) -> None:
    async with asyncio.timeout(10):
        while not happens():
            protocol.news.clear()
            await protocol.news.wait()


async def test_a_pipe_that_takes_nothing_pauses_the_writer_and_loses_nothing() -> None:
    pipe, protocol = MemoryPipe(), Recorder()
    transport = PipeTransport(pipe, protocol)
    blocks = [bytes([number]) * (64 << 10) for number in range(8)]
    for block in blocks:
        transport.write(block)
        await asyncio.sleep(0)

    assert protocol.told == ["pause"]
    assert transport.get_write_buffer_size() == 8 * (64 << 10) > HIGH_WATER_BYTES
    pipe.may_write.set()
    await until(lambda: "resume" in protocol.told, protocol)
    await until(lambda: transport.get_write_buffer_size() == 0 or bool(protocol.news.set()), protocol)

    assert pipe.written == b"".join(blocks)
    transport.abort()
    await until(lambda: "lost" in protocol.told, protocol)
    assert protocol.told == ["pause", "resume", "lost"]
    assert pipe.is_closed
    assert protocol.error is None


async def test_reading_can_be_paused() -> None:
    pipe, protocol = MemoryPipe(), Recorder()
    transport = PipeTransport(pipe, protocol)
    transport.pause_reading()
    for number in range(5):
        pipe.incoming.put_nowait(bytes([number]))
    await asyncio.sleep(0.01)

    assert protocol.data == b""
    assert pipe.incoming.qsize() == 4  # one was on its way
    transport.resume_reading()
    await until(lambda: len(protocol.data) == 5, protocol)
    transport.close()
    await until(lambda: "lost" in protocol.told, protocol)
    assert protocol.data == bytes(range(5))


@pytest.mark.parametrize(
    ("met", "said", "expected"),
    [
        (b"", "", None),
        (b"", "the container has ended", "the container has ended"),
        (ConnectionResetError("reset"), "", "reset"),
        (ConnectionResetError("reset"), "the container has ended", "the container has ended"),
        (KeyError("stream"), "", "KeyError: 'stream'"),
    ],
)
async def test_however_a_pipe_ends_the_protocol_hears_why(met: bytes | Exception, said: str, expected: str | None) -> None:
    pipe, protocol = MemoryPipe(), Recorder()
    pipe.said = said
    transport = PipeTransport(pipe, protocol)
    pipe.incoming.put_nowait(met)
    await until(lambda: "lost" in protocol.told, protocol)

    assert (None if protocol.error is None else str(protocol.error)) == expected
    assert pipe.is_closed
    assert transport.is_closing()


async def test_a_link_over_an_api_is_a_link() -> None:
    """All that an engine without commands has to bring is a pipe."""
    pipe = MemoryPipe()
    pipe.may_write.set()
    pipe.incoming.put_nowait(AGENT_HELLO)

    async def open_pipe() -> MemoryPipe:
        return pipe

    opener: Callable[[], Awaitable[MemoryPipe]] = open_pipe
    link = await connect(AgentEndpoint(address="stdio:api", token=TOKEN, open_pipe=opener), 5)

    assert link.hello == {"v": 1, "boot": "b"}
    await link.close()
    assert pipe.is_closed
    hello = wire.Connection(opens_odd=False).receive(pipe.written)[0]
    assert hello == wire.Hello({"v": wire.PROTOCOL_VERSION, "token": TOKEN})
