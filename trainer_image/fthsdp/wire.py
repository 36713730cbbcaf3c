"""How two processes of a job talk: frames, and the handshake that opens every connection.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON. Nothing from the network is unpickled or
evaluated. The handshake proves on both sides that the other one holds the job's key (HMAC-SHA256 over both nonces and
over the whole hello, compared in constant time), before anything else is read::

    client → server   hello:     protocol, job, purpose, nonce, and what the purpose needs
    server → client   challenge: nonce, proof          or   refused: reason
    client → server   answer:    proof
    server → client   accepted: true                   or   refused: reason

Where TLS is on, it comes first: the handshake runs inside, and its proofs cover the certificates of both sides too. A
hello of the wrong sort, with TLS or without it, is told so in words that the other side can read.

The state of a handshake is pure (``ClientHandshake``, ``ServerHandshake``); blocking and asyncio connections are thin
shells around it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fthsdp.errors import ConnectionLost, Refused, WireError
from fthsdp.tls import NEEDS_NO_TLS, NEEDS_TLS, Tls, TlsSocket, binding_of, explained

__all__ = [
    "PROTOCOL",
    "ClientHandshake",
    "Json",
    "ServerHandshake",
    "accept_async",
    "accept_blocking",
    "decode_body",
    "decode_common",
    "encode_frame",
    "frame_text",
    "greet_blocking",
    "hold_back",
    "open_async",
    "open_blocking",
    "parse_address",
    "read_frame",
    "receive_body",
    "receive_frame",
    "send_encoded",
    "send_frame",
]

PROTOCOL = 2
"""Version of everything on the wire. Both sides must have the same."""
LARGEST_FRAME = 16 << 20
"""Bytes. An epoch record of 20 replicas with 8,192 addresses each is about 4 MB."""
LARGEST_HELLO = 64 << 10
"""Bytes that somebody without the key can make us hold."""
_COMMON = 1 << 10
"""Bytes of a message that many may say."""
_LENGTH = struct.Struct("!I")
_TLS_RECORD = b"\x16\x03"
"""How a TLS hello begins. A frame of that length is larger than any may be."""
_PLAIN = b"\0"
"""How every plain hello begins."""

Json = dict[str, Any]
"""A decoded frame."""


def encode_frame(message: Json) -> bytes:
    """Return the bytes of one frame; raises WireError when it is larger than the protocol allows."""
    return frame_text(json.dumps(message, separators=(",", ":")))


def frame_text(text: str) -> bytes:
    """Do the same for a message that is JSON text already."""
    body = text.encode()
    if len(body) > LARGEST_FRAME:
        raise WireError(f"a message of {len(body)} bytes is larger than a frame may be ({LARGEST_FRAME})")
    return _LENGTH.pack(len(body)) + body


def decode_body(body: bytes) -> Json:
    """Return the message in a frame's body; raises WireError."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame holds no JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame holds a {type(message).__name__}, not an object")
    return message


@lru_cache(maxsize=64)
def _remembered(body: bytes) -> Json:
    return decode_body(body)


def decode_common(body: bytes) -> Json:
    """Do the same for what thousands of ranks say alike at the same moment; nobody may change what is returned."""
    return _remembered(body) if len(body) <= _COMMON else decode_body(body)


