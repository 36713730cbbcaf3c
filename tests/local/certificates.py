"""Certificates for tests, made by openssl as cert-manager would make them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Authority"]

_EXTENSIONS = "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder of its own."""

    folder: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        """Make its key and its certificate."""
        self.folder.mkdir(parents=True)
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.certificate, "-subj", f"/CN={self.name}")

    @property
    def certificate(self) -> Path:
        """Its own certificate."""
        return self.folder / "ca.crt"

    @property
    def _key(self) -> Path:
        return self.folder / "ca.key"

    def issue(self, folder: Path, *, days: int = 30, address: str | None = None) -> Path:
        """Fill ``folder`` with a new certificate, its key and ours, as a Secret is mounted; -1 days have run out.

        ``address``: the IP address that the certificate names.
        """
        folder.mkdir(exist_ok=True)
        request, extensions = self.folder / "request", self.folder / "extensions"
        extensions.write_text(_EXTENSIONS + (f"subjectAltName=IP:{address}\n" if address else ""))
        _openssl("req", "-new", *_NEW_KEY, "-keyout", folder / "tls.key", "-out", request, "-subj", "/CN=job")
        signed = ("-CA", self.certificate, "-CAkey", self._key, "-days", days, "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *signed, "-out", folder / "tls.crt")
        (folder / "ca.crt").write_bytes(self.certificate.read_bytes())
        return folder

    @staticmethod
    def lock_key(folder: Path) -> None:
        """Give the key in ``folder`` a password."""
        key = folder / "tls.key"
        _openssl("ec", "-in", key, "-aes256", "-passout", "pass:word", "-out", key)


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
