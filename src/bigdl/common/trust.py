"""Signatures of files that run code when they are loaded.

Pickles, TorchScript and compiled graphs are programs: their writer decides which code
their reader runs.  BigDL signs the files that it writes, with a key that only programs of this user
can read.  It loads a file if this user's signature matches the content, or if the caller passes
``trust=True``.

A writer signs the bytes in memory.  A reader checks the same bytes that it loads, not a file that
may be replaced in between.
"""

import contextlib
import functools
import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.common.platform.files import is_closed_to_others, is_own, link
from bigdl.common.private_folders import cache_directory, make_private_directory

logger = logging.getLogger("bigdl")

OPTIONS = (
    "trust=True (bigdl-serve: --trust; a configuration of the recommender: ranking.trust: true)"
)
"""Options by which a caller declares a model as trusted."""


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def user_signature(text: str) -> str:
    """Return a signature of a text; only this user's programs can create it.

    It is an HMAC-SHA256 in hexadecimal, with a key of 32 random bytes that is made once and kept
    in ``~/.cache/bigdl/keys`` where nobody else can read it.
    """
    key = user_key(cache_directory("keys") / "pickles")
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_signed(text: str, signature: object) -> bool:
    """Return True if a program of this user signed a text."""
    return isinstance(signature, str) and hmac.compare_digest(
        signature.encode(), user_signature(text).encode()
    )


class UntrustedFileError(UsageError):
    """Raised when a file of untrusted origin can run code when it is loaded."""


def untrusted(path: object, content: str, advice: str = f"pass {OPTIONS}") -> UntrustedFileError:
    """Return the error for a file whose origin is not trusted.

    Parameters
    ----------
    path : str or path
    content : str
        Description of the file's content, e.g. ``"a pickled module"``.
    advice : str
        Instruction for a user who trusts the file's writer.
    """
    return UntrustedFileError(
        f"{str(path)!r} is {content}, which can run any code when it is read, and no program of "
        f"this user has signed it as it is now; {advice} if you trust all who can write it",
        code="file-untrusted",
        path=str(path),
    )


@functools.cache
def user_key(file: Path) -> bytes:
    """Read or create this user's signing key; return a temporary key if the file is unusable."""
    key = secrets.token_bytes(32)
    try:
        make_private_directory(file.parent)
        whole = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        whole.touch(0o600)
        try:
            whole.write_bytes(key)
            with contextlib.suppress(FileExistsError):
                link(whole, file)  # atomic: the file is complete or missing
        finally:
            whole.unlink()
        about = file.stat()
        if not is_own(about) or not is_closed_to_others(about):
            raise PermissionError("others can read or change it; remove it")
        kept = file.read_bytes()
        if len(kept) != len(key):  # cut short by a crash: others could guess it
            raise ValueError(f"it has {len(kept)} bytes instead of {len(key)}; remove it")
        return kept
    except (OSError, ValueError) as error:
        logger.warning(
            "The key %s cannot be used; a temporary key replaces it until this process ends: %s",
            file,
            error,
        )
        return key
