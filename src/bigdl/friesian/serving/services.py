"""gRPC services for a recommender and its stages, with the interfaces of BigDL 2.x.

A service validates each request before it calls a stage. Invalid requests get the status
``INVALID_ARGUMENT`` and an explanation, failures of a stage get ``UNAVAILABLE``. Neither stops the
service.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError, one_line, require
from bigdl.friesian.serving import wire
from bigdl.friesian.serving.events import Event
from bigdl.friesian.serving.filters import ItemFilter
from bigdl.friesian.serving.index import ItemIndex
from bigdl.friesian.serving.rankers import (
    CandidateGenerator,
    FilteringGenerator,
    Ranker,
    ServedRanker,
)
from bigdl.friesian.serving.recommender import Recommender
from bigdl.friesian.serving.rows import as_numpy
from bigdl.friesian.serving.stages import RANKED, FeatureReader
from bigdl.nano.serving.access import ADMIN, METRICS
from bigdl.nano.serving.grpc_port import GrpcCall, GrpcRefusal
from bigdl.nano.serving.limits import ServingLimits
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.open_inference import parse_json
from bigdl.nano.serving.protos import Message, MessageClass
from bigdl.nano.serving.repository import UnknownModelError
from bigdl.nano.serving.statuses import ERROR, status_of

if TYPE_CHECKING:
    import grpc

logger = logging.getLogger(__name__)
Method = Callable[[Message, GrpcCall], Message]

_GREATEST_ID = (1 << 31) - 1  # largest int32
# Time reserved for sending the reply before the caller's deadline: minimum and maximum seconds, and
# share of the remaining time. Replies take longer on a busy machine.
_MARGIN, _MOST_MARGIN, _MARGIN_PART = 0.005, 0.25, 0.05


class Limits(ServingLimits):
    """Limits of a recommender's servers, with their defaults.

    Attributes
    ----------
    max_ids : int
        Maximum number of users per recommendation, or of ids per feature read.
    max_k : int
        Maximum number of items per user, and of candidates.
    max_pairs : int
        Maximum number of users times candidates, and of rows that a ranker scores.
    max_bytes : int
        Maximum size of a request in bytes.
    max_requests : int
        Maximum number of concurrent requests; more are rejected with ``RESOURCE_EXHAUSTED``.

    Examples
    --------
    >>> from bigdl.friesian.serving import Limits
    >>> try:
    ...     Limits(max_k=100).check_k("k", 101)
    ... except ValueError as error:
    ...     print(error)
    k should be an integer from 1 to 100, got 101
    """

    def __init__(
        self,
        max_ids: int = 10_000,
        max_k: int = 10_000,
        max_pairs: int = 5_000_000,
        max_bytes: int = 16 << 20,
        max_requests: int = 256,
    ):
        super().__init__(
            check_integer("max_bytes", max_bytes, 1),
            max_requests=max_requests,
            max_ids=max_ids,
            max_k=max_k,
            max_pairs=max_pairs,
        )

    @property
    def max_bytes(self) -> int:
        """Maximum size of a request in bytes."""
        return self.max_request_bytes


class Service:
    """Base class of the gRPC services: validation, timing, ``getMetrics``, ``resetMetrics``.

    Parameters
    ----------
    metrics : ServingMetrics, optional
    limits : Limits, optional
    """

    name: str  # full name with package, as in the proto file
    purposes: Mapping[str, str] = {
        "addItem": ADMIN,
        "resetMetrics": ADMIN,
        "getMetrics": METRICS,
        "getClientMetrics": METRICS,
    }
    open_methods: Sequence[str] = ()
    quick_methods: Sequence[str] = tuple(purposes)
    checks_changes = False

    def __init__(self, metrics: ServingMetrics | None = None, limits: ServingLimits | None = None):
        self.metrics = metrics or ServingMetrics()
        self.limits = limits or Limits()

    @property
    def _package(self) -> str:
        return self.name.partition(".")[0]

    def _message(self, name: str, **values: object) -> Message:
        return wire.message(f"{self._package}.{name}")(**values)

    def functions(self) -> dict[str, Method]:
        """Return the methods of the service by name."""
        return {"getMetrics": self._get_metrics, "resetMetrics": self._reset_metrics}

    def _get_metrics(self, request: Message, context: GrpcCall) -> Message:
        return self._message("ServerMessage", str=self.metrics.to_json())

    def _reset_metrics(self, request: Message, context: GrpcCall) -> Message:
        self.metrics.reset()
        return wire.message("google.protobuf.Empty")()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler that adds this service to a gRPC server."""
        return wire.handler_of(self.name, self.functions(), self._guarded)

    def _guarded(
        self,
        method: str,
        request_class: MessageClass,
        function: Method,
        content: bytes,
        context: GrpcCall,
    ) -> Message:
        try:
            request = request_class.FromString(content)
        except Exception:  # protobuf raises various errors for invalid bytes
            sentence = f"The request is not a valid {request_class.DESCRIPTOR.full_name}"
            raise GrpcRefusal("INVALID_ARGUMENT", sentence) from None
        try:
            with self.metrics.time(method):
                return function(request, context)
        except GrpcRefusal:
            raise
        except require("grpc", "serving").RpcError as error:
            sentence = f"A service that {method} calls failed: {one_line(error)}"
            raise GrpcRefusal("UNAVAILABLE", sentence) from None
        except Exception as error:
            status = status_of(error)
            if status is not ERROR:
                raise GrpcRefusal(status.grpc, str(error)) from None
            logger.exception("%s failed", method)
            raise GrpcRefusal("UNAVAILABLE", f"{method} failed: {one_line(error)}") from None


