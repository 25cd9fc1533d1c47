"""Configuration of the serving programs: one YAML file for all stages.

Each section is validated key by key; errors name the line. The keys of the four services of BigDL
2.x are also accepted, and the program prints their new names.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bigdl.common.errors import UsageError, require
from bigdl.friesian.serving.shards import Shard, check_shards

T = TypeVar("T")
SERVICES = ("recommender", "recall", "feature", "ranking")

_KEYS: dict[str, dict[str, Any]] = {
    "store": {"location": str, "prefix": str, "keep": int},
    "features": {
        "url": str,
        "user_table": str,
        "item_table": str,
        "user_columns": [str],
        "item_columns": [str],
        "pipeline": str,
    },
    "recall": {
        "url": str,
        "index": str,
        "user_vector": str,
        "seen": str,
        "threads": int,
        "rebuild_after": int,
        "attributes": [str],
    },
    "history": {
        "events": str,
        "prefix": str,
        "most": int,
        "model": str,
        "deltas": str,
        "kind": str,
        "seen": bool,
        "cache_mb": int,
    },
    "drift": {
        "profile": str,
        "window": int,
        "every": int,
        "psi": float,
        "js": float,
        "ks": float,
    },
    "train": {
        "kafka": str,
        "topic": str,
        "files": str,
        "user": str,
        "item": str,
        "time": str,
        "model": str,
        "checkpoint": str,
        "publish": str,
        "interval_s": float,
        "most_rows": int,
        "epochs": int,
        "batch_size": int,
        "learning_rate": float,
        "loss": str,
        "full_every": int,
        "cores": int,
    },
    "ranking": {
        "url": str,
        "model": str,
        "name": str,
        "inputs": [str],
        "tensors": str,
        "trust": bool,
        "output": str,
        "threads": int,
        "shares": {str: float},
        "shadow": int,
        "max_batch_size": int,
        "max_delay_ms": float,
        "instances": int,
        "split": bool,
        "item_memory_mb": int,
        "user_memory_mb": int,
    },
    "recommender": {
        "candidates": int,
        "deadline_ms": float,
        "popular": [int],
        "prepare": str,
        "rerank": str,
        "threads": int,
    },
    "server": {
        "host": str,
        "expose": bool,
        "certificate": str,
        "key": str,
        "token_file": str,
        "admin_token_file": str,
        "metrics_token_file": str,
        "changes": bool,
        "authority": str,
        "http_port": int,
        "threads": int,
        "grace_s": float,
        "max_ids": int,
        "max_k": int,
        "max_pairs": int,
        "worker_timeout_s": float,
        "max_bytes": int,
        "max_requests": int,
        "workers": int,
        **{f"{name}_port": int for name in SERVICES},
    },
    "init": {
        "users": str,
        "items": str,
        "user_id": str,
        "item_id": str,
        "vectors": str,
        "vector_id": str,
        "vector": str,
        "kind": str,
        "metric": str,
        "events": str,
        "event_user": str,
        "event_item": str,
        "event_time": str,
    },
}
_SHARD = ("items", "users", "recall", "features")
_TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_PATHS = {
    "features.pipeline",
    "recall.index",
    "history.events",
    "history.model",
    "history.deltas",
    "drift.profile",
    "train.files",
    "train.model",
    "train.checkpoint",
    "train.publish",
    "ranking.model",
    "server.certificate",
    "server.key",
    "server.token_file",
    "server.admin_token_file",
    "server.metrics_token_file",
    "server.authority",
    "store.location",
    "init.users",
    "init.items",
    "init.vectors",
    "init.events",
}
"""Keys with paths, which are relative to the folder of the file."""

_LEGACY_KEYS: dict[str, str | None] = {
    "redisKeyPrefix": "store.prefix",
    "modelPath": "ranking.model",
    "modelParallelism": "ranking.instances",
    "indexPath": "recall.index",
    "featureServiceURL": "features.url",
    "recallServiceURL": "recall.url",
    "rankingServiceURL": "ranking.url",
    "inferenceColumns": "ranking.inputs",
    "monitorPort": "server.http_port",
    "userFeatureColumns": "features.user_columns",
    "itemFeatureColumns": "features.item_columns",
    "initialUserDataPath": "init.users",
    "initialItemDataPath": "init.items",
    "initialDataPath": "init.vectors",
    "userIDColumn": "init.user_id",
    "itemIDColumn": "init.item_id",
    "itemEmbeddingColumn": "init.vector",
    "logInterval": None,
    "inferenceBatch": None,
    "savedModelInputs": None,
    "indexDim": None,
    "part": None,
    "userModelPath": None,
    "itemModelPath": None,
    "redisClusterItemSlotType": None,
    "serviceType": None,
}
_LEGACY_REDIS_KEYS = ("redisUrl", "redisType", "redisSentinelMasterName", "redisSentinelMasterURL")
_REDIS_SCHEMES = {"standalone": "redis", "sentinel": "redis+sentinel", "cluster": "redis+cluster"}


@dataclass
class Config:
    """Settings read from a configuration file.

    Attributes
    ----------
    path : str
    values : dict of str to object
        By section and key, such as ``recall.index``.
    lines : dict of str to int
        Line number of each key.
    notes : list of str
        New names of keys of BigDL 2.x.
    """

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    stages: list[tuple[str, dict[str, object]]] | None = None

    def of_shard(self, number: int, replica: int = 0) -> Config:
        """Return the configuration of one shard, with the shard's store, index and ports.

        Raises
        ------
        UsageError
            If the shard or replica does not exist.
        """
        if not 0 <= number < len(self.shards):
            raise UsageError(
                f"{self.path}: there is no shard {number}; the section shards has "
                f"{len(self.shards)}",
                code="argument-value",
                path=str(self.path),
            )
        shard = self.shards[number]
        values = {
            key: value
            for key, value in self.values.items()
            if key not in ("server.http_port", *(f"server.{name}_port" for name in SERVICES))
        }
        part = f"shard-{shard.items[0]}-{shard.items[1]}"
        if "recall.index" in values:
            values["recall.index"] = os.path.join(values["recall.index"], part)
        location = values.get("store.location", "")
        if "://" in location:
            values["store.prefix"] = f"{values.get('store.prefix', '')}{part}_"
        elif location:
            values["store.location"] = os.path.join(location, part)
        for name, addresses in (("recall", shard.recall), ("feature", shard.features)):
            if not 0 <= replica < len(addresses):
                raise UsageError(
                    f"{self.path}: the shard {number} has no replica {replica} of {name}, only "
                    f"{len(addresses)}",
                    code="argument-value",
                    path=str(self.path),
                )
            values[f"server.{name}_port"] = int(addresses[replica].rpartition(":")[2])
        return replace(self, values=values)

    def get(self, key: str, default: object = None) -> Any:  # a value of YAML
        """Return the configured value of ``section.key``, or a default."""
        return self.values.get(key, default)

    def needed(self, key: str, why: str) -> Any:  # a value of YAML
        """Return the value of a required key; raise a UsageError if it is missing."""
        if key not in self.values:
            section, _, name = key.partition(".")
            raise UsageError(
                f"{self.path}: {why} needs {name} in the section {section}",
                code="argument-missing",
                argument=key,
                path=str(self.path),
            )
        return self.values[key]

    def section(self, name: str) -> dict[str, Any]:
        """Return a dict from the keys of a section to their values."""
        begin = f"{name}."
        return {
            key[len(begin) :]: value for key, value in self.values.items() if key.startswith(begin)
        }

    def error(self, key: str, sentence: object) -> UsageError:
        """Return a UsageError about the value of a key, with the key's line number."""
        return UsageError(
            f"{self.path}, line {self.lines.get(key, 1)}, {key}: {sentence}",
            code="argument-value",
            argument=key,
            path=str(self.path),
        )

    def checked(self, key: str, function: Callable[..., T], *arguments: object) -> T:
        """Call a function; name the configuration key in a UsageError that it raises."""
        try:
            return function(*arguments)
        except UsageError as error:
            raise error.with_message(str(self.error(key, error))) from error


