"""Another user of this machine, as whom tests try what must not work."""

import os

import pytest

NOBODY = 65534


def can(function):
    """Return True if a function ends without an OSError as another user; only root can ask."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function()
            os._exit(1)
        except OSError:
            os._exit(0)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 1