def _checked_length(header: bytes, largest: int) -> int:
    if header.startswith(_TLS_RECORD):
        raise Refused(NEEDS_NO_TLS)
    (length,) = _LENGTH.unpack(header)
    if length > largest:
        raise WireError(f"a frame of {length} bytes was announced; at most {largest} are allowed here")
    return int(length)


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` (an IPv6 host in brackets); raises WireError."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise WireError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


# --- the handshake itself -------------------------------------------------------------------------------------------


def _proof(key: bytes, side: str, hello: Json, server_nonce: str, binding: str) -> str:
    text = json.dumps([side, hello, server_nonce, binding], sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _same(proof: object, expected: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="replace"), expected.encode())


class ClientHandshake:
    """The side that dials. ``details`` tells the server what the purpose needs; they are covered by the proof.

    So is ``binding``, which both sides know of the connection beneath; empty without TLS.
    """

    def __init__(self, key: bytes, *, job: str, purpose: str, details: Json | None = None, binding: str = "") -> None:
        self._key = key
        self._binding = binding
        self.hello: Json = {
            **(details or {}),
            "protocol": PROTOCOL,
            "job": job,
            "purpose": purpose,
            "nonce": secrets.token_hex(16),
        }

    def answer(self, challenge: Json) -> Json:
        """Check the server's proof and return ours; raises Refused."""
        _raise_if_refused(challenge)
        nonce = challenge.get("nonce")
        if not isinstance(nonce, str) or not _same(
            challenge.get("proof"), _proof(self._key, "server", self.hello, nonce, self._binding)
        ):
            raise Refused("the server does not hold this job's key")
        return {"proof": _proof(self._key, "client", self.hello, nonce, self._binding)}

    def finish(self, accepted: Json) -> None:
        """Raise Refused unless the server accepted."""
        _raise_if_refused(accepted)
        if accepted.get("accepted") is not True:
            raise WireError(f"a handshake ended with {accepted!r}")


class ServerHandshake:
    """The side that is dialled. ``judge`` gets the proven hello and raises Refused to turn it away."""

    def __init__(
        self, key: bytes, *, job: str, judge: Callable[[Json], None] = lambda hello: None, binding: str = ""
    ) -> None:
        self._key = key
        self._binding = binding
        self._job = job
        self._judge = judge
        self._nonce = secrets.token_hex(16)
        self.hello: Json = {}

    def challenge(self, hello: Json) -> Json:
        """Check what needs no key and return the challenge; raises Refused."""
        if hello.get("protocol") != PROTOCOL:
            theirs = hello.get("protocol")
            raise Refused(f"protocol version {theirs!r} is not {PROTOCOL}: use the same fthsdp everywhere")
        if hello.get("job") != self._job:
            raise Refused(f"this is job {self._job!r}, not {hello.get('job')!r}")
        self.hello = hello
        return {"nonce": self._nonce, "proof": _proof(self._key, "server", hello, self._nonce, self._binding)}

    def accept(self, answer: Json) -> Json:
        """Check the client's proof, ask the judge, and return the acceptance; raises Refused."""
        if not _same(answer.get("proof"), _proof(self._key, "client", self.hello, self._nonce, self._binding)):
            raise Refused("wrong job key")
        self._judge(self.hello)
        return {"accepted": True}


def _raise_if_refused(message: Json) -> None:
    if "refused" in message:
        raise Refused(str(message["refused"])[:500])


# --- blocking sockets -----------------------------------------------------------------------------------------------


def send_frame(sock: socket.socket, message: Json) -> None:
    """Send one frame on a blocking socket; raises ConnectionLost."""
    send_encoded(sock, encode_frame(message))


def send_encoded(sock: socket.socket, frame: bytes) -> None:
    """Do the same for a frame that is encoded already."""
    try:
        sock.sendall(frame)
    except OSError as error:
        raise _lost(sock, "sending", error) from error


def _lost(sock: socket.socket, doing: str, error: OSError) -> WireError:
    """Say what failed; where TLS is on, the other side may have ended it with a reason."""
    return explained(error, sock.peer) if isinstance(sock, TlsSocket) else ConnectionLost(f"{doing} failed: {error}")


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            got = sock.recv_into(view[done:])
        except OSError as error:
            raise _lost(sock, "receiving", error) from error
        if not got:
            raise ConnectionLost("the peer closed the connection")
        done += got
    return bytes(data)


def receive_frame(sock: socket.socket, *, largest: int = LARGEST_FRAME) -> Json:
    """Receive one frame from a blocking socket; raises ConnectionLost, WireError."""
    return decode_body(receive_body(sock, largest=largest))


def receive_body(sock: socket.socket, *, largest: int = LARGEST_FRAME) -> bytes:
    """Receive one frame and leave it to ``decode_body``; raises ConnectionLost, WireError."""
    return _receive_exactly(sock, _checked_length(_receive_exactly(sock, _LENGTH.size), largest))


def open_blocking(
    address: str,
    key: bytes,
    *,
    job: str,
    purpose: str,
    details: Json | None = None,
    timeout: float,
    tls: Tls | None = None,
) -> socket.socket:
    """Dial ``address`` and shake hands within ``timeout`` seconds; the socket comes back without a timeout.

    Raises ConnectionLost (nobody there, or silent) or Refused.
    """
    try:
        sock = socket.create_connection(parse_address(address), timeout=timeout)
    except OSError as error:
        raise ConnectionLost(f"{address}: {error}") from error
    sock = sock if tls is None else TlsSocket(sock, tls, server_side=False)
    try:
        greet_blocking(sock, key, job=job, purpose=purpose, details=details)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def greet_blocking(sock: socket.socket, key: bytes, *, job: str, purpose: str, details: Json | None = None) -> None:
    """Shake hands on a connection that we dialled; raises ConnectionLost, Refused, WireError. The caller closes it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    binding = sock.begin() if isinstance(sock, TlsSocket) else ""
    handshake = ClientHandshake(key, job=job, purpose=purpose, details=details, binding=binding)
    send_frame(sock, handshake.hello)
    send_frame(sock, handshake.answer(receive_frame(sock, largest=LARGEST_HELLO)))
    handshake.finish(receive_frame(sock, largest=LARGEST_HELLO))


def accept_blocking(
    sock: socket.socket,
    key: bytes,
    *,
    job: str,
    judge: Callable[[Json], None] = lambda hello: None,
    timeout: float,
) -> Json:
    """Shake hands on an accepted connection and return the proven hello; raises Refused, ConnectionLost, WireError.

    Whoever is refused is told why before this raises. The caller closes the socket.
    """
    sock.settimeout(timeout)
    binding = _begin_accepted(sock) if isinstance(sock, TlsSocket) else ""
    handshake = ServerHandshake(key, job=job, judge=judge, binding=binding)
    try:
        send_frame(sock, handshake.challenge(receive_frame(sock, largest=LARGEST_HELLO)))
        send_frame(sock, handshake.accept(receive_frame(sock, largest=LARGEST_HELLO)))
    except Refused as refusal:
        send_frame(sock, {"refused": str(refusal)})
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    return handshake.hello


def _begin_accepted(sock: TlsSocket) -> str:
    """Begin TLS, unless the hello comes without it: whoever says it could not read a TLS answer."""
    try:
        if sock.turn_plain_away(_PLAIN, encode_frame({"refused": NEEDS_TLS})):
            raise Refused(NEEDS_TLS)
    except OSError as error:
        raise ConnectionLost(f"{sock.peer}: {error}") from error
    return sock.begin()


# --- asyncio --------------------------------------------------------------------------------------------------------


async def read_frame(reader: asyncio.StreamReader, *, largest: int = LARGEST_FRAME) -> Json:
    """Read one frame from an asyncio stream; raises ConnectionLost, WireError."""
    try:
        length = _checked_length(await reader.readexactly(_LENGTH.size), largest)
        return decode_body(await reader.readexactly(length))
    except ssl.SSLError as error:
        raise explained(error, "the peer") from error
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ConnectionLost("the peer closed the connection") from error


async def open_async(
    address: str, key: bytes, *, job: str, purpose: str, timeout: float, tls: Tls | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Dial ``address`` and shake hands within ``timeout`` seconds; raises ConnectionLost or Refused."""
    try:
        async with asyncio.timeout(timeout):
            certificates = None if tls is None else tls.certificates()
            context = None if certificates is None else certificates.client
            reader, writer = await asyncio.open_connection(*parse_address(address), ssl=context)
            try:
                binding = "" if certificates is None else binding_of(client=certificates.own, server=_shown(writer))
                handshake = ClientHandshake(key, job=job, purpose=purpose, binding=binding)
                writer.write(encode_frame(handshake.hello))
                writer.write(encode_frame(handshake.answer(await read_frame(reader, largest=LARGEST_HELLO))))
                handshake.finish(await read_frame(reader, largest=LARGEST_HELLO))
            except BaseException:
                writer.close()
                raise
    except ssl.SSLError as error:
        raise explained(error, address) from error
    except (OSError, TimeoutError) as error:
        raise ConnectionLost(f"{address}: {error or 'no answer'}") from error
    return reader, writer


def _shown(writer: asyncio.StreamWriter) -> bytes:
    """Return the certificate that the other side has shown, in DER."""
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(certificate, bytes)
    return certificate


def hold_back(writer: asyncio.StreamWriter) -> None:
    """Have nothing read of a new connection until it is accepted."""
    _transport(writer).pause_reading()


def _transport(writer: asyncio.StreamWriter) -> asyncio.Transport:
    assert isinstance(writer.transport, asyncio.Transport)
    return writer.transport


async def accept_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: bytes,
    *,
    job: str,
    judge: Callable[[Json], None] = lambda hello: None,
    timeout: float,
    tls: Tls | None = None,
) -> Json:
    """Shake hands on an accepted connection and return the proven hello; raises Refused, ConnectionLost, WireError.

    With ``tls`` nothing may have been read yet: ``hold_back`` in the callback that gets the connection sees to it.
    """
    try:
        async with asyncio.timeout(timeout):
            binding = "" if tls is None else await _begin_async(reader, writer, tls)
            handshake = ServerHandshake(key, job=job, judge=judge, binding=binding)
            writer.write(encode_frame(handshake.challenge(await read_frame(reader, largest=LARGEST_HELLO))))
            writer.write(encode_frame(handshake.accept(await read_frame(reader, largest=LARGEST_HELLO))))
            await writer.drain()
    except Refused as refusal:
        writer.write(encode_frame({"refused": str(refusal)}))
        raise
    except ssl.SSLError as error:
        raise explained(error, _peer(writer)) from error
    except (OSError, TimeoutError) as error:
        raise ConnectionLost(f"a handshake was not finished within {timeout} s") from error
    return handshake.hello


async def _begin_async(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: Tls) -> str:
    """Begin TLS, unless the hello comes without it: whoever says it could not read a TLS answer."""
    if await _first_byte(writer) == _PLAIN:
        _transport(writer).resume_reading()
        await reader.read(LARGEST_HELLO)
        raise Refused(NEEDS_TLS)
    certificates = tls.certificates()
    await writer.start_tls(certificates.server)
    return binding_of(client=_shown(writer), server=certificates.own)


async def _first_byte(writer: asyncio.StreamWriter) -> bytes:
    """Wait for the first byte of a connection whose transport is paused, and leave it there."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    with writer.get_extra_info("socket").dup() as sock:
        loop.add_reader(sock, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(sock)
        return bytes(sock.recv(1, socket.MSG_PEEK))


def _peer(writer: asyncio.StreamWriter) -> str:
    peername = writer.get_extra_info("peername")
    return f"{peername[0]}:{peername[1]}" if peername else "a peer that is gone"