class FeatureService(Service):
    """gRPC service ``feature.Feature``, which returns features by id.

    Parameters
    ----------
    features : FeatureReader
    user_table, item_table : str
    user_columns, item_columns : sequence of str, optional
        Columns that clients may read. Default: all.
    metrics, limits
        See :class:`Service`.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, FeatureService, GrpcServer, RemoteFeatures
    >>> store = EmbeddedStore("features")
    >>> _ = store.replace({"user": pd.DataFrame({"user": [3], "age": [30]})})
    >>> with GrpcServer([FeatureService(store)]) as server:
    ...     with RemoteFeatures(f"127.0.0.1:{server.port}") as features:
    ...         features.read("user", [4, 3])["age"].tolist()
    [0, 30]
    """

    name = "feature.Feature"

    def __init__(
        self,
        features: FeatureReader,
        user_table: str = "user",
        item_table: str = "item",
        user_columns: Sequence[str] | None = None,
        item_columns: Sequence[str] | None = None,
        metrics: ServingMetrics | None = None,
        limits: ServingLimits | None = None,
    ):
        super().__init__(metrics, limits)
        self._features = features
        self._tables = {
            "getUserFeatures": (user_table, user_columns),
            "getItemFeatures": (item_table, item_columns),
        }

    def functions(self) -> dict[str, Method]:
        return super().functions() | {
            name: lambda request, context, named=named: self._read(named, request, context)
            for name, named in self._tables.items()
        }

    def _read(
        self, named: tuple[str, Sequence[str] | None], request: Message, context: GrpcCall
    ) -> Message:
        table, columns = named
        self.limits.check_ids(request.ID)
        header = _headers(context)
        requested = header.get("bigdl-columns")
        if requested is not None:
            listed = list(dict.fromkeys(requested.split(",")))
            refused = [] if columns is None else [name for name in listed if name not in columns]
            if refused:
                raise UsageError(
                    f"The service does not provide the columns {refused}",
                    code="request-denied",
                    columns=refused,
                )
            columns = listed
        features = self._features.read(table, np.array(request.ID, np.int64), columns)
        payload = header.get(wire.PAYLOAD, wire.JSON)
        if payload == wire.ARROW:
            batch = features.to_arrow()
            is_known = pa.array(features.found)
            content = [wire.encode_arrow(batch.append_column("__found__", is_known))]
        elif payload == wire.JSON:
            rows = features.to_arrow().to_pylist()
            content = [
                wire.encode_json(list(row.values())) if is_known else ""
                for row, is_known in zip(rows, features.found.tolist(), strict=True)
            ]
        else:
            raise UsageError(
                f"{wire.PAYLOAD} should be arrow or json, got {payload!r}",
                code="request-invalid",
                argument=wire.PAYLOAD,
                allowed=["arrow", "json"],
            )
        context.set_trailing_metadata(((wire.PAYLOAD, payload),))
        return self._message(
            "Features", colNames=list(features.columns), b64Feature=content, ID=request.ID
        )


