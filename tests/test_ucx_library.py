"""Which UCX is taken, what is said where it cannot be had, and the layout of its structs."""

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdtx.errors import InputError
from pdtx.transports.ucx import environment, library, runtime
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.runtime import make_runtime
from pdtx.transports.ucx.structs import (
    ContextParams,
    EndpointParams,
    MapParams,
    RequestAttributes,
    RequestParams,
    WorkerParams,
    layout_errors,
)
from tests.ucx_peer import REPOSITORY, usable_nixl, usable_runtime

# Our name of each field, and UCX's.
FIELDS: dict[type[ctypes.Structure], tuple[str, dict[str, str]]] = {
    ContextParams: (
        "ucp_params_t",
        {name: name for name, _ in ContextParams._fields_},
    ),
    WorkerParams: ("ucp_worker_params_t", {"field_mask": "field_mask", "thread_mode": "thread_mode"}),
    EndpointParams: (
        "ucp_ep_params_t",
        {
            "field_mask": "field_mask",
            "address": "address",
            "error_mode": "err_mode",
            "error_handler": "err_handler.cb",
            "error_argument": "err_handler.arg",
        },
    ),
    MapParams: (
        "ucp_mem_map_params_t",
        {
            "field_mask": "field_mask",
            "address": "address",
            "length": "length",
            "flags": "flags",
            "protection": "prot",
            "memory_type": "memory_type",
            "exported": "exported_memh_buffer",
        },
    ),
    RequestParams: (
        "ucp_request_param_t",
        {
            "field_mask": "op_attr_mask",
            "flags": "flags",
            "request": "request",
            "callback": "cb",
            "datatype": "datatype",
            "user_data": "user_data",
            "reply_buffer": "reply_buffer",
            "memory_type": "memory_type",
            "receive_info": "recv_info",
            "memory_handle": "memh",
        },
    ),
    RequestAttributes: (
        "ucp_request_attr_t",
        {
            "field_mask": "field_mask",
            "text": "debug_string",
            "text_size": "debug_string_size",
            "status": "status",
            "memory_type": "mem_type",
        },
    ),
}
CONSTANTS = {
    "UCP_PARAM_FIELD_FEATURES": ContextParams.FEATURES,
    "UCP_PARAM_FIELD_MT_WORKERS_SHARED": ContextParams.WORKERS_SHARED,
    "UCP_FEATURE_RMA": ContextParams.RMA,
    "UCP_FEATURE_WAKEUP": ContextParams.WAKEUP,
    "UCP_WORKER_PARAM_FIELD_THREAD_MODE": WorkerParams.THREAD_MODE,
    "UCS_THREAD_MODE_SERIALIZED": WorkerParams.SERIALIZED,
    "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS": EndpointParams.ADDRESS,
    "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE": EndpointParams.ERROR_MODE,
    "UCP_EP_PARAM_FIELD_ERR_HANDLER": EndpointParams.ERROR_HANDLER,
    "UCP_ERR_HANDLING_MODE_PEER": EndpointParams.PEER,
    "UCP_MEM_MAP_PARAM_FIELD_ADDRESS": MapParams.ADDRESS,
    "UCP_MEM_MAP_PARAM_FIELD_LENGTH": MapParams.LENGTH,
    "UCP_OP_ATTR_FIELD_FLAGS": RequestParams.FLAGS,
    "UCP_OP_ATTR_FIELD_MEMH": RequestParams.MEMORY_HANDLE,
    "UCP_OP_ATTR_FLAG_NO_IMM_CMPL": RequestParams.NOT_AT_ONCE,
    "UCP_EP_CLOSE_FLAG_FORCE": RequestParams.FORCE,
    "UCP_REQUEST_ATTR_FIELD_INFO_STRING": RequestAttributes.TEXT,
    "UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE": RequestAttributes.TEXT_SIZE,
}


def headers() -> Path:
    """The folder of UCX's headers, which the wheel has; or skip."""
    spec = find_spec("libucx")
    folder = Path(spec.origin).parent / "include" if spec is not None and spec.origin is not None else Path("/none")
    if not (folder / "ucp").is_dir():
        pytest.skip("the package libucx with its headers is not installed")
    return folder


