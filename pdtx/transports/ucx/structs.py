"""The structs of UCX's API that pdtx fills in, as UCX >= 1.18 has them on 64-bit machines.

UCX reads only the fields that a struct's mask names, so newer versions may add fields without breaking this. The
comments give each struct's size in bytes, which is checked at the end.
"""

import ctypes
from ctypes import POINTER, Structure, c_byte, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

Status = c_int8
"""C compilers store this enum in one byte: what is above that in a register is not defined."""

ErrorHandler = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, Status)
"""Called with an argument of one's own, the endpoint, and why it broke."""


class ContextParams(Structure):
    """ucp_params_t, 88."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )
    FEATURES, WORKERS_SHARED = 1 << 0, 1 << 5
    RMA, WAKEUP = 1 << 1, 1 << 4


class WorkerParams(Structure):
    """ucp_worker_params_t, 200; the rest is not used."""

    _fields_ = (("field_mask", c_uint64), ("thread_mode", c_int), ("rest", c_byte * 188))
    THREAD_MODE = 1 << 0
    SERIALIZED = 1


class EndpointParams(Structure):
    """ucp_ep_params_t, 104; the rest is not used."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("error_mode", c_int),
        ("error_handler", ErrorHandler),
        ("error_argument", c_void_p),
        ("rest", c_byte * 64),
    )
    ADDRESS, ERROR_MODE, ERROR_HANDLER = 1 << 0, 1 << 1, 1 << 2
    PEER = 1


class MapParams(Structure):
    """ucp_mem_map_params_t, 48."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("protection", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
    )
    ADDRESS, LENGTH = 1 << 0, 1 << 1


class RequestParams(Structure):
    """ucp_request_param_t, 72."""

    _fields_ = (
        ("field_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("receive_info", c_void_p),
        ("memory_handle", c_void_p),
    )
    FLAGS, MEMORY_HANDLE = 1 << 4, 1 << 8
    NOT_AT_ONCE = 1 << 16
    """Make a request even of what is done at once."""
    FORCE = 1
    """Flag of a close: do not wait for anything."""


class RequestAttributes(Structure):
    """ucp_request_attr_t, 32."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("text", c_char_p),
        ("text_size", c_size_t),
        ("status", Status),
        ("memory_type", c_int),
    )
    TEXT, TEXT_SIZE = 1 << 0, 1 << 1


HandlePointer = POINTER(c_void_p)
SizePointer = POINTER(c_size_t)

_SIZES = {
    ContextParams: 88,
    WorkerParams: 200,
    EndpointParams: 104,
    MapParams: 48,
    RequestParams: 72,
    RequestAttributes: 32,
}


def layout_errors() -> list[str]:
    """Return what this machine lays out otherwise than UCX on a 64-bit one; empty where all is well."""
    return [
        f"{struct.__name__} has {ctypes.sizeof(struct)} bytes, not {size}"
        for struct, size in _SIZES.items()
        if ctypes.sizeof(struct) != size
    ]