class RecallService(Service):
    """gRPC service ``recall.Recall``, which finds candidate items for users.

    Parameters
    ----------
    recall : CandidateGenerator
    index : ItemIndex, optional
        Index that ``addItem`` adds items to.
    metrics, limits
        See :class:`Service`.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, GrpcServer, IndexRecall, ItemIndex
    >>> from bigdl.friesian.serving import RecallService, RemoteRecall, Security
    >>> store, index = EmbeddedStore("features"), ItemIndex([10, 20], np.eye(2))
    >>> _ = store.replace({"user": pd.DataFrame({"user": [3], "prediction": [[1.0, 2.0]]})})
    >>> service, security = RecallService(IndexRecall(store, index), index), Security(changes=True)
    >>> with GrpcServer([service], security=security) as server:
    ...     with RemoteRecall(f"127.0.0.1:{server.port}") as recall:
    ...         recall.add_item(30, [3, 3])
    ...         recall.candidates(np.array([3]), 2).ids.tolist()
    [30, 20]
    """

    name = "recall.Recall"

    def __init__(
        self,
        recall: CandidateGenerator,
        index: ItemIndex | None = None,
        metrics: ServingMetrics | None = None,
        limits: ServingLimits | None = None,
    ):
        super().__init__(metrics, limits)
        self._recall, self._index = recall, index

    def functions(self) -> dict[str, Method]:
        return super().functions() | {"searchCandidates": self._search, "addItem": self._add}

    def _search(self, request: Message, context: GrpcCall) -> Message:
        k = self.limits.check_k("k", request.k)
        users, chosen = np.array([request.userID], np.int64), _filter_of(request.filter)
        if chosen is None:
            candidates = self._recall.candidates(users, k)
        elif not isinstance(self._recall, FilteringGenerator):
            raise GrpcRefusal("FAILED_PRECONDITION", "This service does not support filters")
        else:
            self._recall.check_filter(chosen)
            candidates = self._recall.candidates(users, k, chosen)
        if not len(candidates.ids):
            raise GrpcRefusal("NOT_FOUND", f"There are no candidates for the user {request.userID}")
        scores = candidates.scores.tolist() if "bigdl-scores" in _headers(context) else ()
        return self._message(
            "Candidates",
            candidate=_as_int32(candidates.ids).tolist(),
            score=scores,
            partial=candidates.partial,
        )

    def _add(self, request: Message, context: GrpcCall) -> Message:
        if self._index is None:
            raise GrpcRefusal("FAILED_PRECONDITION", "This service has no index to add items to")
        self._index.add_item(request.itemID, np.array(request.itemVector, np.float32))
        return wire.message("google.protobuf.Empty")()


class RankingService(Service):
    """gRPC service ``ranking.Ranking``, which scores rows.

    Parameters
    ----------
    ranker : Ranker
    metrics, limits
        See :class:`Service`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import GrpcServer, RankingService, RemoteRanker
    >>> class Double:
    ...     def predict(self, inputs):
    ...         return 2 * inputs["price"]
    >>> with GrpcServer([RankingService(Double())]) as server:
    ...     with RemoteRanker(f"127.0.0.1:{server.port}") as ranker:
    ...         ranker.predict({"price": np.array([1.5, 2])}).tolist()
    [3.0, 4.0]
    """

    name = "ranking.Ranking"

    def __init__(
        self,
        ranker: Ranker,
        metrics: ServingMetrics | None = None,
        limits: ServingLimits | None = None,
    ):
        super().__init__(metrics, limits)
        self._ranker = ranker

    def functions(self) -> dict[str, Method]:
        return super().functions() | {"doPredict": self._predict}

    def _predict(self, request: Message, context: GrpcCall) -> Message:
        payload, columns = wire.decode_payload(request.encodedStr)
        wanted = getattr(self._ranker, "columns", None)
        if wanted is not None and (missing := [each for each in wanted if each not in columns]):
            raise UsageError(
                f"The ranker needs {missing}, which the request lacks",
                code="request-invalid",
                columns=missing,
            )
        if wanted is not None:
            columns = {name: columns[name] for name in wanted}
        rows = max(map(len, columns.values()), default=0)
        if rows > self.limits.max_pairs:
            raise UsageError(
                f"A request may have at most {self.limits.max_pairs} rows, got {rows}",
                code="request-limit",
                limit=self.limits.max_pairs,
            )
        if strange := [name for name, each in columns.items() if not wire.has_numbers(each)]:
            raise UsageError(
                f"The ranker needs numeric columns, but {strange} are not numeric",
                code="request-invalid",
                columns=strange,
            )
        inputs = {name: as_numpy(column, name) for name, column in columns.items()}
        try:
            version = _headers(context).get("x-model-version")
            if isinstance(self._ranker, ServedRanker):
                output = self._ranker.predict(inputs, version, _time_left(context))
            else:
                output = self._ranker.predict(inputs)
        except UnknownModelError as error:
            raise GrpcRefusal("INVALID_ARGUMENT", str(error)) from None
        except UsageError:
            raise
        except (TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"The ranker does not accept these inputs: {one_line(error)}",
                code="request-invalid",
            ) from error
        scores = output if isinstance(output, Mapping) else {"prediction": output}
        context.set_trailing_metadata(((wire.PAYLOAD, payload),))
        if payload == wire.ARROW:
            arrays = {name: np.asarray(each) for name, each in scores.items()}
            return self._message(
                "Prediction", predictStr=wire.encode_arrow(wire.batch_of_arrays(arrays))
            )
        lists = {name: np.asarray(each).tolist() for name, each in scores.items()}
        value = lists if isinstance(output, Mapping) else lists["prediction"]
        return self._message("Prediction", predictStr=wire.encode_json(value))


