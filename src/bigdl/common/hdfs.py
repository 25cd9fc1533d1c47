"""HDFS by HTTP (WebHDFS), for processes without Hadoop's own library for C, libhdfs."""

import contextlib
import getpass
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

from fsspec.implementations.webhdfs import WebHDFS

from bigdl.common.hadoop import hadoop_properties

_HTTP, _HTTPS = ("http-address", "9870"), ("https-address", "9871")


class WebHdfs(WebHDFS):
    """The file system of ``hdfs://`` URLs by HTTP.

    Parameters
    ----------
    host : str
    port : int
        Of the name node's HTTP server.
    root : str
        What URLs begin with, e.g. ``"hdfs://namenode:8020"``.
    """

    protocol = ("hdfs",)  # type: ignore[assignment]

    def __init__(self, host: str, port: int, root: str, **options: Any):
        super().__init__(host, port, **options)
        self.root = root

    def unstrip_protocol(self, name: str) -> str:
        return self.root + self._strip_protocol(name)


def by_web(url: str) -> tuple[WebHdfs, str]:
    """The file system of an ``hdfs://`` URL, and the path within it.

    The address is that of Hadoop's configuration in ``HADOOP_CONF_DIR``, where the URL names no
    other name node; of several name nodes it is the active one.

    Raises
    ------
    OSError
        If no name node answers.
    """
    settings = _settings()
    parts = urlsplit(url)
    default = urlsplit(settings.get("fs.defaultFS", ""))
    authority = parts.netloc or default.netloc
    is_secure = settings.get("dfs.http.policy") == "HTTPS_ONLY"
    options: dict[str, Any] = {"root": f"hdfs://{authority}", "use_https": is_secure}
    if settings.get("hadoop.security.authentication", "simple") == "kerberos":
        options["kerberos"] = True
    else:
        options["user"] = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    refused: Exception = FileNotFoundError("no name node is known; set HADOOP_CONF_DIR")
    for host, port in _name_nodes(settings, authority, *(_HTTPS if is_secure else _HTTP)):
        files = WebHdfs(host, port, **options)
        try:
            files.info("/")
        except (OSError, RuntimeError) as error:  # it is a standby, or it is not there
            refused = error
        else:
            return files, parts.path or "/"
    raise OSError(str(refused)) from refused


def _name_nodes(
    settings: Mapping[str, str], authority: str, kind: str, port: str
) -> list[tuple[str, int]]:
    """Addresses of the HTTP servers of all name nodes of a file system."""
    key = f"dfs.namenode.{kind}"
    host = urlsplit(f"//{authority}").hostname or ""
    if authority in settings.get("dfs.nameservices", "").split(","):
        nodes = settings.get(f"dfs.ha.namenodes.{authority}", "").split(",")
        found = [settings.get(f"{key}.{authority}.{node.strip()}", "") for node in nodes]
    else:
        is_default = authority == urlsplit(settings.get("fs.defaultFS", "")).netloc
        found = [settings.get(key, "") if is_default else ""]
    addresses = [urlsplit(f"//{each or f'{host}:{port}'}") for each in found]
    return [
        (host if each.hostname in (None, "0.0.0.0") else each.hostname, each.port or int(port))
        for each in addresses
        if each.hostname or host
    ]


def _settings() -> dict[str, str]:
    """What the files in ``HADOOP_CONF_DIR`` say of HDFS; empty if there are none."""
    settings: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        with contextlib.suppress(OSError, ElementTree.ParseError):
            settings |= hadoop_properties(os.path.join(os.environ.get("HADOOP_CONF_DIR", ""), name))
    return settings
