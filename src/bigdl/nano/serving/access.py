"""Access control of servers: bearer tokens, TLS files and checks of the listening address."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigdl.common.errors import UsageError

__all__ = [
    "ADMIN",
    "INFER",
    "METRICS",
    "AccessError",
    "ForbiddenError",
    "Security",
    "Tokens",
    "changes_allowed",
    "is_loopback",
    "only_authorization",
    "read_token",
    "tls_files",
    "warn_of_exposure",
]

INFER, ADMIN, METRICS = "infer", "admin", "metrics"
"""Purposes of a request; operations that change the server need ``ADMIN``."""


class AccessError(UsageError):
    """Exception raised for a request without a valid token, or for a forbidden operation."""

    code = "request-denied"


class ForbiddenError(AccessError):
    """Exception raised for a request whose token is valid only for other purposes."""


@dataclass(frozen=True)
class Tokens:
    """Bearer tokens that a server accepts; without tokens, it accepts every request.

    Attributes
    ----------
    infer : str, optional
        Token for all requests that do not change the server. It includes the metrics unless there
        is a metrics token.
    admin : str, optional
        Token for all requests.
    metrics : str, optional
        Token for the metrics only.

    Examples
    --------
    >>> from bigdl.nano.serving.access import Tokens
    >>> tokens = Tokens("use", "change")
    >>> tokens.check("Bearer use", "infer")
    >>> try:
    ...     tokens.check("Bearer use", "admin")
    ... except ValueError as error:
    ...     print(error)
    The token does not let its holder change the server; this takes the admin token
    """

    infer: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)
    metrics: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, token in vars(self).items():
            if token is not None and not token.strip():
                begin = "The token" if name == INFER else f"The {name} token"
                raise UsageError(
                    f"{begin} is empty; pass None, or a token",
                    code="argument-value",
                    argument="token" if name == INFER else f"{name}_token",
                )
        if self.admin is not None and self.admin in (self.infer, self.metrics):
            raise UsageError(
                "The admin token is the same as another one, whose holders may change nothing; "
                "give it a different value",
                code="argument-conflict",
                argument="admin_token",
            )

    def __bool__(self) -> bool:
        return any(each is not None for each in vars(self).values())

    def check(self, authorization: str | None, purpose: str = INFER) -> None:
        """Check that a request's ``Authorization`` header has a valid token for the purpose.

        Raises
        ------
        ForbiddenError
            If the token is for another purpose.
        AccessError
            If there is no valid token.
        """
        allowed = {
            INFER: (self.infer, self.admin),
            METRICS: (self.metrics, self.admin)
            if self.metrics is not None
            else (self.infer, self.admin),
            ADMIN: (self.admin,) if self.admin is not None else (self.infer,),
        }[purpose]
        if allowed[0] is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        received = token.strip().encode("utf-8", "surrogateescape")
        is_bearer = scheme.lower() == "bearer"
        # Compare with every token, so that the response time does not reveal which one matched.
        matches = {
            each: each is not None and hmac.compare_digest(received, each.encode())
            for each in (self.infer, self.admin, self.metrics)
        }
        if is_bearer and any(matches[each] for each in allowed):
            return
        if not is_bearer or not any(matches.values()):
            raise AccessError("The request needs the header 'Authorization: Bearer <token>'")
        if purpose == ADMIN:
            raise ForbiddenError(
                "The token does not let its holder change the server; this takes the admin token"
            )
        other = "metrics" if matches[self.metrics] else "infer"
        raise ForbiddenError(
            f"The token is valid for {other} only; this request needs the token for {purpose}"
        )


def only_authorization(values: Sequence[str | bytes]) -> str | None:
    """Return the value of a request's ``Authorization`` header, or None if it has no such header.

    Raises
    ------
    AccessError
        If there are several, since a proxy and the server could check different ones.
    """
    if len(values) > 1:
        raise AccessError("The request has several headers 'Authorization'; send one")
    if not values:
        return None
    return values[0].decode("latin-1") if isinstance(values[0], bytes) else values[0]


def read_token(path: str | os.PathLike) -> str:
    """Read a token from a file; warn if every user of the machine can read the file.

    Raises
    ------
    UsageError
        If the file cannot be read or is empty.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The token cannot be read from {str(path)!r}: {error}",
            code="path-unusable",
            path=str(path),
        ) from None
    if not token:
        raise UsageError(f"There is no token in {str(path)!r}", code="data-empty", path=str(path))
    # Group access is fine: Kubernetes gives a mounted secret to the pod's group (fsGroup).
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        warnings.warn(
            f"Other users of the machine can read or change the token in {str(path)!r} (mode "
            f"{stat.S_IMODE(mode):04o}); chmod 600 it, or mount a secret with defaultMode 0440",
            stacklevel=2,
        )
    return token


