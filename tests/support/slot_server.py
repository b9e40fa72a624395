"""A server for slots: HTTP and WebSocket on a port of 127.0.0.1 (or ::1), written with the standard library alone. Some of its answers are hostile.

Started as `python3 slot_server.py PORT [ADDRESS]`. It writes `up` to its standard output once it listens.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
import sys

WEBSOCKET_KEY_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BLOCK = bytes(64 << 10)
HEAD = b"HTTP/1.1 200 OK\r\n"
HOSTILE = {
    "not-http": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "nothing": b"",
    "half": HEAD + b"Content-Length: 100\r\n\r\nhalf of it",
    "bad-chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "two-lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "line-fold": HEAD + b"X-A: b\r\n c: d\r\nContent-Length: 2\r\n\r\nok",
    "bad-name": HEAD + b"X A: b\r\nContent-Length: 2\r\n\r\nok",
    "bare-cr": HEAD + b"X-A: b\rSet-Cookie: c=d\r\nContent-Length: 2\r\n\r\nok",
    "giant-header": HEAD + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "many-headers": HEAD + b"X-A: b\r\n" * 100_000 + b"\r\n",
    "interim-flood": b"HTTP/1.1 103 Early Hints\r\nX-A: b\r\n\r\n" * 1000 + HEAD + b"Content-Length: 2\r\n\r\nok",
    "upgraded": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nanything",
    "odd-status": b"HTTP/1.1 777 Lucky\r\nContent-Length: 2\r\n\r\nok",
    "second-answer": HEAD + b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond",
    "headers": HEAD + b"Content-Type: text/html\r\nSet-Cookie: a=b\r\nService-Worker-Allowed: /\r\nClear-Site-Data: *\r\nAlt-Svc: h3\r\nRefresh: 0; /v1\r\n"
    b"Content-Security-Policy: default-src *\r\nAccess-Control-Allow-Origin: *\r\nX-Accel-Redirect: /etc/passwd\r\nX-Own: kept\r\n"
    b"Connection: close, X-Hop\r\nX-Hop: dropped\r\n"
    b"Link: </v1/leases>; rel=preload\r\nContent-Location: /v1/leases\r\nCache-Control: public\r\nWWW-Authenticate: Basic\r\nContent-Length: 2\r\n\r\nok",
    "redirect": b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /v1/release\r\nContent-Length: 0\r\n\r\n",
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nok",
    "until-end": HEAD + b"\r\nok",
    "splinters": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n",
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Trailer: t\r\n\r\n",
    "chunked-and-length": HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "not-modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\nETag: x\r\n\r\n",
}


REFUSES = ("not-http", "nothing")
"""What a WebSocket handshake is answered with as any other request is."""


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, path, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ")
    headers = {name.lower(): value for name, value in (line.decode("latin-1").split(": ", 1) for line in head.split(b"\r\n")[1:] if line)}
    name = path.split("?")[0].rsplit("/", 1)[-1]
    if headers.get("upgrade") == "websocket" and name not in ("plain", "silent", *REFUSES):
        await serve_websocket(reader, writer, headers, name)
    elif name in HOSTILE:
        writer.write(HOSTILE[name])
    elif name == "events":
        await send_events(writer)
    elif name == "endless":
        await send_without_end(writer)
    elif name == "silent":
        open("asked", "w").close()
        await reader.read()
        open("hung-up", "w").close()
    elif name == "deaf":
        await asyncio.Event().wait()
    elif name == "refusing":
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
    else:
        await echo(reader, writer, head, method, headers)
    await writer.drain()
    writer.close()


async def send_without_end(writer: asyncio.StreamWriter) -> None:
    """Send blocks until the connection ends. The file `sent` says how many, and `hung-up` appears at the end."""
    writer.write(HEAD + b"\r\n")
    count = 0
    try:
        while True:
            writer.write(BLOCK)
            await writer.drain()
            count += 1
            with open("sent", "w") as file:
                file.write(str(count))
    finally:
        open("hung-up", "w").close()


async def send_events(writer: asyncio.StreamWriter) -> None:
    """Send one event, and another one once the file `go` exists."""
    writer.write(HEAD + b"Content-Type: text/event-stream\r\n\r\ndata: first\n\n")
    await writer.drain()
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)
    writer.write(b"data: second\n\n")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, method: str, headers: dict[str, str]) -> None:
    """Answer with the head of the request, then with its body, each part as soon as it is there."""
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    if method == "HEAD":
        return
    writer.write(b"%x\r\n%s\r\n" % (len(head), head))
    await writer.drain()
    left = int(headers.get("content-length", "0"))
    is_chunked = headers.get("transfer-encoding") == "chunked"
    while is_chunked or left:
        if is_chunked:
            size = int(await reader.readline(), 16)
            part = (await reader.readexactly(size + 2))[:-2]
            if not size:
                break
        else:
            part = await reader.read(min(left, 64 << 10))
            left -= len(part)
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def serve_websocket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str], name: str) -> None:
    """Accept a WebSocket, and do what the last part of the path says: `echo`, `close`, `vanish`, `ping`, `large`, `masked`."""
    accept = base64.b64encode(hashlib.sha1(headers["sec-websocket-key"].encode() + WEBSOCKET_KEY_SUFFIX).digest())
    chosen = headers.get("sec-websocket-protocol", "").split(",")[0].strip().encode()
    subprotocol = b"Sec-WebSocket-Protocol: %s\r\n" % chosen if chosen else b""
    lines = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    writer.write(lines + b"Sec-WebSocket-Accept: %s\r\nSet-Cookie: a=b\r\n%s\r\n" % (accept, subprotocol))
    if name == "close":
        writer.write(frame(8, struct.pack(">H", 4001) + b"bye"))
    elif name == "ping":
        writer.write(frame(9, b"there?"))
        writer.write(frame(1, ascii(await read_frame(reader)).encode()))
    elif name == "large":
        writer.write(frame(2, bytes(5 << 20)))
    elif name == "splinters":
        writer.write(frame(2, b"", is_last=False) + frame(0, b"", is_last=False) * 100_000 + frame(0, b"whole"))
        await read_frame(reader)
    elif name == "head":
        writer.write(frame(1, ascii(headers).encode()))
    elif name != "vanish":
        await echo_messages(reader, writer)
    await writer.drain()
    if name in ("ping", "head"):
        await read_frame(reader)


async def echo_messages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send each message back in two fragments, until the client closes; then write the code of the close into the file `closed`."""
    while True:
        opcode, payload = await read_frame(reader)
        if opcode == 8:
            with open("closed", "w") as file:
                file.write(str(struct.unpack(">H", payload[:2])[0]) + payload[2:].decode() if payload else "without a code")
            return
        writer.write(frame(opcode, payload[:1], is_last=False) + frame(0, payload[1:]))
        await writer.drain()


def frame(opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
    """One frame of a server."""
    size = len(payload)
    if size < 126:
        length = bytes([size])
    elif size < 1 << 16:
        length = b"\x7e" + struct.pack(">H", size)
    else:
        length = b"\x7f" + struct.pack(">Q", size)
    return bytes([opcode | (0x80 if is_last else 0)]) + length + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one frame of a client: its opcode and payload."""
    opcode, size = await reader.readexactly(2)
    size &= 0x7F
    if size == 126:
        (size,) = struct.unpack(">H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack(">Q", await reader.readexactly(8))
    mask = int.from_bytes((await reader.readexactly(4)) * (size // 4 + 1), "big") >> 8 * (4 - size % 4)
    payload = int.from_bytes(await reader.readexactly(size), "big") ^ mask
    return opcode & 15, payload.to_bytes(size, "big")


async def main() -> None:
    """Listen until the process is ended."""
    address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    server = await asyncio.start_server(serve, address, int(sys.argv[1]))
    print("up", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
