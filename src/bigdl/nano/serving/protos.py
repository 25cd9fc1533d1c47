"""ProtoPool: protobuf message classes, created from compiled descriptors on first use.

Each ProtoPool has a separate descriptor pool, so that a program can also use generated stubs of the
same services, and any protobuf version works.
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
"""Protobuf creates message classes at run time, so type checkers do not know their fields."""
_making = threading.Lock()  # two threads would create two incompatible classes


class ProtoPool:
    """Messages and services of one set of protobuf descriptors.

    Parameters
    ----------
    package : str
        Python package that contains the file.
    *path : str
        File written by ``protoc --descriptor_set_out``, relative to the package.
    """

    def __init__(self, package: str, *path: str):
        self._package, self._path = package, path
        self._methods: dict[str, dict[str, tuple[MessageClass, MessageClass]]] = {}

    @cached_property
    def _loaded(self) -> tuple[Any, dict[str, MessageClass]]:
        """Descriptor pool, and the classes of all messages by full name."""
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
        """Return the class of a message by its full name, such as ``recall.Query``."""
        return self._loaded[1][name]

    def messages(self, package: str) -> dict[str, MessageClass]:
        """Return the message classes of a protobuf package by their short names."""
        begin = f"{package}."
        return {
            name.removeprefix(begin): each
            for name, each in self._loaded[1].items()
            if name.startswith(begin)
        }

    def methods(self, service: str) -> dict[str, tuple[MessageClass, MessageClass]]:
        """Return the request and response classes of each method of a service."""
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
