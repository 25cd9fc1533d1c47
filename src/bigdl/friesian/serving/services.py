"""The stages of a recommender as gRPC services, with the interfaces of BigDL 2.x.

A service checks each request before a stage sees it.  What is wrong with a request is answered by
``INVALID_ARGUMENT`` and a sentence, what a stage cannot do by ``UNAVAILABLE``; neither ends the
service.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError, one_line, require
from bigdl.friesian.serving import wire
from bigdl.friesian.serving.index import ItemIndex
from bigdl.friesian.serving.metrics import ServingMetrics
from bigdl.friesian.serving.recommender import (
    RANKED,
    CallerGoneError,
    FeatureReader,
    LostShardError,
    Ranker,
    Recall,
    Recommender,
    ServedRanker,
)
from bigdl.friesian.serving.rows import as_numpy
from bigdl.nano.serving.access import (
    ADMIN,
    INFER,
    METRICS,
    ForbiddenError,
    Tokens,
    changes_allowed,
    is_loopback,
    read_pem,
    tls_files,
    warn_of_exposure,
)
from bigdl.nano.serving.batching import DeadlineError, OverloadError
from bigdl.nano.serving.grpc_port import GrpcPort
from bigdl.nano.serving.grpc_service import OPEN_METHODS, QUICK_METHODS, InferenceHandlers
from bigdl.nano.serving.grpc_service import purpose_of as purpose_of_inference

logger = logging.getLogger(__name__)

_GREATEST_ID = (1 << 31) - 1  # of int32
_PURPOSES = {
    "addItem": ADMIN,
    "resetMetrics": ADMIN,
    "getMetrics": METRICS,
    "getClientMetrics": METRICS,
}
# Between the end of the work and the deadline of the caller: the way back of the answer, which a
# busy machine makes longer. Seconds at least and at most, and the part of the time that is left.
_MARGIN, _MOST_MARGIN, _MARGIN_PART = 0.005, 0.25, 0.05


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for.

    Attributes
    ----------
    max_ids : int
        Users of a recommendation, or ids whose features are read.
    max_k : int
        Items of an answer, and candidates.
    max_pairs : int
        Users times candidates of a recommendation, and rows that a ranker scores.
    max_bytes : int
        Size of a request.
    max_requests : int
        Requests at the same time; more are refused by ``RESOURCE_EXHAUSTED``.

    Examples
    --------
    >>> from bigdl.friesian.serving import Limits
    >>> try:
    ...     Limits(max_k=100).check_k("k", 101)
    ... except ValueError as error:
    ...     print(error)
    k should be an integer from 1 to 100, got 101
    """

    max_ids: int = 10_000
    max_k: int = 10_000
    max_pairs: int = 5_000_000
    max_bytes: int = 16 << 20
    max_requests: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value, 1)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise a UsageError if these are too many."""
        if len(ids) > self.max_ids:
            raise UsageError(
                f"A request may have {self.max_ids} ids, got {len(ids)}", code="request-limit"
            )

    def check_pairs(self, users: int, candidates: int) -> None:
        """Raise a UsageError if a request asks for more pairs of user and candidate."""
        if users * candidates > self.max_pairs:
            raise UsageError(
                f"A request may have {self.max_pairs} candidates for all its ids, got {users} ids "
                f"and {candidates} candidates of each; ask for fewer at a time",
                code="request-limit",
                limit=self.max_pairs,
            )

    def check_k(self, name: str, value: int) -> int:
        """Return a number of items; raises a UsageError if it is none or too large."""
        return check_integer(name, value, 1, self.max_k)


class Refused(Exception):
    """A request that is answered by a status of its own.

    Parameters
    ----------
    status : str
        Of ``grpc.StatusCode``.
    sentence : str
    """

    def __init__(self, status: str, sentence: str):
        self.status = status
        super().__init__(sentence)


class Service:
    """The base of all services: checks, times, ``getMetrics`` and ``resetMetrics``.

    Parameters
    ----------
    metrics : ServingMetrics, optional
    limits : Limits, optional
    """

    name: str  # with its package, as in the proto

    def __init__(self, metrics: ServingMetrics | None = None, limits: Limits | None = None):
        self.metrics = metrics or ServingMetrics()
        self.limits = limits or Limits()

    @property
    def _package(self) -> str:
        return self.name.partition(".")[0]

    def _message(self, name: str, **values: Any) -> Any:
        return wire.message(f"{self._package}.{name}")(**values)

    def functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        """Return the methods of the service by their names."""
        return {"getMetrics": self._get_metrics, "resetMetrics": self._reset_metrics}

    def _get_metrics(self, request: Any, context: Any) -> Any:
        return self._message("ServerMessage", str=self.metrics.to_json())

    def _reset_metrics(self, request: Any, context: Any) -> Any:
        self.metrics.reset()
        return wire.message("google.protobuf.Empty")()

    def handler(self) -> Any:
        """Return what a server of gRPC takes."""
        return wire.handler_of(self.name, self.functions(), self._guarded)

    def _guarded(
        self, method: str, request_class: Any, function: Callable, content: bytes, context: Any
    ) -> Any:
        grpc = require("grpc", "serving")
        try:
            try:
                request = request_class.FromString(content)
            except Exception:  # whatever protobuf says of bytes that are no message
                raise UsageError(
                    f"The request is no {request_class.DESCRIPTOR.full_name}",
                    code="request-invalid",
                ) from None
            with self.metrics.time(method):
                return function(request, context)
        except UsageError as error:
            status, sentence = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except Refused as error:
            status, sentence = getattr(grpc.StatusCode, error.status), str(error)
        except grpc.RpcError as error:
            status = grpc.StatusCode.UNAVAILABLE
            sentence = f"A service behind {method} failed: {one_line(error)}"
        except LostShardError as error:
            status, sentence = grpc.StatusCode.UNAVAILABLE, str(error)
        except OverloadError as error:
            status, sentence = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        except DeadlineError as error:
            status, sentence = grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
        except CallerGoneError as error:
            status, sentence = grpc.StatusCode.CANCELLED, str(error)
        except Exception as error:
            logger.exception("%s failed", method)
            status, sentence = grpc.StatusCode.UNAVAILABLE, f"{method} failed: {one_line(error)}"
        context.abort(status, sentence)


class FeatureService(Service):
    """Features by id: the service ``feature.Feature``.

    Parameters
    ----------
    features : FeatureReader
    user_table, item_table : str
    user_columns, item_columns : sequence of str, optional
        The columns that are answered; default: all.
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
        limits: Limits | None = None,
    ):
        super().__init__(metrics, limits)
        self._features = features
        self._tables = {
            "getUserFeatures": (user_table, user_columns),
            "getItemFeatures": (item_table, item_columns),
        }

    def functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return super().functions() | {
            name: lambda request, context, named=named: self._read(named, request, context)
            for name, named in self._tables.items()
        }

    def _read(self, named: tuple[str, Sequence[str] | None], request: Any, context: Any) -> Any:
        table, columns = named
        self.limits.check_ids(request.ID)
        header = _headers(context)
        asked = header.get("bigdl-columns")
        if asked is not None:
            listed = list(dict.fromkeys(asked.split(",")))
            refused = [] if columns is None else [name for name in listed if name not in columns]
            if refused:
                raise UsageError(
                    f"The service does not answer the columns {refused}",
                    code="request-denied",
                    columns=refused,
                )
            columns = listed
        features = self._features.read(table, np.array(request.ID, np.int64), columns)
        kind = header.get(wire.PAYLOAD, wire.JSON)
        if kind == wire.ARROW:
            batch = features.to_arrow()
            is_known = pa.array(features.found)
            content = [wire.encoded(batch.append_column("__found__", is_known))]
        elif kind == wire.JSON:
            rows = features.to_arrow().to_pylist()
            content = [
                wire.encoded_json(list(row.values())) if is_known else ""
                for row, is_known in zip(rows, features.found.tolist(), strict=True)
            ]
        else:
            raise UsageError(
                f"{wire.PAYLOAD} should be arrow or json, got {kind!r}",
                code="request-invalid",
                argument=wire.PAYLOAD,
                allowed=["arrow", "json"],
            )
        context.set_trailing_metadata(((wire.PAYLOAD, kind),))
        return self._message(
            "Features", colNames=list(features.columns), b64Feature=content, ID=request.ID
        )


