"""Damages messages by chance, to look at what their readers do."""

import random


def damaged(content: bytes, random: random.Random) -> bytes:
    """Some bytes changed, taken out, or put in."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 6)):
        place = random.randrange(len(changed) + 1)
        match random.randrange(4):
            case 0:
                del changed[place : place + random.randint(1, 20)]
            case 1:
                changed[place:place] = random.randbytes(random.randint(1, 20))
            case 2:
                changed[place : place + 1] = random.randbytes(1)
            case _:
                words = (b"-1", b"null", b"1e400", b"99999999999999999999", b'"x"', b"[", b"{}")
                changed[place:place] = random.choice(words)
    return bytes(changed)
