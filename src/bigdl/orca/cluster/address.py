"""Addresses of clusters, and whether something listens there.

Spark tries an unreachable cluster again for minutes.  :func:`check_reachable` asks first, and says
in one sentence what did not answer.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from bigdl.common.errors import UsageError

__all__ = [
    "Address",
    "check_reachable",
    "kubernetes_address",
    "local_address",
    "resource_managers",
    "standalone_masters",
]

PROBE_S = 3.0
"""Seconds in which a cluster must accept a connection."""

Address = tuple[str, int]

_RESOURCE_MANAGER_PORT = 8032


def check_reachable(addresses: Sequence[Address], what: str, advice: str) -> Address:
    """Find the first address that accepts a connection.

    Parameters
    ----------
    addresses : sequence of (host, port)
        Where one of them is enough.
    what : str
        The name of what should listen there.
    advice : str
        What to do if it does not.

    Raises
    ------
    UsageError
        If none does.
    """
    reasons = []
    for host, port in addresses:
        try:
            with socket.create_connection((host, port), PROBE_S):
                return host, port
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            reasons.append(f"{host}:{port} ({reason})")
    raise UsageError(f"{what} cannot be reached at {', '.join(reasons)}: {advice}")


def resource_managers(directory: str) -> list[Address]:
    """Addresses of YARN's resource managers, from the files in Hadoop's directory.

    Raises
    ------
    UsageError
        If the directory holds no readable ``yarn-site.xml``.
    """
    file = Path(directory) / "yarn-site.xml"
    try:
        properties = _hadoop_properties(file)
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(
            f"YARN is described by yarn-site.xml, which cannot be read in {directory} ({error}): "
            "set HADOOP_CONF_DIR, or pass hadoop_conf, to the directory of Hadoop's configuration "
            "files"
        ) from None
    ids = [each.strip() for each in properties.get("yarn.resourcemanager.ha.rm-ids", "").split(",")]
    found = []
    for suffix in [f".{each}" for each in ids if each] or [""]:
        host = properties.get(f"yarn.resourcemanager.hostname{suffix}", "0.0.0.0")
        address = properties.get(f"yarn.resourcemanager.address{suffix}", "")
        # A value may refer to others as ${…}; the one that is usual refers to the host.
        address = address.replace("${yarn.resourcemanager.hostname}", host)
        found.append(_host_port(address or host, _RESOURCE_MANAGER_PORT))
    return found


def kubernetes_address(master: str) -> Address:
    """The address of the API server in ``k8s://[https://]host[:port]``."""
    rest = master.removeprefix("k8s://")
    parts = urlsplit(rest if "://" in rest else f"https://{rest}")
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise UsageError(
            f'master must be of the form "k8s://https://host:port", but got {master!r}'
        )
    return parts.hostname, port


def standalone_masters(master: str) -> list[Address]:
    """The addresses in ``spark://host:port[,host:port…]``.

    Raises
    ------
    UsageError
        If `master` has another form.
    """
    entries = master.removeprefix("spark://").split(",") if master.startswith("spark://") else []
    try:
        found = [_host_port(entry, 7077) for entry in entries if entry]
    except ValueError:
        found = []
    if not found:
        raise UsageError(
            f'master of a standalone cluster must be of the form "spark://host:port", '
            f"but got {master!r}"
        )
    return found


def local_address(towards: Address | None = None) -> str:
    """The address of this machine on the route to another; nothing is sent."""
    host, port = towards or ("192.0.2.1", 9)  # an address of documentation: the default route
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))
                return probe.getsockname()[0]
        except OSError:
            continue
    return "127.0.0.1"


def _host_port(text: str, default: int) -> Address:
    parts = urlsplit(f"//{text.strip()}")
    return parts.hostname or "", parts.port or default


def _hadoop_properties(file: Path) -> Mapping[str, str]:
    root = ElementTree.parse(file).getroot()
    return {
        (each.findtext("name") or "").strip(): (each.findtext("value") or "").strip()
        for each in root.iter("property")
    }