def test_structs_are_laid_out_as_in_ucx_headers(tmp_path: Path) -> None:
    """Sizes, offsets and constants, as a C compiler has them."""
    folder = headers()
    ours = [str(ctypes.sizeof(struct)) for struct in FIELDS]
    questions = [f"sizeof({name})" for name, _ in FIELDS.values()]
    for struct, (name, fields) in FIELDS.items():
        ours += [str(getattr(struct, mine).offset) for mine in fields]
        questions += [f"offsetof({name}, {theirs})" for theirs in fields.values()]
    ours += [str(value) for value in CONSTANTS.values()]
    questions += list(CONSTANTS)
    prints = "".join(f'printf("%zu\\n", (size_t)({question}));\n' for question in questions)
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\nint main(void) {{\n{prints}}}\n"
    )
    try:
        subprocess.run(["cc", f"-I{folder}", str(source), "-o", str(program)], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    theirs = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=10).stdout.split()
    wrong = {question: pair for question, *pair in zip(questions, ours, theirs, strict=True) if pair[0] != pair[1]}
    assert wrong == {}


def test_layouts_are_checked_when_ucx_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_errors() == []
    monkeypatch.setitem(vars(sys.modules["pdtx.transports.ucx.structs"])["_SIZES"], RequestParams, 64)
    with pytest.raises(InputError, match="RequestParams has 72 bytes, not 64"):
        Ucp("libucp.so.0", "system")


# -- what cannot be had ------------------------------------------------------------------------------------------------


def test_path_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"no UCX library /nowhere/libucp.so.0; give wheel, system, nixl or a path"):
        make_runtime("raw", "/nowhere/libucp.so.0")


def test_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libother.so.0"
    file.write_bytes(b"no library")
    with pytest.raises(InputError, match=r"libother.so.0 does not load"):
        make_runtime("raw", str(file))


def test_library_that_is_no_ucx() -> None:
    with pytest.raises(InputError, match=r"is no libucp of UCX >= 1\.18"):
        Ucp("libc.so.6", "system")


def test_ucx_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = usable_runtime("raw").ucp
    monkeypatch.setattr(Ucp, "_version", lambda _: (1, 13, 1))
    with pytest.raises(InputError, match=r"too old: pdtx needs 1.18 or newer"):
        Ucp(loaded.path, "system")


