"""Model serving over HTTP, gRPC and in process, with batching across requests."""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from bigdl.nano.serving.batching import BatchingOptions as BatchingOptions
    from bigdl.nano.serving.batching import ClosedError as ClosedError
    from bigdl.nano.serving.batching import DeadlineError as DeadlineError
    from bigdl.nano.serving.batching import OverloadError as OverloadError
    from bigdl.nano.serving.client import Client as Client
    from bigdl.nano.serving.client import ServerError as ServerError
    from bigdl.nano.serving.http_messages import HttpAnswer as HttpAnswer
    from bigdl.nano.serving.http_messages import HttpRequest as HttpRequest
    from bigdl.nano.serving.limits import ServingLimits as ServingLimits
    from bigdl.nano.serving.model import ServedModel as ServedModel
    from bigdl.nano.serving.repository import ModelRepository as ModelRepository
    from bigdl.nano.serving.repository import UnknownModelError as UnknownModelError
    from bigdl.nano.serving.server import ModelServer as ModelServer
    from bigdl.nano.serving.serving_run import ServingRun as ServingRun
    from bigdl.nano.serving.signature import Signature as Signature
    from bigdl.nano.serving.signature import TensorSpec as TensorSpec

_HOMES = {
    "BatchingOptions": "bigdl.nano.serving.batching",
    "Client": "bigdl.nano.serving.client",
    "ClosedError": "bigdl.nano.serving.batching",
    "DeadlineError": "bigdl.nano.serving.batching",
    "HttpAnswer": "bigdl.nano.serving.http_messages",
    "HttpRequest": "bigdl.nano.serving.http_messages",
    "ModelRepository": "bigdl.nano.serving.repository",
    "ModelServer": "bigdl.nano.serving.server",
    "OverloadError": "bigdl.nano.serving.batching",
    "ServedModel": "bigdl.nano.serving.model",
    "ServerError": "bigdl.nano.serving.client",
    "ServingLimits": "bigdl.nano.serving.limits",
    "ServingRun": "bigdl.nano.serving.serving_run",
    "Signature": "bigdl.nano.serving.signature",
    "TensorSpec": "bigdl.nano.serving.signature",
    "UnknownModelError": "bigdl.nano.serving.repository",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