def read_config(path: str | os.PathLike) -> Config:
    r"""Read a YAML configuration file and return a Config.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    Config

    Raises
    ------
    UsageError
        If the file is missing or invalid YAML, or a key or value is invalid. The message names line
        and key.

    Examples
    --------
    >>> from bigdl.friesian.serving.config import read_config
    >>> _ = open("serving.yaml", "w").write("store: features\nrecall: {indx: index}")
    >>> try:
    ...     read_config("serving.yaml")
    ... except ValueError as error:
    ...     print(error)
    serving.yaml, line 2, recall.indx: unknown; did you mean index?
    """
    yaml = require("yaml", "serving")
    shown = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{shown} cannot be read: {error}", code="path-unusable", path=str(shown)
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it is not valid YAML"
        raise UsageError(
            f"{shown}{line}: {problem}", code="file-format", path=str(shown)
        ) from error
    if root is None:
        raise UsageError(
            f"{shown} is empty; configure a store, an index and a model",
            code="file-format",
            path=str(shown),
        )
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(
            f"{shown}, line 1: the file should have sections, such as store:",
            code="file-format",
            path=str(shown),
        )
    config = Config(shown)
    legacy: dict[str, tuple[Any, int]] = {}
    for key_node, node in root.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key == "shards":
            _read_shards(config, _plain(yaml, node), line)
        elif key == "stages":
            config.lines[key] = line
            config.stages = _stages_of(config, _plain(yaml, node))
        elif key in _KEYS:
            _read_section(yaml, config, key, node, line)
        elif key in _LEGACY_KEYS or key in _LEGACY_REDIS_KEYS or key == "servicePort":
            legacy[key] = _plain(yaml, node), line
        else:
            hint = _hint(key, [*_KEYS, "shards", "stages", *_LEGACY_KEYS])
            raise UsageError(
                f"{shown}, line {line}, {key}: unknown{hint}",
                code="argument-unknown",
                argument=key,
                path=str(shown),
            )
    if legacy:
        _read_legacy_keys(config, legacy)
    folder = Path(path).resolve().parent
    for key in _PATHS & config.values.keys():
        value = config.values[key]
        if "://" not in value:
            config.values[key] = str(folder / os.path.expanduser(value))
    return config


