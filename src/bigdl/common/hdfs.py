"""HDFS over HTTP (WebHDFS), for processes without Hadoop's C library libhdfs."""

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit
from xml.etree import ElementTree

import requests
from fsspec.implementations.webhdfs import WebHDFS

from bigdl.common.hadoop import hadoop_properties
from bigdl.common.timeouts import NAME_NODE_S

T = TypeVar("T")

# Parts of WebHDFS's error messages while a name node starts, is a standby, knows no data node yet,
# or was restarted under an open connection.
_PASSING = (
    *("safe mode", "safemode", "startup mode", "not started", "standby", "retriable"),
    *("failed to find datanode", "could only be written to 0"),
    *("connectexception", "eofexception", "socketexception", "sockettimeoutexception"),
)
_HTTP, _HTTPS = ("http-address", "9870"), ("https-address", "9871")


class WebHdfs(WebHDFS):
    """WebHDFS file system for ``hdfs://`` URLs with failover between name nodes.

    A call waits for a name node that is unavailable, a standby or in safe mode. Meanwhile it tries
    the other name nodes, as Hadoop's client does.

    Parameters
    ----------
    addresses : tuple of (str, int)
        Host and port of the HTTP servers of the name nodes.
    root : str
        Prefix of the URLs, e.g. ``"hdfs://namenode:8020"``.
    """

    protocol = ("hdfs",)

    def __init__(
        self, addresses: tuple[tuple[str, int], ...], root: str, **options: Any
    ):  # options: of fsspec's class
        super().__init__(*addresses[0], **options)
        self.root = root
        first: str = self.url  # type: ignore[has-type]
        first_address, *_ = addresses
        self.urls = [
            first.replace("//{}:{}/".format(*first_address), f"//{host}:{port}/")
            for host, port in addresses
        ]
        self.patience_s = 0.0

    def connect(self) -> None:
        """Find an active name node; from then on, requests wait until a name node is active.

        Raises
        ------
        OSError, RuntimeError
            If no name node answers now.
        """
        if self.patience_s:
            return
        for url in self.urls:
            self.url = url
            try:
                self.info("/")
                break
            except (OSError, RuntimeError):
                if url is self.urls[-1]:
                    raise
        self.patience_s = NAME_NODE_S

    def unstrip_protocol(self, name: str) -> str:
        return str(self.root + self._strip_protocol(name))

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **options: Any
    ) -> None:  # options: of fsspec
        """Write a file in one request, which can be retried as a whole."""

        def write() -> None:
            overwrite = "true" if mode == "overwrite" else "false"
            redirect = self._once("CREATE", "PUT", path, redirect=False, overwrite=overwrite)
            location = self._apply_proxy(redirect.headers["Location"])
            headers = {"content-type": "application/octet-stream"}
            answer = self.session.put(location, data=value, headers=headers)
            if not answer.ok:  # only the text has the reason
                raise RuntimeError(f"WebHDFS cannot write {path}: {answer.text}")

        self._persist(write)

    def _call(self, *args: Any, **options: Any) -> requests.Response:
        return self._persist(lambda: self._once(*args, **options))

    def _once(self, *args: Any, **options: Any) -> requests.Response:
        response: requests.Response = super()._call(*args, **options)
        return response

    def _persist(self, call: Callable[[], T]) -> T:
        end = time.monotonic() + self.patience_s
        while True:
            try:
                return call()
            except (requests.RequestException, RuntimeError) as error:
                if not _passes(error) or time.monotonic() > end:
                    raise
            index = self.urls.index(self.url)
            self.url = self.urls[(index + 1) % len(self.urls)]
            time.sleep(1)


def _passes(error: Exception) -> bool:
    """Return True if an error is temporary because a name node is starting or failing over."""
    if isinstance(error, requests.ConnectionError | requests.Timeout):
        return True
    response = getattr(error, "response", None)
    text = f"{error} {response.text if response is not None else ''}".lower()
    return any(word in text for word in _PASSING)


def open_webhdfs(url: str) -> tuple[WebHdfs, str]:
    """Return the WebHDFS file system of an ``hdfs://`` URL and the path within it.

    The address comes from the URL or from Hadoop's configuration in ``HADOOP_CONF_DIR``. Of several
    name nodes, the active one is used.

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
    addresses = tuple(_name_nodes(settings, authority, *(_HTTPS if is_secure else _HTTP)))
    if not addresses:
        raise FileNotFoundError("no name node is known; set HADOOP_CONF_DIR")
    files = WebHdfs(addresses, **options)
    try:
        files.connect()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return files, parts.path or "/"


def _name_nodes(
    settings: Mapping[str, str], authority: str, setting: str, port: str
) -> list[tuple[str, int]]:
    """Return the host and HTTP port of every name node of a file system."""
    key = f"dfs.namenode.{setting}"
    host = urlsplit(f"//{authority}").hostname or ""
    if authority in settings.get("dfs.nameservices", "").split(","):
        nodes = settings.get(f"dfs.ha.namenodes.{authority}", "").split(",")
        settings_of_nodes = [
            settings.get(f"{key}.{authority}.{node.strip()}", "") for node in nodes
        ]
    else:
        is_default = authority == urlsplit(settings.get("fs.defaultFS", "")).netloc
        settings_of_nodes = [settings.get(key, "") if is_default else ""]
    addresses = [urlsplit(f"//{each or f'{host}:{port}'}") for each in settings_of_nodes]
    return [
        (host if each.hostname in (None, "0.0.0.0") else each.hostname, each.port or int(port))
        for each in addresses
        if each.hostname or host
    ]


def _settings() -> dict[str, str]:
    """Return the HDFS settings in ``HADOOP_CONF_DIR``, or an empty dict if there are none."""
    settings: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        with contextlib.suppress(OSError, ElementTree.ParseError):
            settings |= hadoop_properties(os.path.join(os.environ.get("HADOOP_CONF_DIR", ""), name))
    return settings
