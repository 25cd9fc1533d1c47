"""Start of each Python process below a test run with ``--portable``: see `other_platform`."""

import os

if os.environ.get("BIGDL_TEST_PLATFORM"):
    import other_platform

    other_platform.install(os.environ["BIGDL_TEST_PLATFORM"])
