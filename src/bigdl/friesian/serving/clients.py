"""gRPC clients of the services: remote stages, and the recommender itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from bigdl.common.errors import UsageError
from bigdl.friesian.serving import wire
from bigdl.friesian.serving.events import Appended, Event
from bigdl.friesian.serving.filters import ItemAttributes, ItemFilter
from bigdl.friesian.serving.index import Candidates
from bigdl.friesian.serving.rankers import Scores
from bigdl.friesian.serving.rows import Column, Features, Ids, as_numpy, ids_of
from bigdl.friesian.serving.stages import RANKED, Recommendation
from bigdl.nano.serving.grpc_client import GrpcClient

_AT_ONCE = 32  # concurrent calls per request; a service accepts a few hundred in total
_SCORES = (("bigdl-scores", "1"),)
_OPTIONS = (
    ("grpc.max_metadata_size", 1 << 16),
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect to a restarted service within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class ClientOptions(TypedDict, total=False):
    """Keyword arguments that every :class:`ServiceClient` accepts."""

    timeout: float
    token: str | None
    authority: str | None
    admin_token: str | None


class ServiceClient(GrpcClient):
    """gRPC connection to one service, which closes when the context exits.

    Parameters
    ----------
    address : str
        ``host:port``.
    timeout : float, default 10.0
        Seconds to wait for an answer.
    token : str, optional
        Bearer token.
    authority : str, optional
        PEM file with the certificate that verifies the server's certificate; enables TLS.
    admin_token : str, optional
        Token for calls that change the service, instead of `token`.
    """

    service: str

    def __init__(
        self,
        address: str,
        timeout: float = 10.0,
        token: str | None = None,
        authority: str | None = None,
        admin_token: str | None = None,
    ):
        if authority is not None and not Path(authority).is_file():
            raise UsageError(
                f"The certificate file {authority} does not exist",
                code="path-missing",
                path=str(authority),
            )
        super().__init__(
            address,
            self.service,
            lambda method: wire.methods(self.service)[method][1],
            timeout=timeout,
            token=token,
            tls=authority is not None,
            authority=None if authority is None else Path(authority).read_bytes(),
            options=_OPTIONS,
        )
        self._admin_token = admin_token

    def _message(self, method: str, values: Mapping[str, object]) -> wire.MessageClass:
        return wire.methods(self.service)[method][0](**values)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics that the service reports through ``getMetrics``."""
        return json.loads(self.call("getMetrics", self._message("getMetrics", {})).str)

    def reset_metrics(self) -> None:
        """Reset the metrics of the service."""
        empty = self._message("resetMetrics", {})
        self.call("resetMetrics", empty, token=self._admin_token)