class RecommenderService(Service):
    """gRPC service ``recommender.Recommender``, which recommends items to users.

    The trailing metadata ``bigdl-sources`` of an answer counts its users by the source of their
    items, such as ``popular=1,ranked=9``. The field ``source`` marks each user whose items are not
    ranked.

    Parameters
    ----------
    recommender : Recommender
    metrics, limits
        See :class:`Service`.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, GrpcServer, IndexRecall, ItemIndex
    >>> from bigdl.friesian.serving import Recommender, RecommenderClient, RecommenderService
    >>> store, index = EmbeddedStore("features"), ItemIndex([10, 20], np.eye(2))
    >>> users = pd.DataFrame({"user": [3], "prediction": [[1.0, 2.0]]})
    >>> items = pd.DataFrame({"item": [10, 20], "price": [5, 4]})
    >>> _ = store.replace({"user": users, "item": items})
    >>> class Cheapest:
    ...     def predict(self, inputs):
    ...         return -inputs["price"]
    >>> recommender = Recommender(store, IndexRecall(store, index), Cheapest(), ["price"])
    >>> with GrpcServer([RecommenderService(recommender)]) as server:
    ...     with RecommenderClient(f"127.0.0.1:{server.port}") as client:
    ...         client.recommend([3], k=2)[0].item_ids.tolist()
    [20, 10]
    """

    name = "recommender.Recommender"

    def __init__(
        self,
        recommender: Recommender,
        metrics: ServingMetrics | None = None,
        limits: ServingLimits | None = None,
    ):
        super().__init__(metrics or recommender.metrics, limits)
        self._recommender = recommender

    def functions(self) -> dict[str, Method]:
        return super().functions() | {
            "getRecommendIDs": self._recommend,
            "appendEvents": self._append,
            "getClientMetrics": self._get_client_metrics,
        }

    def _recommend(self, request: Message, context: GrpcCall) -> Message:
        self.limits.check_ids(request.ID)
        k = self.limits.check_k("recommendNum", request.recommendNum)
        candidates = None
        if request.candidateNum:
            candidates = self.limits.check_k("candidateNum", request.candidateNum)
            if candidates < k:
                raise GrpcRefusal(
                    "FAILED_PRECONDITION",
                    f"candidateNum should be at least recommendNum, got {candidates} and {k}",
                )
        users = np.array(request.ID, np.int64)
        count = candidates or max(k, self._recommender.default_candidates)
        self.limits.check_pairs(len(users), count)
        answers = self._recommender.recommend(
            *(users, k, candidates, _time_left(context), lambda: not context.is_active()),
            _filter_of(request.filter),
        )
        counts = Counter(each.source for each in answers)
        source_counts = ",".join(f"{source}={count}" for source, count in sorted(counts.items()))
        # leading metadata would be sent as a separate message
        context.set_trailing_metadata((("bigdl-sources", source_counts),))
        lists = [
            self._message(
                "IDProbs",
                ID=_as_int32(each.item_ids).tolist(),
                prob=each.scores.tolist(),
                source="" if each.source == RANKED else each.source,
                partial=each.partial,
            )
            for each in answers
        ]
        return self._message("RecommendIDProbs", IDProbList=lists)

    def _append(self, request: Message, context: GrpcCall) -> Message:
        self.limits.check_ids(request.events)
        result = self._recommender.append(
            Event.of(
                {"user": each.user, "item": each.item, "id": each.id}
                | ({"time": each.time} if each.HasField("time") else {})
            )
            for each in request.events
        )
        return self._message(
            "AppendedEvents", added=result.added, repeated_events=result.repeated, late=result.late
        )

    def _get_client_metrics(self, request: Message, context: GrpcCall) -> Message:
        stages = self._recommender.stages
        stage_metrics = [each for each in self.metrics.summary() if each["name"] in stages]
        return self._message("ServerMessage", str=json.dumps(stage_metrics))


def _filter_of(text: str) -> ItemFilter | None:
    """Return the filter in a request's JSON; None for an empty string."""
    return ItemFilter.of(parse_json(text.encode())) if text else None


def _headers(context: GrpcCall) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def _time_left(context: GrpcCall) -> float | None:
    remaining = context.time_remaining()
    if remaining is None or remaining > 3600:  # gRPC reports a very long time for no deadline
        return None
    margin = min(max(remaining * _MARGIN_PART, _MARGIN), _MOST_MARGIN)
    return max(remaining - margin, 0.0)


def _as_int32(ids: np.ndarray) -> np.ndarray:
    if len(ids) and (ids.max() > _GREATEST_ID or ids.min() < -_GREATEST_ID - 1):
        raise GrpcRefusal(
            "OUT_OF_RANGE",
            "An item has an id of more than 32 bits, which the protocol cannot represent",
        )
    return ids
