"""What users can ask of a model behind which a network of OpenVINO stands.

It knows no framework: the models of PyTorch and Keras, and ``OpenVINOModel``, say how a call of
theirs becomes arrays, and what becomes of the results.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.network import SAVED_NAME, read_network, renamed_properties
from bigdl.nano.openvino.shaped import ShapedNetwork

__all__ = ["OpenVINOFacade", "plain", "saved_network", "saved_properties"]


class OpenVINOFacade(abc.ABC):
    """A mix-in for models with a network of OpenVINO.

    Attributes
    ----------
    ov_network : CompiledNetwork
    """

    ov_network: CompiledNetwork

    @property
    def ov_model(self) -> Any:
        """The ``openvino.Model``."""
        return self.ov_network.network

    @property
    def additional_config(self) -> dict[str, Any]:
        """Properties of OpenVINO that were asked for, directly or by other arguments."""
        return dict(self.ov_network.additional_config)

    @property
    def final_config(self) -> dict[str, Any]:
        """All properties that the network was compiled with."""
        return dict(self.ov_network.final_config)

    def reshape(self, shapes: Any) -> tuple[bool, str | None]:
        """Give the inputs other shapes; nothing is done if they have them.

        Parameters
        ----------
        shapes : str, mapping or sequence
            ``"[1,3,224,224]"``, ``"x[1,3],y[?,4]"``, a mapping of names to shapes, one shape, or
            a shape for each input. ``?`` or -1 stands for any size, ``1..8`` for a range.

        Returns
        -------
        ok : bool
            Whether the inputs have these shapes now. If not, the model works as before.
        error : str or None
            Why not.
        """
        return self.ov_network.reshape(shapes)

    def async_predict(self, input_data: Iterable[Any], num_requests: int = 0) -> list:
        """Run the model on many inputs, several at a time.

        Parameters
        ----------
        input_data : iterable
            Inputs of one call each: an array or tensor, a tuple or list of arguments, or a mapping
            of names to them.
        num_requests : int
            Calls under way at the same time; 0 means the number that OpenVINO finds best. More
            than one gains with the property ``{"PERFORMANCE_HINT": "THROUGHPUT"}``.

        Returns
        -------
        list
            What the calls return, in order.

        Raises
        ------
        UsageError
            If the inputs of one call do not fit; the message is about that call.
        """
        calls = map(self.nano_arrays_of, input_data)
        results = self.ov_network.infer_many(calls, num_requests)
        return [self.nano_result_of(each) for each in results]

    @abc.abstractmethod
    def nano_arrays_of(self, call: Any) -> list[np.ndarray]:
        """The flat list of arrays that an element of ``input_data`` means."""

    @abc.abstractmethod
    def nano_result_of(self, results: list[np.ndarray]) -> Any:
        """What a call returns, from the flat list of the network's results."""

    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """A flat list of ndarrays in, a flat list of ndarrays out, which are the caller's."""
        return self.ov_network.infer(arrays)

    def nano_network_facts(self) -> dict:
        """Facts of the network for a saved directory."""
        return {
            "config": {str(key): plain(value) for key, value in self.additional_config.items()},
            "device": self.ov_network.device,
            "precision": self.ov_network.precision,
        }

    def nano_write_network(self, directory: Path) -> dict:
        """Write the network's files; what :func:`saved_network` needs to know of them."""
        self.ov_network.save(directory)
        return {
            "shapes": [str(port.partial_shape) for port in self.ov_model.inputs],
            "xml_path": f"{SAVED_NAME}.xml",
            "weight_path": f"{SAVED_NAME}.bin",
        }


def saved_properties(meta: Mapping) -> tuple[dict[str, Any], int | None]:
    """Properties and the thread count of a saved model.

    The directory of OpenVINO's cache is left out: it may not be on this machine.
    """
    config = renamed_properties(meta.get("config") or {})
    config.pop("CACHE_DIR", None)
    threads = config.pop("INFERENCE_NUM_THREADS", None)
    threads = meta.get("thread_num") or threads
    return config, int(threads) if threads else None


def saved_network(
    directory: Path,
    meta: Mapping,
    *,
    device: str | None,
    threads: int | None,
    config: Mapping[str, Any],
    shapes: Any = None,
) -> ShapedNetwork:
    """The network of a saved model.

    Parameters
    ----------
    directory : Path
    meta : mapping
        What :meth:`OpenVINOFacade.nano_network_facts` and
        :meth:`OpenVINOFacade.nano_write_network` returned.
    device : str or None
        Instead of the saved one.
    threads : int or None
    config : mapping
    shapes : optional
        Instead of the saved ones.
    """
    return ShapedNetwork(
        read_network(directory / meta["xml_path"]),
        device or meta.get("device", "CPU"),
        precision=meta.get("precision", "fp32"),
        thread_num=threads,
        config=config,
        shapes=meta.get("shapes") if shapes is None else shapes,
    )


def plain(value: Any) -> Any:
    """A value, such as a property of OpenVINO, in the types of YAML."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, int) else str(key): plain(each) for key, each in value.items()
        }
    if isinstance(value, bool | int | float | type(None)) or type(value) is str:
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(getattr(value, "name", value))