def tls_files(certificate: str | os.PathLike, key: str | os.PathLike) -> tuple[Path, Path]:
    """Return the paths of a certificate and its key after checking that they exist.

    Raises
    ------
    UsageError
        If a file does not exist.
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
    """Return the private key and the certificate as bytes for gRPC, or None if TLS is off."""
    if files is None:
        return None
    certificate, key = (file.read_bytes() for file in files)
    return key, certificate


def is_loopback(host: str) -> bool:
    """Return True if an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def changes_allowed(changes: bool | None, tokens: Tokens) -> bool:
    """Return True if clients may change a server; by default, only if it has an admin token.

    Raises
    ------
    UsageError
        If changes would be allowed with the inference token, because there is no admin token.
    """
    if changes and tokens.infer is not None and tokens.admin is None:
        raise UsageError(
            "Clients may change the server only by an admin token if it has a token; pass one, or "
            "do not allow changes",
            code="argument-conflict",
            argument="changes",
        )
    return tokens.admin is not None if changes is None else changes


def warn_of_exposure(
    host: str, *, tls: bool, tokens: Tokens, changes: bool, stacklevel: int = 3
) -> None:
    """Warn if other machines can reach the server without TLS or without a token."""
    if is_loopback(host):
        return
    if not tls:
        warnings.warn(
            f"The server listens at {host} without TLS, so others can read and change its "
            "traffic; pass a certificate and its key, or let a proxy do it",
            stacklevel=stacklevel,
        )
    if tokens.infer is None:
        may = "use it and change it" if changes and tokens.admin is None else "use it"
        warnings.warn(
            f"The server listens at {host} without a token, so everybody who reaches it can {may}; "
            "pass a token, or let a proxy require one",
            stacklevel=stacklevel,
        )


@dataclass(frozen=True)
class Security:
    """Access settings of a server: address, TLS files and tokens.

    Attributes
    ----------
    host : str
        Address to listen on.
    expose : bool
        Must be True to listen on an address that other machines can reach.
    certificate, key : str or None
        PEM files for TLS.
    token : str or None
        Token that requests send in the header ``authorization: Bearer <token>``.
    admin_token : str or None
        Token for ``addItem`` and ``resetMetrics``. It is valid for all other requests, too.
    metrics_token : str or None
        Token for ``getMetrics``, ``getClientMetrics`` and ``/metrics``, used in place of `token`.
    changes : bool or None
        True allows ``addItem`` and ``resetMetrics``; if there is a `token`, this needs an
        `admin_token`. Default: allowed only with an admin token.

    Examples
    --------
    >>> from bigdl.friesian.serving import Security
    >>> try:
    ...     Security(host="192.168.0.7")
    ... except ValueError as error:
    ...     print(str(error)[:55])
    The address 192.168.0.7 can be reached from other machi
    >>> Security(token="secret").check_access("Bearer secret")
    """

    host: str = "127.0.0.1"
    expose: bool = False
    certificate: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    metrics_token: str | None = field(default=None, repr=False)
    changes: bool | None = None

    def __post_init__(self) -> None:
        allowed = self.allows_changes
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "TLS needs both a certificate and a key",
                code="argument-missing",
                argument="certificate",
            )
        self.files()
        if is_loopback(self.host):
            return
        if not self.expose:
            raise UsageError(
                f"The address {self.host} can be reached from other machines; set expose to True "
                "if that is meant, or use 127.0.0.1",
                code="argument-missing",
                argument="expose",
                address=self.host,
            )
        tls = self.certificate is not None
        warn_of_exposure(self.host, tls=tls, tokens=self.tokens, changes=allowed, stacklevel=5)

    @property
    def tokens(self) -> Tokens:
        """Bearer tokens of the server."""
        return Tokens(self.token, self.admin_token, self.metrics_token)

    def files(self) -> tuple[Path, Path] | None:
        """Return the paths of the certificate and its key, or None if TLS is off."""
        if self.certificate is None or self.key is None:
            return None
        return tls_files(self.certificate, self.key)

    @property
    def allows_changes(self) -> bool:
        """True if clients may change the server."""
        return changes_allowed(self.changes, self.tokens)

    def check_access(self, authorization: str | None, purpose: str = INFER) -> None:
        """Raise an AccessError if the header has no token that is valid for the purpose."""
        self.tokens.check(authorization, purpose)
