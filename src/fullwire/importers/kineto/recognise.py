"""Sort kernels by name into communication, computation and unknown.

A kernel with the arguments of a collective communicates. For all others the name decides. A name
that both lists lack counts as computation, and the importer lists it if its kernels take long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fullwire.importers._format import compiled

_LONGEST_NAME = 300  # Characters of a kernel's name, as templates can fill a page.
# Names that mean something in a Run.
_MEANT = ("step", "wait", "codec", "forward", "backward", "earlier backward", "queued")


class Known(IntEnum):
    """The kind of a kernel as its name shows it."""

    NOTHING = 0
    COMPUTES = 1
    COMMUNICATES = 2


# The first pattern finds NCCL and RCCL. The second finds these, in order: NVSHMEM and rocSHMEM.
# DeepEP, as its own package, as DeepSeek's traces show it, and packages derived from it. MSCCL and
# MSCCL++. MPI, UCC, oneCCL and HCCL. The one- and two-shot kernels of vLLM, TensorRT-LLM and
# torch's symmetric memory, with its barriers and signals. Transformer Engine's buffers. Every
# kernel with the name of a collective. The second searches a name in small letters: ignoring the
# case takes twice as long.
_NCCL = re.compile(r"[nr]ccl|[NR]CCL")
_COMMUNICATION = re.compile(
    r"(?:nv|roc)shmem|(?:deep|hybrid)_?ep"
    r"|\b(?:dpsk::)?ep::(?:\w+::)*\w*(?:dispatch|combine|notify|barrier)|\bmori::"
    r"|msccl|\bmpi_|\bucc_|oneapi::ccl|oneccl|xccl|hccl|\bhcom_|gloo|cross_device_reduce"
    r"|quick_?reduce|(?:one|two)_?shot|multimem|symm_mem|symmetric_memory|\bbarrier_kernel"
    r"|\b(?:put|wait)_signal|userbuffers|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|send_?recv"
)
# Inductor names a kernel after the operators that it fuses, which may include a collective's wait.
_COMPUTATION_FIRST = re.compile(r"\s*triton_")
_COMPUTATION = re.compile(
    r"at::|at_cuda|c10::|cutlass|cublas|nvjet|cudnn|cusparse|cufft|cub::|thrust|triton|torch|aten|fbgemm"
    r"|gem[mv]|elementwise|vectorized|reduce|softmax|norm|flash|fmha|attention|conv|grad|fprop"
    r"|winograd|cijk_|split_?k|apex|transformer_engine|multi_tensor|embedding|dropout|adam|sgd"
    r"|\bbn_|pool|nch|nhwc|copy|concat|cat|index|gather|scatter|fft|sort|fused|\bck::|miopen|rocblas"
    r"|hipblas|xmma|ampere_|volta_|turing_|hopper_|sm\d\d_|quant|rotary|rope|moe|topk|relu|gelu|silu"
    r"|transpose|permute|nll_|cross_entropy|unrolled|fill|memset|scan|tensor|matmul|dot_|lstm|gru|rnn"
)

# In this order: allgather before gather, sendrecv before send.
_OPS: Mapping[str, str] = {
    "allreduce": "allreduce",
    "crossdevicereduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reducescatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "sendrecv",
    "send": "send",
    "recv": "recv",
}

_ITEM_BYTES: Mapping[str, int] = {
    "double": 8,
    "long": 8,
    "int64": 8,
    "float64": 8,
    "complexfloat": 8,
    "float": 4,
    "int": 4,
    "float32": 4,
    "int32": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "float16": 2,
    "int16": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "unsignedchar": 1,
    "signedchar": 1,
    "uint8": 1,
    "int8": 1,
    "longint": 8,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
}
_DTYPES: Mapping[str, str] = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "longint": "int64",
    "int": "int32",
    "short": "int16",
    "byte": "uint8",
    "unsignedchar": "uint8",
    "char": "int8",
    "signedchar": "int8",
}


def kinds_of(names: Sequence[str], communication: re.Pattern[str] | None) -> NDArray[np.int8]:
    """Return for each name the kind of its kernels."""
    return np.array([_kind(name, communication) for name in names], np.int8)


def asked_for(pattern: str | None) -> re.Pattern[str] | None:
    """Compile the user's regular expression, or refuse it."""
    return None if pattern is None else compiled("communication", pattern)


def span_name(name: str) -> str:
    """Return the name of a kernel's span: short, fit for files, and none of a Run's own names."""
    text = f"{name} (kernel)" if name in _MEANT else name[:_LONGEST_NAME]
    return text.encode(errors="backslashreplace").decode()


def op_of(text: str) -> str:
    """Return the operation that a kernel, a mark or an argument names, or ""."""
    plain = text.lower().replace("_", "")
    return next((op for word, op in _OPS.items() if word in plain), "")


def dtype_of(text: str) -> tuple[str, int]:
    """Return a type's usual name and the bytes of an item, or ("", 0) for an unknown type."""
    plain = text.lower().removeprefix("c10::").replace(" ", "")
    size = 1 if plain.startswith("float8") else _ITEM_BYTES.get(plain, 0)
    return (_DTYPES.get(plain, plain), size) if size else ("", 0)


@lru_cache(maxsize=4096)  # the ranks of a job have kernels of the same names
def _kind(name: str, communication: re.Pattern[str] | None) -> Known:
    if communication is not None and communication.search(name):
        return Known.COMMUNICATES
    if _COMPUTATION_FIRST.match(name):
        return Known.COMPUTES
    small = name.lower()
    if _NCCL.search(name) or _COMMUNICATION.search(small):
        return Known.COMMUNICATES
    return Known.COMPUTES if _COMPUTATION.search(small) else Known.NOTHING
