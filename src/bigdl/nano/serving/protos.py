"""ProtoPool: classes of messages, made of descriptors when they are needed.

Each pool is one of its own, so a program may have stubs of the same services that were generated
elsewhere, and any version of protobuf will do.
"""

from __future__ import annotations

import threading
from functools import cached_property
from importlib.resources import files
from typing import Any

from bigdl.common.errors import require

__all__ = ["Message", "MessageClass", "ProtoPool"]

MessageClass = Any
Message = Any
"""Protobuf makes classes of messages at run time, so no checker of types knows their fields."""
_making = threading.Lock()  # two threads that make a class get two, which do not fit each other


class ProtoPool:
    """The messages and services of one set of descriptors.

    Parameters
    ----------
    package : str
        Of Python, which has the file.
    *path : str
        The file that ``protoc --descriptor_set_out`` writes, in the package.
    """

    def __init__(self, package: str, *path: str):
        self._package, self._path = package, path
        self._methods: dict[str, dict[str, tuple[MessageClass, MessageClass]]] = {}

    @cached_property
    def _loaded(self) -> tuple[Any, dict[str, MessageClass]]:
        """The pool of descriptors, and the classes of all messages by their full names."""
        with _making:
            if "_loaded" in vars(self):
                return vars(self)["_loaded"]
            protobuf = require("google.protobuf.descriptor_pb2", "serving")
            pool = require("google.protobuf.descriptor_pool", "serving").DescriptorPool()
            factory = require("google.protobuf.message_factory", "serving")
            content = files(self._package).joinpath(*self._path).read_bytes()
            listed = protobuf.FileDescriptorSet.FromString(content).file
            for each in listed:
                pool.Add(each)
            loaded = pool, factory.GetMessageClassesForFiles([each.name for each in listed], pool)
            vars(self)["_loaded"] = loaded
            return loaded

    def message(self, name: str) -> MessageClass:
        """Return the class of a message, such as ``recall.Query``."""
        return self._loaded[1][name]

    def messages(self, package: str) -> dict[str, MessageClass]:
        """Return the classes of the messages of a package, by their names in it."""
        begin = f"{package}."
        return {
            name.removeprefix(begin): each
            for name, each in self._loaded[1].items()
            if name.startswith(begin)
        }

    def methods(self, service: str) -> dict[str, tuple[MessageClass, MessageClass]]:
        """Return the classes of request and answer of each method of a service."""
        known = self._methods.get(service)
        if known is None:
            described = self._loaded[0].FindServiceByName(service).methods
            known = self._methods[service] = {
                each.name: (
                    self.message(each.input_type.full_name),
                    self.message(each.output_type.full_name),
                )
                for each in described
            }
        return known