class RemoteFeatures(ServiceClient):
    """Client of a :class:`FeatureService`, which can replace a store in a recommender.

    Parameters
    ----------
    address, timeout, token, authority, admin_token
        See :class:`ServiceClient`.
    user_table : str, default "user"
        Local name of the user table; all other names mean the item table.
    most_ids : int, default 10000
        Maximum number of ids per request; larger reads are divided.

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

    service = "feature.Feature"

    def __init__(
        self,
        address: str,
        timeout: float = 10.0,
        token: str | None = None,
        authority: str | None = None,
        admin_token: str | None = None,
        *,
        user_table: str = "user",
        most_ids: int = 10_000,
    ):
        super().__init__(address, timeout, token, authority, admin_token)
        self._user_table, self._most_ids = user_table, most_ids
        self._names: dict[str, list[str]] = {}
        self._requesting = threading.Lock()

    def names(self, table: str) -> list[str]:
        """Return the column names of a table."""
        if table not in self._names:
            with self._requesting:
                self._names[table] = list(self._request(table, np.zeros(0, np.int64), None).columns)
        return self._names[table]

    def read(self, table: str, ids: Ids, columns: Sequence[str] | None = None) -> Features:
        """Return the rows of `ids`, in the same order; see :meth:`FeatureStore.read`."""
        wanted = np.asarray(ids, np.int64)
        if len(wanted) <= self._most_ids:
            return self._request(table, wanted, columns)
        return concat_features(
            [
                self._request(table, wanted[start : start + self._most_ids], columns)
                for start in range(0, len(wanted), self._most_ids)
            ]
        )

    def _request(self, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
        method = "getUserFeatures" if table == self._user_table else "getItemFeatures"
        headers: tuple = ((wire.PAYLOAD, wire.ARROW),)
        if columns is not None:
            headers = (*headers, ("bigdl-columns", ",".join(columns)))
        answer = self.call(method, self._message(method, {"ID": ids}), headers)
        if len(answer.b64Feature) != 1:
            raise UsageError(
                f"The service at {self._address} does not support Arrow payloads",
                code="unsupported",
                address=self._address,
            )
        arrays = wire.decode_payload(answer.b64Feature[0])[1]
        is_known = arrays.pop("__found__").to_numpy(zero_copy_only=False)
        return Features(ids, is_known, {name: _column(each) for name, each in arrays.items()})


def concat_features(parts: Sequence[Features]) -> Features:
    """Concatenate the results of several reads from one table."""
    joined = pa.Table.from_batches([each.to_arrow() for each in parts])
    return Features(
        np.concatenate([each.ids for each in parts]),
        np.concatenate([each.found for each in parts]),
        {name: _column(joined[name].combine_chunks()) for name in joined.column_names},
    )


def _column(array: pa.Array) -> Column:
    """Convert vectors, or numbers without nulls, to NumPy arrays; return other arrays unchanged."""
    dtype = array.type
    if pa.types.is_fixed_size_list(dtype):
        return array.flatten().to_numpy(zero_copy_only=False).reshape(len(array), dtype.list_size)
    is_number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or dtype == pa.bool_()
    if is_number and not array.null_count:
        return array.to_numpy(zero_copy_only=False)
    return array


class RemoteRecall(ServiceClient):
    """Client of a :class:`RecallService`, which finds candidate items for users.

    Parameters
    ----------
    address, timeout, token, authority, admin_token
        See :class:`ServiceClient`.

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

    service = "recall.Recall"

    def check_filter(self, item_filter: ItemFilter) -> None:
        """Do nothing: the service checks the filter in each search."""

    def accepts(self, items: np.ndarray, item_filter: ItemFilter) -> np.ndarray:
        """Return a mask of the items that a filter certainly accepts.

        With conditions on attributes, which only the service knows, it accepts none.
        """
        if item_filter.where:
            return np.zeros(len(items), bool)
        return ItemAttributes().mask(items, item_filter)

    def candidates(
        self, user_ids: np.ndarray, k: int, item_filter: ItemFilter | None = None
    ) -> Candidates:
        """Return up to `k` items per user; send requests for several users concurrently."""
        answered: list[tuple[np.ndarray, np.ndarray]] = []
        partial = False
        for start in range(0, len(user_ids), _AT_ONCE):
            users = user_ids[start : start + _AT_ONCE].tolist()
            answers = self._search(users, k, item_filter)
            answered += [each[:2] for each in answers]
            partial = partial or any(each[2] for each in answers)
        return Candidates.joined(answered, partial)

    def _search(
        self, users: list[int], k: int, item_filter: ItemFilter | None
    ) -> list[tuple[np.ndarray, np.ndarray, bool]]:
        name = "searchCandidates"
        more = _filter_field(item_filter)
        requests = [self._message(name, {"userID": user, "k": k, **more}) for user in users]
        waiting: list[Callable[[], wire.MessageClass]] = [
            lambda: self.call(
                name, requests[0], _SCORES
            )  # a blocking call, without the cost of a future
        ]
        if len(users) > 1:
            waiting = [self.send(name, request, _SCORES).result for request in requests]
        return [self._candidates_of(answer, item_filter is not None) for answer in waiting]

    def _candidates_of(
        self, answer: Callable[[], Any], has_filter: bool
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        try:
            response = answer()
        except self._rpc_error as error:
            if has_filter and error.code().name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"):
                raise UsageError(
                    error.details(), code="request-invalid", argument="filter"
                ) from None
            if error.code().name != "NOT_FOUND":  # unknown user
                raise
            return np.zeros(0, np.int64), np.zeros(0, np.float32), False
        ids = np.array(response.candidate, np.int64)
        scores = np.array(response.score or np.zeros(len(ids)), np.float32)
        return ids, scores, response.partial

    def add_item(self, item_id: int, vector: ArrayLike) -> None:
        """Add an item to the index of the service."""
        values = np.asarray(vector, np.float32).tolist()
        item = self._message("addItem", {"itemID": item_id, "itemVector": values})
        self.call("addItem", item, token=self._admin_token)


def _filter_field(item_filter: ItemFilter | None) -> dict[str, str]:
    """Return the field of a request with the JSON of a filter."""
    return {} if item_filter is None else {"filter": json.dumps(item_filter.to_json())}


class RemoteRanker(ServiceClient):
    """Client of a :class:`RankingService`, which scores rows.

    Parameters
    ----------
    address, timeout, token, authority, admin_token
        See :class:`ServiceClient`.

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

    service = "ranking.Ranking"

    def predict(self, inputs: dict[str, np.ndarray]) -> Scores:
        """Return a score for each row, or a dict from tasks to scores for a multi-task model."""
        text = wire.encode_arrow(wire.batch_of_arrays(inputs))
        answer = self.call("doPredict", self._message("doPredict", {"encodedStr": text}))
        columns = wire.decode_payload(answer.predictStr)[1]
        scores = {name: as_numpy(each, name) for name, each in columns.items()}
        return scores["prediction"] if list(scores) == ["prediction"] else scores


class RecommenderClient(ServiceClient):
    """Client of a :class:`RecommenderService`, which recommends items to users.

    Parameters
    ----------
    address, timeout, token, authority, admin_token
        See :class:`ServiceClient`.

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

    service = "recommender.Recommender"

    def append(self, events: Iterable[Event]) -> Appended:
        """Append events to the histories of users; later requests use them.

        Parameters
        ----------
        events : iterable of Event

        Returns
        -------
        Appended
        """
        messages = [
            {"user": each.user, "item": each.item, "time": each.time, "id": each.id}
            for each in events
        ]
        answer = self.call("appendEvents", self._message("appendEvents", {"events": messages}))
        return Appended(answer.added, answer.repeated_events, answer.late)

    def recommend(
        self,
        user_ids: Ids,
        k: int = 10,
        candidates: int = 0,
        item_filter: ItemFilter | None = None,
    ) -> list[Recommendation]:
        """Return the best items for each user.

        Parameters
        ----------
        user_ids : sequence of int
        k : int, default 10
        candidates : int, default 0
            Number of items to rank per user; 0 for the default of the service.
        item_filter : ItemFilter, optional
            Recommend only the items that it accepts.

        Returns
        -------
        list of Recommendation
        """
        users = ids_of(user_ids).tolist()
        values: dict[str, Any] = {"recommendNum": k, "candidateNum": candidates, "ID": users}
        values |= _filter_field(item_filter)
        request = self._message("getRecommendIDs", values)
        lists = self.call("getRecommendIDs", request).IDProbList
        return [
            Recommendation(
                user,
                np.array(each.ID, np.int64),
                np.array(each.prob, np.float32),
                each.source or RANKED,
                partial=each.partial,
            )
            for user, each in zip(users, lists, strict=True)
        ]
