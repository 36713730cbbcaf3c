"""TLS beneath the handshake of every connection, for jobs that ask for it.

``FTHSDP_TLS_DIR`` names a folder with ``tls.crt``, ``tls.key`` and ``ca.crt``: what a Secret of the type
kubernetes.io/tls holds that cert-manager fills. Both sides of a connection show their certificate and verify the
other's against ``ca.crt``; only TLS 1.3 is spoken. Host names are not compared, because pods change theirs with each
attempt: who the other side is, the handshake with the job's key says, which runs inside and is bound to both
certificates. A process of another job with a certificate of the same authority can therefore not pass it on.

The files are read for every new connection, so a renewed Secret needs no restart; connections that are open stay.

The end of a connection is the end of the TCP connection. Everything that travels says its length beforehand, so one
that was cut is noticed without TLS's own goodbye.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fthsdp.environment import TLS_DIR
from fthsdp.errors import ConfigError, ConnectionLost, Refused, Untrusted, WireError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["NEEDS_NO_TLS", "NEEDS_TLS", "Certificates", "Credentials", "Tls", "TlsSocket", "binding_of", "explained"]

log = logging.getLogger(__name__)

_BOTH = f"set {TLS_DIR} in all processes of the job or in none"
NEEDS_TLS = f"TLS is on here, and the hello came without it: {_BOTH}"
"""What a side with TLS tells one without."""
NEEDS_NO_TLS = f"TLS is off here, and the hello came with it: {_BOTH}"
"""What a side without TLS tells one with it."""
_NONE_THERE = f"TLS is on here, and not on the other side: {_BOTH}"

_PIECE = 64 << 10
"""Bytes that are encrypted, or fetched from the kernel, at a time: they are still in the processor's cache then."""
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