@pytest.mark.parametrize(("choice", "advice"), [("wheel", "ucxx-cu12"), ("nixl", "install nixl"), ("system", "LD_LIB")])
def test_kind_that_is_not_there(choice: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wheel_path", "nixl_path", "system_path"):
        monkeypatch.setattr(library, name, lambda: None)
    with pytest.raises(InputError, match=f"no UCX of kind '{choice}' here; .*{advice}"):
        make_runtime("raw", choice)
    with pytest.raises(InputError, match="no UCX is installed"):
        make_runtime("raw")


def test_second_ucx_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Its parts would be mixed with those of the first."""
    loaded = usable_runtime("raw", "wheel").ucp
    copy = tmp_path / "libucp.so.0"
    copy.write_bytes(Path(loaded.path).read_bytes())
    with pytest.raises(InputError, match=f"has loaded UCX from .* and cannot load {copy} too; use another process"):
        make_runtime("raw", str(copy))


def test_unknown_runtime() -> None:
    with pytest.raises(InputError, match="unknown UCX runtime 'java'; one of auto, ucxx, ucx-py, raw"):
        make_runtime("java")


def test_runtime_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ucxx", "ucp"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"ucxx does not load: .*install ucxx-cu12 or ucxx-cu13, or use runtime raw"):
        make_runtime("ucxx")
    with pytest.raises(InputError, match=r"ucx-py does not load: .*install ucxx-cu12 instead, or use runtime raw"):
        make_runtime("ucx-py")


def test_ucxx_brings_its_own_library() -> None:
    with pytest.raises(InputError, match="ucxx finds its UCX itself, on wheel or system; use runtime raw for nixl"):
        make_runtime("ucxx", "nixl")


def test_ucxx_with_another_library_than_was_asked_for() -> None:
    usable_runtime("ucxx", "wheel")
    with pytest.raises(InputError, match=r"ucxx has UCX from .*libucp\.so.*, not the system's: it was loaded before"):
        make_runtime("ucxx", "system")


# -- what is taken -----------------------------------------------------------------------------------------------------


def test_auto_takes_ucxx_where_it_has_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"ucxx", "ucp"}
    monkeypatch.setattr(runtime, "find_spec", lambda name: name if name in installed else None)
    assert runtime._best(None) == runtime._best("wheel") == runtime._best("system") == "ucxx"
    assert runtime._best("nixl") == runtime._best("/some/libucp.so.0") == "raw"
    installed.remove("ucxx")
    assert runtime._best(None) == "ucx-py"
    installed.remove("ucp")
    assert runtime._best(None) == "raw"


@pytest.mark.parametrize("name", ["ucxx", "raw"])
def test_wheel(name: str) -> None:
    loaded = usable_runtime(name, "wheel")
    label = ", ucxx 0." if name == "ucxx" else ""
    assert str(loaded).startswith(f"UCX {loaded.ucp.version_text} (wheel{label}")
    assert Path(loaded.ucp.path).parent.name == "lib"


@pytest.mark.parametrize("order", ["ucxx, raw", "raw, ucxx"])
def test_ucxx_and_raw_share_the_library(order: str) -> None:
    """The wheel has each file several times: another of them would be a second UCX."""
    usable_runtime("ucxx")
    said = in_fresh_process(f"""
from pdtx.transports.ucx.library import mapped
from pdtx.transports.ucx.runtime import make_runtime
paths = {{make_runtime(name, "wheel").ucp.path for name in {order.split(", ")}}}
print(len(paths), len(mapped()))
""")
    assert said.split() == ["1", "1"]


def test_nixl_beside_the_wheel() -> None:
    usable_nixl()
    usable_runtime("raw", "wheel")
    loaded = usable_runtime("raw", "nixl")
    assert str(loaded) == f"UCX {loaded.ucp.version_text} (nixl)"


def test_folder_stands_for_the_library_in_it(tmp_path: Path) -> None:
    (tmp_path / "libucp.so.0").write_bytes(b"no library")
    with pytest.raises(InputError, match=r"cannot load|does not load"):
        make_runtime("raw", str(tmp_path))


# -- settings ----------------------------------------------------------------------------------------------------------


def in_fresh_process(code: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "RAPIDS_"))} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


SETTINGS = """
from pdtx.transports.ucx.environment import knobs, set_by_pdtx
from pdtx.transports.ucx.runtime import make_runtime
make_runtime({name!r}).context().close()
print(knobs()["UCX_RNDV_THRESH"], "UCX_RNDV_THRESH" in set_by_pdtx(), knobs().get("UCX_TLS"))
"""


@pytest.mark.parametrize("name", ["ucxx", "raw"])
def test_threshold_is_set_before_ucx_is_loaded_and_recorded(name: str) -> None:
    usable_runtime(name)
    assert in_fresh_process(SETTINGS.format(name=name)).split() == ["inf", "True", "None"]


@pytest.mark.parametrize("name", ["ucxx", "raw"])
def test_users_settings_stand(name: str) -> None:
    usable_runtime(name)
    said = in_fresh_process(SETTINGS.format(name=name), UCX_RNDV_THRESH="64k", UCX_TLS="tcp")
    assert said.split() == ["64k", "False", "tcp"]


def test_ucx_keeps_its_warnings_off_standard_output() -> None:
    usable_runtime("raw")
    assert in_fresh_process(SETTINGS.format(name="raw"), UCX_TLS="rc,tcp").split() == ["inf", "True", "rc,tcp"]


def test_knobs_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCXX_LOG", "no setting of UCX's")
    assert environment.knobs()["UCX_NET_DEVICES"] == "lo"
    assert all(name.startswith(("UCX_", "RAPIDS_")) for name in environment.knobs())
