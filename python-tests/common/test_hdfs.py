"""HDFS over HTTP during a name node's start or failover."""

import http.server
import json
import threading
from urllib.parse import urlsplit

import pytest
import requests

from bigdl.common import hdfs
from bigdl.common.hdfs import WebHdfs

STATUS = {"FileStatus": {"type": "FILE", "length": 3, "pathSuffix": ""}}
SAFE_MODE = {"exception": "SafeModeException", "message": "Name node is in safe mode."}
STANDBY = {"exception": "StandbyException", "message": "Operation category READ is not supported"}


@pytest.fixture
def name_node():
    """Start servers that refuse their first requests."""
    servers = []

    def start(refusals: int, reason: dict) -> tuple[tuple[str, int], dict]:
        files: dict = {}
        left = [refusals]

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                index = urlsplit(self.path)
                if left[0]:
                    left[0] -= 1
                    return self.reply(403, {"RemoteException": reason})
                if "op=CREATE" in index.query and "written" not in index.query:
                    return self.reply(307, {}, f"http://{self.headers['Host']}{self.path}&written")
                if self.command == "PUT":
                    files[index.path.removeprefix("/webhdfs/v1")] = data
                return self.reply(200, STATUS)

            do_GET = do_PUT = answer

            def reply(self, status, document, location=""):
                body = json.dumps(document).encode()
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_address, files

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def connected(*addresses) -> WebHdfs:
    files = WebHdfs(addresses, root="hdfs://cluster", user="me", skip_instance_cache=True)
    files.connect()
    return files


def test_a_file_is_written_when_safe_mode_ends(name_node, monkeypatch):
    monkeypatch.setattr(hdfs.time, "sleep", lambda seconds: None)
    address, written = name_node(0, SAFE_MODE)
    files = connected(address)
    other, others = name_node(3, SAFE_MODE)
    files.url = files.url.replace(str(address[1]), str(other[1]))
    files.urls = [files.url]
    files.pipe_file("/a/b", b"abc")
    assert others == {"/a/b": b"abc"}
    assert not written


def test_the_active_name_node_is_found(name_node):
    standby, _ = name_node(1000, STANDBY)
    active, written = name_node(0, STANDBY)
    connected(standby, active).pipe_file("/a", b"abc")
    assert written == {"/a": b"abc"}


def test_a_name_node_that_is_not_there_is_refused_at_once():
    with pytest.raises(requests.ConnectionError):
        connected(("127.0.0.1", 9))


def test_other_errors_are_not_repeated(name_node):
    address, _ = name_node(0, {})
    files = connected(address)
    denied = {"exception": "AccessControlException", "message": "Permission denied"}
    other, _ = name_node(1, denied)
    files.urls = [files.url.replace(str(address[1]), str(other[1]))]
    files.url = files.urls[0]
    with pytest.raises(PermissionError, match="denied"):
        files.info("/a")