def _plain(yaml: Any, node: object) -> object:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known[:12])}"


def _read_section(yaml: Any, config: Config, section: str, node: Any, line: int) -> None:
    keys = _KEYS[section]
    if section == "store" and isinstance(node, yaml.ScalarNode):
        _set(config, "store.location", _plain(yaml, node), str, line)
        return
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(
            f"{config.path}, line {line}, {section}: should have keys, such as {next(iter(keys))}:",
            code="argument-type",
            argument=section,
            path=str(config.path),
        )
    for key_node, value_node in node.value:
        name, at = str(key_node.value), key_node.start_mark.line + 1
        full = f"{section}.{name}"
        if name not in keys:
            raise UsageError(
                f"{config.path}, line {at}, {full}: unknown{_hint(name, list(keys))}",
                code="argument-unknown",
                argument=full,
                allowed=list(keys),
                path=str(config.path),
            )
        if full in config.values:
            raise UsageError(
                f"{config.path}, line {at}, {full}: occurs twice",
                code="argument-conflict",
                argument=full,
                path=str(config.path),
            )
        _set(config, full, _plain(yaml, value_node), keys[name], at)


def _read_shards(config: Config, content: object, line: int) -> None:
    config.lines["shards"] = line
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise config.error("shards", "should be a list of mappings with items, recall, features")
    shards = []
    for number, each in enumerate(content):
        if strange := [str(name) for name in each if name not in _SHARD]:
            hint = _hint(strange[0], [*_SHARD])
            raise config.error("shards", f"{strange[0]} of shard {number} is unknown{hint}")
        spans: dict[str, Any] = {"items": None, "users": None}
        for name in spans:
            span = each.get(name)
            if span is None and name == "users":
                continue
            if not isinstance(span, list) or len(span) != 2 or not all(_is(i, int) for i in span):
                raise config.error(
                    "shards",
                    f"{name} of shard {number} should be [first id, last id], got {span!r}",
                )
            spans[name] = tuple(span)
        addresses = {}
        for name in ("recall", "features"):
            value = each.get(name)
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list) or not value or not all(map(_is_address, value)):
                raise config.error(
                    "shards",
                    f"{name} of shard {number} should be host:port, or a list of them, got "
                    f"{each.get(name)!r}",
                )
            addresses[name] = tuple(value)
        shards.append(
            Shard(spans["items"], addresses["recall"], addresses["features"], spans["users"])
        )
    config.shards = config.checked("shards", check_shards, shards)