# --- certificates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What the three files hold, in PEM."""

    certificate: bytes
    """Our own, followed by those between it and the authority, if there are any."""
    key: bytes = field(repr=False)
    """Of our certificate, without a password."""
    authority: bytes
    """Whose certificates we accept."""

    @classmethod
    def read(cls, folder: Path) -> Credentials:
        """Read them from a folder; raises ConfigError that names the file."""
        try:
            certificate, key, authority = ((folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt"))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        return cls(certificate=certificate, key=key, authority=authority)


class Certificates:
    """Credentials that are ready for use; raises ConfigError when they do not belong together."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self.own = _in_der(credentials.certificate)
        """Our own certificate, in DER."""
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
        self.server.sslobject_class = _TellingWhy
        # Nobody resumes a session; and a ticket would make a socket readable that has nothing to say.
        self.server.num_tickets = 0


class _TellingWhy(ssl.SSLObject):
    """Has the other side told why its certificate is not accepted: asyncio would close without sending that."""

    _failure: ssl.SSLCertVerificationError | None = None

    def do_handshake(self) -> None:
        """Fail only after one more wait, before which is sent what there is to send."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLCertVerificationError as error:
            log.warning("%s", explained(error, "who dialled"))
            self._failure = error
            raise ssl.SSLWantReadError from error


def _in_der(certificates: bytes) -> bytes:
    """Return the first of them."""
    found = _CERTIFICATE.search(certificates)
    try:
        encoded = ssl.PEM_cert_to_DER_cert(found[0].decode() if found else "")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=encoded)
        return encoded
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls.crt holds no certificate that can be read") from error


def _context(side: ssl._SSLMethod, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("ca.crt holds no certificate") from error
    try:
        _load_own(context, credentials)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("tls.key is not the key of tls.crt") from error
        raise ConfigError("tls.key holds no private key that can be read without a password") from error
    except OSError as error:
        raise ConfigError(f"tls.crt and tls.key cannot be handed to OpenSSL: {error.strerror}") from error
    return context


def _load_own(context: ssl.SSLContext, credentials: Credentials) -> None:
    # OpenSSL wants a file. This one is in memory: a key that came with a message never touches a disk.
    number = os.memfd_create("fthsdp-tls")
    with os.fdopen(number, "wb") as file:
        file.write(credentials.certificate + b"\n" + credentials.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{number}", password="")


class Tls:
    """The certificates of one folder, as they are when a connection begins; or those that are given."""

    def __init__(self, source: Path | Credentials) -> None:
        """Read them; raises ConfigError that says what is wrong with them."""
        self._source = source
        self._lock = threading.Lock()
        self._newest = Certificates(self._read())

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Tls | None:
        """Return what ``FTHSDP_TLS_DIR`` names, None where it is not set; raises ConfigError."""
        folder = env.get(TLS_DIR)
        try:
            return cls(Path(folder)) if folder else None
        except ConfigError as error:
            raise ConfigError(f"{TLS_DIR}={folder}: {error}") from error

    def _read(self) -> Credentials:
        return self._source if isinstance(self._source, Credentials) else Credentials.read(self._source)

    def certificates(self) -> Certificates:
        """Return the newest that can be used: while files are being replaced, those from before."""
        with self._lock:
            try:
                found = self._read()
                if found != self._newest.credentials:
                    self._newest = Certificates(found)
                    log.info("the certificates in %s were renewed", self._source)
            except ConfigError as error:
                log.warning("the certificates in %s cannot be used as they are now: %s", self._source, error)
            return self._newest


def binding_of(*, client: bytes, server: bytes) -> str:
    """Return what ties the handshake to the certificates (in DER) of both sides."""
    return hashlib.sha256(hashlib.sha256(client).digest() + hashlib.sha256(server).digest()).hexdigest()


def explained(error: OSError, peer: str) -> WireError:
    """Return in words what ended a connection to ``peer``, and whether the other side is to be trusted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"{peer}: its certificate is not accepted here: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError):
        return ConnectionLost(f"{peer} closed the connection in the middle of the TLS handshake")
    if not isinstance(error, ssl.SSLError) or not error.reason:
        return ConnectionLost(f"{peer}: {error.strerror or error}")
    words = error.reason.lower().replace("_", " ")
    if "alert" in words or "certificate" in words:
        return Untrusted(f"{peer} does not accept our certificate: {words}")
    if words == "wrong version number":
        return Refused(f"{peer}: {_NONE_THERE}")
    return ConnectionLost(f"{peer}: no TLS handshake: {words}")


# --- sockets --------------------------------------------------------------------------------------------------------


class TlsSocket(socket.socket):
    """Takes over a socket, whose bytes travel encrypted from ``begin`` on; used like any other one, blocking or not.

    One thread may receive while others send. TLS is done in memory and the kernel is asked outside of its lock, so
    nobody who waits for the network keeps anybody from the other direction.
    """

    def __init__(self, sock: socket.socket, tls: Tls, *, server_side: bool) -> None:
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout)
        self._tls = tls
        self._server_side = server_side
        self.peer = "the peer"
        """Address of the other side, for messages: known once it has been connected."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object: ssl.SSLObject | None = None
        self._lock = threading.Lock()
        """Held while the object above is used."""
        self._sending = threading.Lock()
        """Held until what was encrypted is sent: records have to arrive in their order."""
        self._fetched = memoryview(bytearray(_PIECE))
        self._unsent = memoryview(b"")
        """What the kernel did not take yet of a piece that is encrypted."""
        self._promised = 0
        """Bytes that this piece had before; 0 where there is none."""

    def turn_plain_away(self, begins: bytes, answer: bytes) -> bool:
        """Where the first byte is ``begins``, send ``answer`` as it is and return True: TLS could not be read there."""
        if super().recv(1, socket.MSG_PEEK) != begins:
            return False
        super().recv(_PIECE)  # what is left unread when a socket is closed can cost the other side the answer
        super().sendall(answer)
        return True

    def begin(self) -> str:
        """Shake hands and return what binds to the certificates; raises Untrusted, Refused, ConnectionLost.

        The socket has to be blocking; its timeout holds for each wait.
        """
        with contextlib.suppress(OSError):
            self.peer = "{}:{}".format(*self.getpeername()[:2])
        certificates = self._tls.certificates()
        context = certificates.server if self._server_side else certificates.client
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=self._server_side)
        try:
            while not self._shaken(self._object):
                self._fetch()
        except OSError as error:
            with contextlib.suppress(OSError):
                super().sendall(self._outgoing.read())  # why we end it
            raise explained(error, self.peer) from error
        theirs = self._object.getpeercert(binary_form=True)
        assert theirs is not None
        ours = certificates.own
        return binding_of(client=theirs, server=ours) if self._server_side else binding_of(client=ours, server=theirs)

    def _shaken(self, shaking: ssl.SSLObject) -> bool:
        try:
            shaking.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        super().sendall(self._outgoing.read())
        return done

    @property
    def pending(self) -> bool:
        """Whether something may be received that the kernel does not know of any more."""
        return self._object is not None and bool(self._object.pending() or self._incoming.pending)

    # --- in ---

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receive what there is; a socket that does not block fills the buffer as far as it can."""
        room = memoryview(buffer).cast("B")
        room = room[:nbytes] if nbytes else room
        done = 0
        while done < len(room):
            count = self._decrypt(room[done:])
            if count is None:
                if done and self.gettimeout() != 0:
                    break
                try:
                    self._fetch()
                except BlockingIOError:
                    if not done:
                        raise
                    break
            elif not count:
                break
            else:
                done += count
        return done

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive up to ``bufsize`` bytes."""
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data)])

    def _decrypt(self, room: memoryview) -> int | None:
        """Return how many bytes of the room were filled, 0 at the end, None when more has to be fetched."""
        assert self._object is not None
        with self._lock:
            try:
                # With a buffer it returns their number, which its stub does not know.
                return int(self._object.read(len(room), room))
            except ssl.SSLWantReadError:
                return None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0

    def _fetch(self) -> None:
        count = super().recv_into(self._fetched)
        with self._lock:
            if count:
                self._incoming.write(self._fetched[:count])
            else:
                self._incoming.write_eof()

    # --- out ---

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        """Send everything."""
        view = memoryview(data).cast("B")
        with self._sending:
            for start in range(0, len(view), _PIECE):
                super().sendall(self._encrypted([view[start : start + _PIECE]]))

    def sendmsg(self, buffers: Iterable[ReadableBuffer], *others: Any) -> int:
        """Send what the kernel takes and return how much that was.

        After fewer bytes than were offered, or BlockingIOError, the next call has to begin with those that follow:
        they may be encrypted already.
        """
        offered = [memoryview(buffer).cast("B") for buffer in buffers]
        done = 0
        with self._sending:
            while piece := _cut(offered, self._promised or _PIECE):
                if not self._promised:
                    self._unsent = memoryview(self._encrypted(piece))
                    self._promised = sum(map(len, piece))
                try:
                    while self._unsent:
                        self._unsent = self._unsent[super().send(self._unsent) :]
                except BlockingIOError:
                    if not done:
                        raise
                    break
                done += self._promised
                self._promised = 0
        return done

    def _encrypted(self, parts: Iterable[memoryview]) -> bytes:
        assert self._object is not None
        with self._lock:
            for part in parts:
                self._object.write(part)
            return self._outgoing.read()

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("this would send without encryption: use sendall or sendmsg")

    send = sendto = sendfile = _refuse


def _cut(offered: list[memoryview], size: int) -> list[memoryview]:
    """Take up to ``size`` bytes from the front of what is offered."""
    piece: list[memoryview] = []
    while offered and size:
        part, rest = offered[0][:size], offered[0][size:]
        offered[:1] = [rest] if rest else []
        size -= len(part)
        if part:
            piece.append(part)
    return piece
