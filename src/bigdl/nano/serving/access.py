"""Who may reach a server: bearer tokens, files of TLS, addresses that other machines reach."""

from __future__ import annotations

import hmac
import ipaddress
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from bigdl.common.errors import UsageError

__all__ = ["AccessError", "check_token", "is_loopback", "read_token", "tls_files", "warn_of_host"]


class AccessError(UsageError):
    """A request without the token, or for what the server does not allow."""

    code = "request-denied"


def check_token(token: str | None, authorization: str | None) -> None:
    """Refuse a request whose header ``Authorization`` lacks the token; None asks for none.

    Raises
    ------
    AccessError
    """
    if token is None:
        return
    given = (authorization or "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, b"Bearer " + token.encode()):
        raise AccessError("The request needs the header 'Authorization: Bearer <token>'")


def read_token(path: str | os.PathLike) -> str:
    """Return the token that a file holds.

    Raises
    ------
    UsageError
        If it cannot be read, or holds none.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The token cannot be read from {str(path)!r}: {error}",
            code="path-unusable",
            path=str(path),
        ) from None
    if not token:
        raise UsageError(f"There is no token in {str(path)!r}", code="data-empty", path=str(path))
    return token


def tls_files(certificate: str | os.PathLike, key: str | os.PathLike) -> tuple[Path, Path]:
    """Return the files of a certificate and its key.

    Raises
    ------
    UsageError
        If one is not there.
    """
    for file in (certificate, key):
        if not Path(file).is_file():
            raise UsageError(
                f"There is no file {str(file)!r}, which TLS needs",
                code="path-missing",
                path=str(file),
            )
    return Path(certificate), Path(key)


def read_pem(files: Sequence[Path] | None) -> tuple[bytes, bytes] | None:
    """Return key and certificate, as gRPC takes them; None stands for no TLS."""
    if files is None:
        return None
    certificate, key = (file.read_bytes() for file in files)
    return key, certificate


def is_loopback(host: str) -> bool:
    """Return True if an address is that of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def warn_of_host(host: str, stacklevel: int = 3) -> None:
    """Warn that a server without TLS listens where other machines reach it."""
    warnings.warn(
        f"The server listens at {host} without TLS, so others can read and change what is sent; "
        "give a certificate and its key, or let a proxy do it",
        stacklevel=stacklevel,
    )
