"""The acceleration methods of PyTorch, in the order in which ``optimize`` tries them."""

from bigdl.nano.pytorch.methods.compiled import BF16_IPEX, CHANNELS_LAST, FP32_IPEX, INDUCTOR, JIT
from bigdl.nano.pytorch.methods.eager import EAGER
from bigdl.nano.pytorch.methods.int8 import JIT_INT8, STATIC_INT8, TORCHAO

METHODS = [
    EAGER[0],
    *CHANNELS_LAST,
    *FP32_IPEX,
    *EAGER[1:],
    *BF16_IPEX,
    *STATIC_INT8,
    *JIT,
    *JIT_INT8,
    *INDUCTOR,
    *TORCHAO,
]
