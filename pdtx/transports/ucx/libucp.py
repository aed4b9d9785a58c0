"""One loaded libucp: the functions that pdtx calls, with Python's types and errors."""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from pdtx.errors import InputError
from pdtx.transports.ucx.status import BUSY, IO_ERROR, OK, UcsError, pointer_error
from pdtx.transports.ucx.structs import (
    ContextParams,
    EndpointParams,
    HandlePointer,
    MapParams,
    RequestAttributes,
    RequestParams,
    SizePointer,
    Status,
    WorkerParams,
    layout_errors,
)

OLDEST = (1, 18)

_TEXT_BYTES = 512
_LAST_STATUS = -90

Operation = Callable[[int, int, int, int, int, int], int | None]

_libc = ctypes.CDLL(None)
_libc.open_memstream.restype = c_void_p
_libc.open_memstream.argtypes = (HandlePointer, SizePointer)
_libc.fclose.argtypes = (c_void_p,)
_libc.free.argtypes = (c_void_p,)
_libc.free.restype = None

_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ucp_get_version": (None, (c_void_p, c_void_p, c_void_p)),
    "ucp_get_version_string": (c_char_p, ()),
    "ucs_status_string": (c_char_p, (Status,)),
    "ucp_init_version": (Status, (c_uint, c_uint, ctypes.POINTER(ContextParams), c_void_p, HandlePointer)),
    "ucp_cleanup": (None, (c_void_p,)),
    "ucp_context_print_info": (None, (c_void_p, c_void_p)),
    "ucp_worker_create": (Status, (c_void_p, ctypes.POINTER(WorkerParams), HandlePointer)),
    "ucp_worker_destroy": (None, (c_void_p,)),
    "ucp_worker_get_address": (Status, (c_void_p, HandlePointer, SizePointer)),
    "ucp_worker_release_address": (None, (c_void_p, c_void_p)),
    "ucp_worker_get_efd": (Status, (c_void_p, c_void_p)),
    "ucp_worker_arm": (Status, (c_void_p,)),
    "ucp_worker_signal": (Status, (c_void_p,)),
    "ucp_worker_progress": (c_uint, (c_void_p,)),
    "ucp_ep_create": (Status, (c_void_p, ctypes.POINTER(EndpointParams), HandlePointer)),
    "ucp_ep_close_nbx": (c_void_p, (c_void_p, ctypes.POINTER(RequestParams))),
    "ucp_ep_print_info": (None, (c_void_p, c_void_p)),
    "ucp_ep_flush_nbx": (c_void_p, (c_void_p, ctypes.POINTER(RequestParams))),
    "ucp_mem_map": (Status, (c_void_p, ctypes.POINTER(MapParams), HandlePointer)),
    "ucp_mem_unmap": (Status, (c_void_p, c_void_p)),
    "ucp_rkey_pack": (Status, (c_void_p, c_void_p, HandlePointer, SizePointer)),
    "ucp_rkey_buffer_release": (None, (c_void_p,)),
    "ucp_ep_rkey_unpack": (Status, (c_void_p, c_char_p, HandlePointer)),
    "ucp_rkey_destroy": (None, (c_void_p,)),
    "ucp_put_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p)),
    "ucp_get_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p)),
    "ucp_request_check_status": (Status, (c_void_p,)),
    "ucp_request_free": (None, (c_void_p,)),
    "ucp_request_query": (Status, (c_void_p, ctypes.POINTER(RequestAttributes))),
}


