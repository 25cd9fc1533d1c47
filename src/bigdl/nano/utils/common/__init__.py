"""What Nano shares among frameworks, under the names of BigDL 2.x. Importing it changes nothing."""

from bigdl.common.checks import invalidInputError, invalidOperationError
from bigdl.common.environment import EnvContext
from bigdl.nano.utils.common.cpu_info import (
    CPUInfo,
    _avx2_checker,
    _avx512_checker,
    _bf16_checker,
)
from bigdl.nano.utils.common.functions import _flatten, deprecated, get_default_args
from bigdl.nano.utils.common.latency import latency_calculate_helper
from bigdl.nano.utils.common.packages import (
    _inc_checker,
    _ipex_checker,
    _onnxruntime_checker,
    _openvino_checker,
    compare_version,
)
from bigdl.nano.utils.common.schedule import (
    get_affinity_core_num,
    schedule_processors,
    schedule_workers,
)
from bigdl.nano.utils.common.spawn import spawn_new_process
from bigdl.nano.utils.common.suggestions import output_suggestions, register_suggestion

__all__ = [
    "CPUInfo",
    "EnvContext",
    "_avx2_checker",
    "_avx512_checker",
    "_bf16_checker",
    "_flatten",
    "_inc_checker",
    "_ipex_checker",
    "_onnxruntime_checker",
    "_openvino_checker",
    "compare_version",
    "deprecated",
    "get_affinity_core_num",
    "get_default_args",
    "invalidInputError",
    "invalidOperationError",
    "latency_calculate_helper",
    "output_suggestions",
    "register_suggestion",
    "schedule_processors",
    "schedule_workers",
    "spawn_new_process",
]
