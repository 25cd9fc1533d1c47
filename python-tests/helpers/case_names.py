"""Names of the cases of a test."""

import re


def case(value) -> str:
    """A value as text that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
