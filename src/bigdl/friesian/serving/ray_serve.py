"""Deployment of a configured recommender on Ray Serve.

Each replica runs all stages in one process, as ``bigdl-friesian-serve`` does. Ray Serve distributes
the requests over the replicas and restarts lost ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError, require
from bigdl.friesian.serving.config import read_config
from bigdl.friesian.serving.http import recommendation_json
from bigdl.friesian.serving.program import Serving, limits_of

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import JSONResponse

__all__ = ["ray_application"]


class _RecommenderReplica:
    """Replica of the deployment: one process with all stages."""

    def __init__(self, path: str):
        config = read_config(path)
        self._serving = Serving(config, listens=False)
        self._recommender = self._serving.recommender
        self._limits = limits_of(config)

    def recommend(
        self,
        users: list[int],
        k: int = 10,
        candidates: int | None = None,
        deadline_ms: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return the items of each user in the format of ``POST /recommend``."""
        self._limits.check_ids(users)
        self._limits.check_k("k", k)
        if candidates is not None:
            self._limits.check_k("candidates", candidates)
        deadline = None if deadline_ms is None else float(deadline_ms) / 1000
        return [
            recommendation_json(each)
            for each in self._recommender.recommend(users, k, candidates, deadline)
        ]

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer an HTTP request that has the same body as ``POST /recommend``."""
        import asyncio

        from starlette.responses import JSONResponse

        try:
            content = await request.json()
            if not isinstance(content, dict) or not isinstance(content.get("users"), list):
                raise UsageError(
                    "The body should be a JSON object with a list of users",
                    code="request-invalid",
                    argument="users",
                )
            if strange := set(content) - {"users", "k", "candidates", "deadline_ms"}:
                raise UsageError(
                    f"The body has unknown keys {sorted(strange)}", code="request-invalid"
                )
            answers = await asyncio.to_thread(self.recommend, **content)
        except (UsageError, ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"recommendations": answers})

    def __del__(self) -> None:
        serving = getattr(self, "_serving", None)
        if serving is not None:
            serving.stop()


def ray_application(
    config: str | os.PathLike, replicas: int = 1, cpus: float = 1.0, max_requests: int = 32
) -> Application:
    """Return a Ray Serve application that runs a configured recommender.

    Parameters
    ----------
    config : str or path-like
        File of ``bigdl-friesian-serve``. The file, and the files that it names, must exist on every
        machine of the cluster. Its ports are not used.
    replicas : int, default 1
    cpus : float, default 1.0
        CPU cores per replica.
    max_requests : int, default 32
        Concurrent requests per replica; further requests wait.

    Returns
    -------
    ray.serve.Application
        Its handle has a method ``recommend(users, k, candidates, deadline_ms)``. By HTTP it accepts
        the body of ``POST /recommend``.

    Raises
    ------
    UsageError
        If the file cannot be read.

    Examples
    --------
    >>> from bigdl.friesian.serving import ray_application
    >>> try:
    ...     ray_application("none.yaml")
    ... except ValueError as error:
    ...     print(str(error)[:29])
    none.yaml cannot be read: [Er
    """
    read_config(config)
    check_integer("replicas", replicas, 1)
    serve = require("ray.serve", "serving-ray")
    deployment = serve.deployment(
        _RecommenderReplica,
        name="recommender",
        num_replicas=replicas,
        max_ongoing_requests=check_integer("max_requests", max_requests, 1),
        ray_actor_options={"num_cpus": cpus},
    )
    return deployment.bind(os.path.abspath(config))
