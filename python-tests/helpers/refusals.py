"""The check of an error's code, which stays when its sentence is worded anew."""

import contextlib
from collections.abc import Iterator

import pytest

from bigdl.common.errors import BigDLError


@contextlib.contextmanager
def refused(code: str, *words: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of BigDL with a code, whose message contains all `words`.

    Parameters
    ----------
    code : str
        One of ``bigdl.common.error_codes.CODES``.
    *words : str
        What the message must name, such as the given value.
    """
    with pytest.raises(BigDLError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in {str(error)!r}"
