"""Serving: models that answer threads, HTTP and gRPC, with batching across requests."""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from bigdl.nano.serving.batching import BatchingOptions as BatchingOptions
    from bigdl.nano.serving.batching import ClosedError as ClosedError
    from bigdl.nano.serving.batching import DeadlineError as DeadlineError
    from bigdl.nano.serving.batching import OverloadError as OverloadError
    from bigdl.nano.serving.model import ServedModel as ServedModel
    from bigdl.nano.serving.signature import Signature as Signature
    from bigdl.nano.serving.signature import TensorSpec as TensorSpec

_HOMES = {
    "BatchingOptions": "bigdl.nano.serving.batching",
    "ClosedError": "bigdl.nano.serving.batching",
    "DeadlineError": "bigdl.nano.serving.batching",
    "OverloadError": "bigdl.nano.serving.batching",
    "ServedModel": "bigdl.nano.serving.model",
    "Signature": "bigdl.nano.serving.signature",
    "TensorSpec": "bigdl.nano.serving.signature",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
