"""Frames: what the two ends of a channel say to each other, proved by the secret of the run.

Both ends know a secret that never goes over the connection.  At its start each end sends a random
nonce, and proves by an HMAC over both nonces that it knows the secret; the keys of the connection
are made of the same nonces, so nothing of another connection can be said again in this one.  A
frame is a short JSON head and a body of bytes, of limited sizes, under a tag that also covers the
number of the frame.  What is forged, repeated, left out or out of order is a :class:`NotProved`.
Nothing is ever unpickled.

This module reads and writes no socket: :mod:`~bigdl.runtime.key_value_store` serves, and
:mod:`~bigdl.runtime.channel` connects.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from typing import Any

HEAD_LIMIT = 1 << 20  # bytes of a head
BODY_LIMIT = 256 << 20  # bytes of a body

_MAGIC = b"BigDL\x00\x00\x01"
_NONCE = 32
_PROOF = 32
_SIZES = struct.Struct("!II")
_NUMBER = struct.Struct("!Q")

GREETING_SIZE = len(_MAGIC) + _NONCE  # of the server's first words
ANSWER_SIZE = _NONCE + _PROOF  # of the client's answer
PROOF_SIZE = _PROOF  # of the server's proof
SIZES_SIZE = _SIZES.size
TRY_AGAIN = b"BigDL\x00\x00\xff"  # instead of the server's proof, where it must take others


class NotProved(Exception):
    """The other end does not prove that it knows the secret, or breaks the rules of the frames."""


def new_secret() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(32)


class Handshake:
    """The start of a connection; both ends go through it, and get their seals.

    Parameters
    ----------
    secret : bytes
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._own = secrets.token_bytes(_NONCE)
        self._nonces = b""

    # -- of the server ----------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """The first words of the connection."""
        return _MAGIC + self._own

    def check(self, answer: bytes) -> bytes:
        """Check the client's answer to the greeting; returns the server's own proof."""
        self._nonces = self._own + answer[:_NONCE]
        self._verify(b"client", answer[_NONCE:])
        return self._made(b"server")

    # -- of the client ----------------------------------------------------------------------------

    def answer(self, greeting: bytes) -> bytes:
        """Answer to the server's greeting."""
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise NotProved("it is no channel, or that of another version")
        self._nonces = greeting[len(_MAGIC) :] + self._own
        return self._own + self._made(b"client")

    def finish(self, proof: bytes) -> None:
        """Check the server's proof."""
        self._verify(b"server", proof)

    # -- of both ----------------------------------------------------------------------------------

    def seal(self, sender: bytes) -> Seal:
        """The seal of what ``b"client"`` or ``b"server"`` says from now on."""
        return Seal(self._made(b"key of the " + sender))

    def _made(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + b"\0" + self._nonces, hashlib.sha256)

    def _verify(self, who: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self._made(who), proof):
            raise NotProved("it does not know the secret of the run")


class Seal:
    """The tags of one direction of a connection, in the order of its frames.

    Parameters
    ----------
    key : bytes
    """

    tag_size = 32

    def __init__(self, key: bytes):
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def close(self, head: Any, body: Any = b"") -> Sequence[Any]:
        """The pieces of a frame in the order in which they are sent.

        Parameters
        ----------
        head : JSON-able
        body : bytes-like
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        sizes = pack_sizes(len(text), len(body))
        return sizes + text, body, self._tag(sizes, text, body)

    def open(self, sizes: bytes, head: bytes, body: bytes, tag: bytes) -> tuple[Any, bytes]:
        """The head and the body of a frame that was received.

        Raises
        ------
        NotProved
        """
        if not hmac.compare_digest(self._tag(sizes, head, body), tag):
            raise NotProved("a message is forged, repeated, or not in its place")
        return json.loads(head), body

    def _tag(self, *pieces: Any) -> bytes:
        mac = self._mac.copy()
        mac.update(_NUMBER.pack(self._number))
        self._number += 1
        for piece in pieces:
            mac.update(piece)
        return mac.digest()


def pack_sizes(head: int, body: int) -> bytes:
    """The sizes that begin a frame."""
    if head > HEAD_LIMIT or body > BODY_LIMIT:
        raise ValueError(f"a message of {head} + {body} bytes is too large for a channel")
    return _SIZES.pack(head, body)


def read_sizes(sizes: bytes) -> tuple[int, int]:
    """The sizes of a head and a body.

    Raises
    ------
    NotProved
        If they are larger than any frame.
    """
    head, body = _SIZES.unpack(sizes)
    if head > HEAD_LIMIT or body > BODY_LIMIT:
        raise NotProved(f"a message of {head} + {body} bytes is larger than any")
    return head, body
