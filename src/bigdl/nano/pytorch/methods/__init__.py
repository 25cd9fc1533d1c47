"""The acceleration methods of PyTorch, in the order in which ``optimize`` tries them."""

from bigdl.nano.acceleration.onnxruntime import ONNXRUNTIME
from bigdl.nano.acceleration.openvino import OPENVINO
from bigdl.nano.pytorch.methods.compiled import BF16_IPEX, CHANNELS_LAST, FP32_IPEX, INDUCTOR, JIT
from bigdl.nano.pytorch.methods.eager import EAGER
from bigdl.nano.pytorch.methods.int8 import JIT_INT8, NEURAL_COMPRESSOR, STATIC_INT8, TORCHAO

METHODS = [
    EAGER[0],
    *CHANNELS_LAST,
    *FP32_IPEX,
    *EAGER[1:],
    *BF16_IPEX,
    *STATIC_INT8,
    *JIT,
    *JIT_INT8,
    *OPENVINO[:4],
    *ONNXRUNTIME[:3],
    *OPENVINO[4:],
    *ONNXRUNTIME[3:],
    *INDUCTOR,
    *TORCHAO,
    *NEURAL_COMPRESSOR,
]
