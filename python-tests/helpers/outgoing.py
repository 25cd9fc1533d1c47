"""Attempts of Python processes to reach other machines, recorded and refused.

``environment`` returns variables with which a process and its children write each look-up of a name
and each connection that leaves the machine to a file, instead of making it.
"""

import os
from pathlib import Path

_HOOK = """
import os, sys
def _record(event, args, _file={file!r}):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        target = args[0]
    elif event in ("socket.connect", "socket.sendto"):
        if not isinstance(args[1], tuple) or args[0].type & 2:  # a datagram's connect sends nothing
            return
        target = args[1][0]
    else:
        return
    name = target.decode() if isinstance(target, bytes) else str(target)
    own = ("", "None", "localhost", "::1", "::", "0.0.0.0", os.uname().nodename)
    if name in own or name.startswith("127."):
        return
    descriptor = os.open(_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{{event}} {{name}}\\n".encode())
    os.close(descriptor)
    raise OSError(101, "refused by the test")
sys.addaudithook(_record)
"""

# By these packages see that they run in tests or in a build, where they send nothing.
_OF_TESTS = ("CI", "GITHUB_ACTIONS", "JENKINS_URL", "TF_BUILD", "PYTEST_CURRENT_TEST")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables for a process; its home is a new folder below `folder`."""
    for name in ("hook", "home"):
        (folder / name).mkdir(exist_ok=True)
    text = _HOOK.format(file=str(folder / "attempts"))
    (folder / "hook" / "sitecustomize.py").write_text(text)
    kept = {name: value for name, value in os.environ.items() if name not in _OF_TESTS}
    kept.pop("XDG_CACHE_HOME", None)
    path = os.pathsep.join(filter(None, [str(folder / "hook"), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "HOME": str(folder / "home")}


def attempts(folder: Path) -> list[str]:
    """Return a line for each attempt so far."""
    file = folder / "attempts"
    return file.read_text().splitlines() if file.exists() else []


def files_at_home(folder: Path) -> list[str]:
    """Return the files that the process has left at its home, but for BigDL's own cache."""
    home = folder / "home"
    names = [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.startswith(".cache/bigdl"))
