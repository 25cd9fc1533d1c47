"""Message of a server to the benchmark when it is ready: its address and its requests."""

import base64
import json
from pathlib import Path

REQUESTS = 2000  # requested users, one per request


def requests_of(folder, name, encode):
    """Write the requests for all users and return the file."""
    file = Path(folder, f"requests-{name}.json")
    encoded = [base64.b64encode(encode(user)).decode() for user in range(REQUESTS)]
    file.write_text(json.dumps(encoded))
    return str(file)


def ready(port, method, requests):
    told = {"address": f"127.0.0.1:{port}", "method": method, "requests": requests}
    print("ready " + json.dumps(told), flush=True)