def _stages_of(config: Config, content: object) -> list[tuple[str, dict[str, object]]]:
    """Parse the configured stages, each a name or a mapping from a name to its options."""
    invalid = config.error(
        "stages",
        "should be a list of names, each alone or with options, such as [recall, {shop:InStock: "
        f"{{minimum: 1}}}}, features, ranking], got {content!r}",
    )
    if not isinstance(content, list):
        raise invalid
    stages = []
    for each in content:
        named = {each: {}} if isinstance(each, str) else each
        if not isinstance(named, dict) or len(named) != 1:
            raise invalid
        [(name, options)] = named.items()
        if not isinstance(name, str) or not isinstance(options, dict):
            raise invalid
        stages.append((name, options))
    return stages


def _is_address(value: object) -> bool:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _set(config: Config, key: str, value: Any, wanted: Any, line: int) -> None:
    config.lines[key] = line
    if isinstance(wanted, list):
        is_right = isinstance(value, list) and all(_is(each, wanted[0]) for each in value)
        word = f"a list with elements that are {_TYPE_NAMES[wanted[0]]}"
    elif isinstance(wanted, dict):
        is_right = isinstance(value, dict) and all(_is(each, float) for each in value.values())
        word = "names with numbers, such as {1: 90, 2: 10}"
        value = {str(name): each for name, each in value.items()} if is_right else value
    else:
        is_right, word = _is(value, wanted), _TYPE_NAMES[wanted]
    if not is_right:
        raise config.error(key, f"should be {word}, got {value!r}")
    config.values[key] = value


def _is(value: object, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _read_legacy_keys(config: Config, legacy: dict[str, tuple[Any, int]]) -> None:
    """Convert the keys of BigDL 2.x, and note their new names."""
    for key, (value, line) in legacy.items():
        new = _LEGACY_KEYS.get(key, "")
        if new is None:
            config.notes.append(f"line {line}: {key} is not needed any more")
            continue
        if not new:
            continue
        section, _, name = new.partition(".")
        wanted = _KEYS[section][name]
        if isinstance(wanted, list) and isinstance(value, str):
            value = [each.strip() for each in value.split(",")]
        _set(config, new, value, wanted, line)
        config.notes.append(f"line {line}: {key} is {new} now")
    if "redisUrl" in legacy or "redisSentinelMasterURL" in legacy:
        _read_legacy_redis(config, legacy)
    if "servicePort" in legacy:
        port, line = legacy["servicePort"]
        key = f"server.{_service_of(legacy)}_port"
        _set(config, key, port, int, line)
        config.notes.append(f"line {line}: servicePort is {key} now")


def _read_legacy_redis(config: Config, legacy: dict[str, tuple[Any, int]]) -> None:
    redis_type, line = legacy.get("redisType", ("standalone", 1))
    if redis_type not in _REDIS_SCHEMES:
        raise UsageError(
            f"{config.path}, line {line}, redisType: should be one of {', '.join(_REDIS_SCHEMES)}, "
            f"got {redis_type!r}",
            code="argument-value",
            argument="redisType",
            allowed=list(_REDIS_SCHEMES),
            path=str(config.path),
        )
    name = "redisSentinelMasterURL" if redis_type == "sentinel" else "redisUrl"
    value, line = legacy.get(name, legacy.get("redisUrl", ("", line)))
    hosts = ",".join(str(value).replace(";", ",").split())
    url = hosts if "://" in hosts else f"{_REDIS_SCHEMES[redis_type]}://{hosts}"
    if redis_type == "sentinel":
        url = f"{url}/{legacy.get('redisSentinelMasterName', ('mymaster', 1))[0]}"
    _set(config, "store.location", url, str, line)
    config.notes.append(f"line {line}: {name} is store.location: {url} now")


def _service_of(legacy: dict[str, Any]) -> str:
    """Return the BigDL 2.x service that a file with these keys belongs to."""
    if "rankingServiceURL" in legacy or "recallServiceURL" in legacy:
        return "recommender"
    if "indexPath" in legacy:
        return "recall"
    return "ranking" if "modelPath" in legacy and "redisUrl" not in legacy else "feature"