class Ucp:
    """The library that is loaded from path. Handles are addresses, as int; failures raise UcsError.

    origin: where it comes from, for people.
    """

    def __init__(self, path: str, origin: str) -> None:
        """Raise InputError for a file that is no libucp, or too old a one."""
        self.path, self.origin = path, origin
        if wrong := layout_errors():
            raise InputError(f"UCX cannot be used on this machine: {'; '.join(wrong)}")
        try:
            # The second one keeps the GIL: for calls that take less time than giving it up and getting it back.
            self._library, self._brief = ctypes.CDLL(path), ctypes.PyDLL(path)
            for name, (restype, argtypes) in _SIGNATURES.items():
                for library in (self._library, self._brief):
                    function = getattr(library, name)
                    function.restype, function.argtypes = restype, argtypes
        except OSError as error:
            raise InputError(f"the UCX library {path} does not load: {error}") from None
        except AttributeError as error:
            raise InputError(f"the UCX library {path} is no libucp of UCX >= 1.18: {error}") from None
        self.version = self._version()
        if self.version < OLDEST:
            raise InputError(f"UCX {self.version_text} at {path} is too old: pdtx needs 1.18 or newer")
        self.put: Operation = self._brief.ucp_put_nbx
        self.get: Operation = self._brief.ucp_get_nbx
        self.progress: Callable[[int], int] = self._library.ucp_worker_progress
        self.request_status: Callable[[int], int] = self._brief.ucp_request_check_status
        self.free_request: Callable[[int], None] = self._brief.ucp_request_free

    @property
    def version_text(self) -> str:
        """Version as UCX says it."""
        return str(self._library.ucp_get_version_string().decode())

    def _version(self) -> tuple[int, int, int]:
        numbers = c_uint(), c_uint(), c_uint()
        self._library.ucp_get_version(*map(byref, numbers))
        return numbers[0].value, numbers[1].value, numbers[2].value

    def address_of(self, name: str) -> int:
        """Return the address of a function, for pdtx's C library."""
        return ctypes.cast(getattr(self._library, name), c_void_p).value or 0

    def reason(self, status: int) -> str:
        """Return UCX's words for a status."""
        return str(self._library.ucs_status_string(status).decode())

    def status_said(self, text: str) -> int:
        """Return the status whose words end a text: other packages' exceptions carry it so."""
        found = [status for status in range(-1, _LAST_STATUS, -1) if text.endswith(self.reason(status))]
        return found[0] if found else IO_ERROR

    def error(self, doing: str, status: int) -> UcsError:
        """Return the exception for a status."""
        return UcsError(doing, status, self.reason(status))

    def check(self, status: int, doing: str) -> None:
        """Raise UcsError unless the status is OK."""
        if status != OK:
            raise self.error(doing, status)

    # -- contexts and workers -----------------------------------------------------------------------------------------

    def create_context(self) -> int:
        """Return a new context for puts and gets by several workers in several threads."""
        params = ContextParams(
            field_mask=ContextParams.FEATURES | ContextParams.WORKERS_SHARED,
            features=ContextParams.RMA | ContextParams.WAKEUP,
            mt_workers_shared=1,
        )
        context = c_void_p()
        self.check(self._library.ucp_init_version(*OLDEST, byref(params), None, byref(context)), "start")
        return context.value or 0

    def destroy_context(self, context: int) -> None:
        """Give a context back; its workers are gone."""
        self._library.ucp_cleanup(context)

    def context_info(self, context: int) -> str:
        """Return UCX's description of a context: the transports and devices it may use."""
        return self._printed(self._library.ucp_context_print_info, context)

    def create_worker(self, context: int) -> int:
        """Return a new worker, for one thread at a time."""
        params = WorkerParams(field_mask=WorkerParams.THREAD_MODE, thread_mode=WorkerParams.SERIALIZED)
        worker = c_void_p()
        self.check(self._library.ucp_worker_create(context, byref(params), byref(worker)), "create a worker")
        return worker.value or 0

    def destroy_worker(self, worker: int) -> None:
        """Give a worker back, with the endpoints it has: whoever is connected to it is cut off."""
        self._library.ucp_worker_destroy(worker)

    def worker_address(self, worker: int) -> bytes:
        """Return what others need to connect to a worker."""
        address, size = c_void_p(), c_size_t()
        status = self._library.ucp_worker_get_address(worker, byref(address), byref(size))
        self.check(status, "tell a worker's address")
        try:
            return ctypes.string_at(address.value or 0, size.value)
        finally:
            self._library.ucp_worker_release_address(worker, address)

    def event_descriptor(self, worker: int) -> int:
        """Return the descriptor that wakes whoever polls it once a worker is armed. It stays UCX's."""
        descriptor = c_int()
        self.check(self._library.ucp_worker_get_efd(worker, byref(descriptor)), "tell a worker's event descriptor")
        return descriptor.value

    def arm(self, worker: int) -> bool:
        """Have the next event of a worker wake its descriptor; False if there is something to do already."""
        status = self._library.ucp_worker_arm(worker)
        if status == BUSY:
            return False
        self.check(status, "wait for events")
        return True

    def signal(self, worker: int) -> None:
        """Wake whoever waits for a worker's events. The one function that any thread may call at any time."""
        self._library.ucp_worker_signal(worker)

    # -- endpoints ----------------------------------------------------------------------------------------------------

    def create_endpoint(self, worker: int, params: EndpointParams) -> int:
        """Return a new endpoint. params are kept by the caller, with what they point to, until the worker is gone."""
        endpoint = c_void_p()
        self.check(self._library.ucp_ep_create(worker, byref(params), byref(endpoint)), "connect")
        return endpoint.value or 0

    def close_endpoint(self, endpoint: int) -> int:
        """Begin to close an endpoint by force; return a request, or 0 if it is closed."""
        params = RequestParams(field_mask=RequestParams.FLAGS, flags=RequestParams.FORCE)
        request = self._library.ucp_ep_close_nbx(endpoint, byref(params)) or 0
        return 0 if pointer_error(request) else int(request)

    def flush(self, endpoint: int) -> int:
        """Begin to wait for the remote end of all puts and gets so far; return a request, or 0 if it is reached."""
        request = self._library.ucp_ep_flush_nbx(endpoint, byref(RequestParams())) or 0
        self.check(pointer_error(request), "flush")
        return int(request)

    def endpoint_info(self, endpoint: int) -> str:
        """Return UCX's description of an endpoint: its lanes and what each is for."""
        return self._printed(self._library.ucp_ep_print_info, endpoint)

    def protocol(self, request: int) -> str:
        """Return UCX's description of how a put or get is carried out; it says little where UCX keeps none."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        mask = RequestAttributes.TEXT | RequestAttributes.TEXT_SIZE
        attributes = RequestAttributes(mask, ctypes.cast(text, c_char_p), _TEXT_BYTES)
        self.check(self._library.ucp_request_query(request, byref(attributes)), "describe a request")
        return text.value.decode(errors="replace")

    # -- memory -------------------------------------------------------------------------------------------------------

    def map_memory(self, context: int, address: int, nbytes: int) -> int:
        """Register memory, whose kind UCX finds out itself, and return its handle."""
        mask = MapParams.ADDRESS | MapParams.LENGTH
        params, handle = MapParams(field_mask=mask, address=address, length=nbytes), c_void_p()
        status = self._library.ucp_mem_map(context, byref(params), byref(handle))
        self.check(status, f"register {nbytes} bytes of memory")
        return handle.value or 0

    def unmap_memory(self, context: int, handle: int) -> None:
        """Undo map_memory()."""
        self._library.ucp_mem_unmap(context, handle)

    def pack_key(self, context: int, handle: int) -> bytes:
        """Return what peers need to put into registered memory and get from it."""
        key, size = c_void_p(), c_size_t()
        status = self._library.ucp_rkey_pack(context, handle, byref(key), byref(size))
        self.check(status, "pack a memory key")
        try:
            return ctypes.string_at(key.value or 0, size.value)
        finally:
            self._library.ucp_rkey_buffer_release(key)

    def unpack_key(self, endpoint: int, key: bytes) -> int:
        """Return a peer's key as one for an endpoint. UCX does not know where key ends: pad what strangers sent."""
        handle = c_void_p()
        self.check(self._library.ucp_ep_rkey_unpack(endpoint, key, byref(handle)), "read the peer's memory key")
        return handle.value or 0

    def destroy_key(self, key: int) -> None:
        """Undo unpack_key()."""
        self._library.ucp_rkey_destroy(key)

    def _printed(self, function: Callable[[int, int], None], handle: int) -> str:
        """What a function prints about a handle to a C stream."""
        text, size = c_void_p(), c_size_t()
        stream = _libc.open_memstream(byref(text), byref(size))
        if not stream:
            return ""
        function(handle, stream)
        _libc.fclose(stream)
        try:
            return ctypes.string_at(text.value or 0, size.value).decode(errors="replace")
        finally:
            _libc.free(text)