class RecallService(Service):
    """Candidates: the service ``recall.Recall``.

    Parameters
    ----------
    recall : Recall
    index : ItemIndex, optional
        Where ``addItem`` adds.
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
        recall: Recall,
        index: ItemIndex | None = None,
        metrics: ServingMetrics | None = None,
        limits: Limits | None = None,
    ):
        super().__init__(metrics, limits)
        self._recall, self._index = recall, index

    def functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return super().functions() | {"searchCandidates": self._search, "addItem": self._add}

    def _search(self, request: Any, context: Any) -> Any:
        k = self.limits.check_k("k", request.k)
        candidates = self._recall.candidates(np.array([request.userID], np.int64), k)
        if not len(candidates.ids):
            raise Refused("NOT_FOUND", f"There are no candidates for the user {request.userID}")
        scores = candidates.scores.tolist() if "bigdl-scores" in _headers(context) else ()
        return self._message(
            "Candidates",
            candidate=_as_int32(candidates.ids).tolist(),
            score=scores,
            partial=candidates.partial,
        )

    def _add(self, request: Any, context: Any) -> Any:
        if self._index is None:
            raise Refused("FAILED_PRECONDITION", "This service has no index to add items to")
        self._index.add_item(request.itemID, np.array(request.itemVector, np.float32))
        return wire.message("google.protobuf.Empty")()


class RankingService(Service):
    """Scores: the service ``ranking.Ranking``.

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
        limits: Limits | None = None,
    ):
        super().__init__(metrics, limits)
        self._ranker = ranker

    def functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return super().functions() | {"doPredict": self._predict}

    def _predict(self, request: Any, context: Any) -> Any:
        kind, columns = wire.decoded(request.encodedStr)
        wanted = getattr(self._ranker, "columns", None)
        if wanted is not None and (missing := [each for each in wanted if each not in columns]):
            raise UsageError(
                f"The ranker takes {missing}, which the request lacks",
                code="request-invalid",
                columns=missing,
            )
        if wanted is not None:
            columns = {name: columns[name] for name in wanted}
        rows = max(map(len, columns.values()), default=0)
        if rows > self.limits.max_pairs:
            raise UsageError(
                f"A request may have {self.limits.max_pairs} rows, got {rows}",
                code="request-limit",
                limit=self.limits.max_pairs,
            )
        if strange := [name for name, each in columns.items() if not wire.has_numbers(each)]:
            raise UsageError(
                f"The ranker takes numbers, but {strange} are none",
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
        except UsageError:
            raise
        except (TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"The ranker does not take these inputs: {one_line(error)}", code="request-invalid"
            ) from error
        scores = output if isinstance(output, Mapping) else {"prediction": output}
        context.set_trailing_metadata(((wire.PAYLOAD, kind),))
        if kind == wire.ARROW:
            arrays = {name: np.asarray(each) for name, each in scores.items()}
            return self._message(
                "Prediction", predictStr=wire.encoded(wire.batch_of_arrays(arrays))
            )
        lists = {name: np.asarray(each).tolist() for name, each in scores.items()}
        value = lists if isinstance(output, Mapping) else lists["prediction"]
        return self._message("Prediction", predictStr=wire.encoded_json(value))


class RecommenderService(Service):
    """Recommendations: the service ``recommender.Recommender``.

    ``bigdl-sources`` in the trailing metadata of an answer counts its users by where their items
    come from, such as ``popular=1,ranked=9``; a field of its own marks each user whom the ranker
    did not serve.

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
        limits: Limits | None = None,
    ):
        super().__init__(metrics or recommender.metrics, limits)
        self._recommender = recommender

    def functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return super().functions() | {
            "getRecommendIDs": self._recommend,
            "getClientMetrics": self._get_client_metrics,
        }

    def _recommend(self, request: Any, context: Any) -> Any:
        self.limits.check_ids(request.ID)
        k = self.limits.check_k("recommendNum", request.recommendNum)
        candidates = None
        if request.candidateNum:
            candidates = self.limits.check_k("candidateNum", request.candidateNum)
            if candidates < k:
                raise Refused(
                    "FAILED_PRECONDITION",
                    f"candidateNum should be at least recommendNum, got {candidates} and {k}",
                )
        users = np.array(request.ID, np.int64)
        count = candidates or max(k, self._recommender.default_candidates)
        self.limits.check_pairs(len(users), count)
        answers = self._recommender.recommend(
            users, k, candidates, _time_left(context), lambda: not context.is_active()
        )
        counts = Counter(each.source for each in answers)
        said = ",".join(f"{source}={count}" for source, count in sorted(counts.items()))
        # leading metadata would be a message of their own
        context.set_trailing_metadata((("bigdl-sources", said),))
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

    def _get_client_metrics(self, request: Any, context: Any) -> Any:
        stages = ("recall", "features", "ranking")
        figures = [each for each in self.metrics.summary() if each["name"] in stages]
        return self._message("ServerMessage", str=json.dumps(figures))


class _Health(Service):
    """The usual health service of gRPC: all services are ready, or the server ends."""

    name = "grpc.health.v1.Health"

    def __init__(self, names: Sequence[str]):
        super().__init__()
        self._names = {"", *names}
        self.is_ready = True

    def functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return {"Check": self._check}

    def _check(self, request: Any, context: Any) -> Any:
        if request.service not in self._names:
            raise Refused("NOT_FOUND", f"There is no service {request.service!r}")
        answer = wire.message("grpc.health.v1.HealthCheckResponse")
        return answer(status="SERVING" if self.is_ready else "NOT_SERVING")


def _headers(context: Any) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def _time_left(context: Any) -> float | None:
    left = context.time_remaining()
    if left is None or left > 3600:  # gRPC has a very long time for none
        return None
    margin = min(max(left * _MARGIN_PART, _MARGIN), _MOST_MARGIN)
    return max(left - margin, 0.0)


def _as_int32(ids: np.ndarray) -> np.ndarray:
    if len(ids) and (ids.max() > _GREATEST_ID or ids.min() < -_GREATEST_ID - 1):
        raise Refused(
            "OUT_OF_RANGE", "An item has an id of more than 32 bits, which the protocol cannot say"
        )
    return ids


# -- servers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Security:
    """Who may reach a server, and how.

    Attributes
    ----------
    host : str
        The address that it listens on.
    expose : bool
        Must be True for another address than one of this machine alone.
    certificate, key : str or None
        Files in PEM for TLS.
    token : str or None
        What requests have to carry in the header ``authorization: Bearer <token>``.
    admin_token : str or None
        What ``addItem`` and ``resetMetrics`` need in its place; it is good for everything.
    metrics_token : str or None
        What ``getMetrics``, ``getClientMetrics`` and ``/metrics`` need in place of `token`.
    changes : bool or None
        True if ``addItem`` and ``resetMetrics`` are allowed, which needs an admin token where there
        is a token. Default: only with an admin token.

    Examples
    --------
    >>> from bigdl.friesian.serving import Security
    >>> try:
    ...     Security(host="192.168.0.7")
    ... except ValueError as error:
    ...     print(str(error)[:55])
    The address 192.168.0.7 can be reached from other machi
    >>> Security(token="secret").check_access("Bearer secret")
    """

    host: str = "127.0.0.1"
    expose: bool = False
    certificate: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    metrics_token: str | None = field(default=None, repr=False)
    changes: bool | None = None

    def __post_init__(self) -> None:
        allowed = changes_allowed(self.changes, self.tokens)
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "TLS needs both a certificate and a key",
                code="argument-missing",
                argument="certificate",
            )
        self.files()
        if is_loopback(self.host):
            return
        if not self.expose:
            raise UsageError(
                f"The address {self.host} can be reached from other machines; set expose to True "
                "if that is meant, or use 127.0.0.1",
                code="argument-missing",
                argument="expose",
                address=self.host,
            )
        tls = self.certificate is not None
        warn_of_exposure(self.host, tls=tls, tokens=self.tokens, changes=allowed, stacklevel=5)

    @property
    def tokens(self) -> Tokens:
        """All tokens."""
        return Tokens(self.token, self.admin_token, self.metrics_token)

    def files(self) -> tuple[Path, Path] | None:
        """Return the files of certificate and key, if there is TLS."""
        if self.certificate is None or self.key is None:
            return None
        return tls_files(self.certificate, self.key)

    def check_access(self, authorization: str | None, purpose: str = INFER) -> None:
        """Raise an error if the header of a request lacks the token for its purpose."""
        self.tokens.check(authorization, purpose)

    def check_method(self, authorization: str | None, path: str) -> None:
        """Raise an error if a method of gRPC may not be called with the header of a request."""
        service, _, method = path.rpartition("/")
        if service == f"/{InferenceHandlers.name}":
            self.check_access(authorization, purpose_of_inference(path))
            return
        purpose = _PURPOSES.get(method, INFER)
        self.check_access(authorization, purpose)
        if purpose == ADMIN and not changes_allowed(self.changes, self.tokens):
            raise ForbiddenError(
                f"The server does not let clients change it by {method}; set changes or an admin "
                "token for it"
            )


class GrpcServer:
    """Services on a port; a context manager that ends them.

    Parameters
    ----------
    services : sequence of Service or InferenceHandlers
    port : int, default 0
        0 takes a free one.
    security : Security, optional
    limits : Limits, optional
    threads : int, default 16
        Requests that are worked on at the same time.
    shares_port : bool, default False
        Other processes listen on the port, too.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import GrpcServer, RankingService, RemoteRanker
    >>> class Sum:
    ...     def predict(self, inputs):
    ...         return inputs["a"] + inputs["b"]
    >>> with GrpcServer([RankingService(Sum())]) as server:
    ...     with RemoteRanker(f"127.0.0.1:{server.port}") as ranker:
    ...         ranker.predict({"a": np.array([1, 2]), "b": np.array([3, 4])}).tolist()
    [4, 6]
    """

    def __init__(
        self,
        services: Sequence[Service | InferenceHandlers],
        port: int = 0,
        security: Security | None = None,
        limits: Limits | None = None,
        threads: int = 16,
        shares_port: bool = False,
    ):
        security, limits = security or Security(), limits or Limits()
        check_integer("port", port, 0, 65535)
        self._health = _Health([each.name for each in services])
        self._port = GrpcPort(
            security.host,
            port,
            [each.handler() for each in (*services, self._health)],
            threads=check_integer("threads", threads, 1),
            most_requests=limits.max_requests,
            most_bytes=limits.max_bytes,
            check_access=security.check_method,
            open_methods=OPEN_METHODS,
            quick_methods=[
                *QUICK_METHODS,
                *(f"/{each.name}/{method}" for each in services for method in _PURPOSES),
            ],
            pem=read_pem(security.files()),
            shares_port=shares_port,
        )
        self.port: int = self._port.port
        self._port.start()

    def stop(self, grace: float = 5.0) -> None:
        """Take no more requests, let those that run end within some seconds, and end.

        Parameters
        ----------
        grace : float, default 5.0
            Seconds.
        """
        self._health.is_ready = False
        self._port.stop(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
