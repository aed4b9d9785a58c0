"""The optional C library: exact copies, refused nonsense, UCX's calling convention, and life without it."""

import ctypes
import runpy
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdtx.native
from pdtx.errors import InputError, PlanError
from pdtx.native import Int64s, Memory, Native, Uint64s, library
from pdtx.native.build import SOURCE, build

Bytes = npt.NDArray[np.uint8]
HATCH_BUILD = Path(__file__).parent.parent / "hatch_build.py"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built from the present source whatever was installed."""
    target = tmp_path_factory.mktemp("native") / "libruns.so"
    if not build(target):
        pytest.skip("no C compiler here")
    return target


@pytest.fixture(scope="session")
def native(built: Path) -> Native:
    return Native(built)


def int64s(*numbers: int) -> Int64s:
    return np.array(numbers, np.int64)


def memory(array: Bytes) -> Memory:
    return Memory(array.ctypes.data, array.nbytes)


# -- copying -----------------------------------------------------------------------------------------------------------


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Sizes of two regions, and runs (dst, src, nbytes) inside them: overlapping, empty, of any alignment."""
    to, source = draw(st.integers(0, 3000)), draw(st.integers(0, 3000))
    runs = []
    for _ in range(draw(st.integers(0, 12))):
        nbytes = draw(st.integers(0, min(to, source)))
        runs.append((draw(st.integers(0, to - nbytes)), draw(st.integers(0, source - nbytes)), nbytes))
    return to, source, runs


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 16, 99])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 64])
def test_shares_of_threads_are_all_of_it(native: Native, count: int, threads: int, past_caches: bool) -> None:
    random = np.random.default_rng(count)
    lengths = random.integers(0, 5000, count).astype(np.int64)
    source = random.integers(0, 256, int(lengths.sum()) + 1, np.uint8)
    starts = np.cumsum(lengths) - lengths
    order = random.permutation(count)
    places = np.zeros(count, np.int64)  # the same runs, put down in another order
    places[order] = np.cumsum(lengths[order]) - lengths[order]
    to, expected = np.zeros_like(source), np.zeros_like(source)
    for dst, src, nbytes in zip(places, starts, lengths, strict=True):
        expected[dst : dst + nbytes] = source[src : src + nbytes]
    native.copy_runs(memory(to), memory(source), places, starts, lengths, past_caches=past_caches, threads=threads)
    assert np.array_equal(to, expected)


@given(copies(), st.booleans())
def test_copy_is_numpys(native: Native, case: tuple[int, int, list[tuple[int, int, int]]], past_caches: bool) -> None:
    to_bytes, source_bytes, runs = case
    random = np.random.default_rng(1)
    source = random.integers(0, 256, source_bytes, np.uint8)
    to = random.integers(0, 256, to_bytes + 64, np.uint8)  # what lies behind the region must stay as it is
    expected = to.copy()
    for dst, src, nbytes in runs:
        expected[dst : dst + nbytes] = source[src : src + nbytes]
    columns = [int64s(*(run[column] for run in runs)) for column in range(3)]
    native.copy_runs(Memory(to.ctypes.data, to_bytes), memory(source), *columns, past_caches=past_caches)
    assert np.array_equal(to, expected)


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("nbytes", [1, 15, 63, 64, 127, 128, 129, 255, 4096, 32768])
@pytest.mark.parametrize("misaligned", [0, 1, 8, 15])
def test_sizes_around_the_loops(native: Native, nbytes: int, misaligned: int, past_caches: bool) -> None:
    source = np.random.default_rng(2).integers(0, 256, 3 * nbytes, np.uint8)
    to = np.zeros(3 * nbytes + 32, np.uint8)
    start = misaligned - to.ctypes.data % 16 + 16
    native.copy_runs(memory(to), memory(source), int64s(start), int64s(nbytes), int64s(nbytes), past_caches=past_caches)
    assert np.array_equal(to[start : start + nbytes], source[nbytes : 2 * nbytes])
    assert not to[:start].any()
    assert not to[start + nbytes :].any()


@pytest.mark.parametrize(
    ("dst", "src", "nbytes"),
    [
        (93, 0, 8),
        (0, 57, 8),
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, -1),
        (0, 0, 2**63 - 1),
        (2**63 - 1, 0, 8),
        (0, 2**63 - 8, 8),
        (101, 0, 0),
    ],
)
def test_run_that_leaves_its_region_is_refused(native: Native, dst: int, src: int, nbytes: int) -> None:
    to, source = np.zeros(100, np.uint8), np.ones(64, np.uint8)
    with pytest.raises(PlanError, match=f"run 1 of {nbytes} bytes .* leaves its region"):
        native.copy_runs(memory(to), memory(source), int64s(0, dst, 8), int64s(0, src, 0), int64s(4, nbytes, 4))
    assert to.sum() == 4, "the run before it is copied, nothing else"


def test_arrays_that_do_not_fit_are_refused(native: Native) -> None:
    to, source, right = np.zeros(8, np.uint8), np.zeros(8, np.uint8), int64s(0, 4)
    bad: list[tuple[Int64s, ...]] = [
        (right, right, right[:1]),
        (right, right, int64s(0, 0, 4, 4)[::2]),
        (right, right.astype(np.int32), right),
        (right.reshape(2, 1), right, right),
    ]
    for dst, src, nbytes in bad:
        with pytest.raises(InputError):
            native.copy_runs(memory(to), memory(source), dst, src, nbytes)


# -- posting, with stand-ins for UCX's functions -----------------------------------------------------------------------

Post = ctypes.CFUNCTYPE(
    ctypes.c_uint64, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_uint64, *[ctypes.c_void_p] * 2
)
Check = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
FAILED = 2**64 - 3
"""A pointer that says error -3."""


def address_of(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def post_with(native: Native, answers: list[int], pending: Uint64s) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
    calls = list[tuple[int, ...]]()

    def post(*arguments: int) -> int:
        calls.append(arguments)
        return answers[len(calls) - 1]

    function = Post(post)
    local, remote, nbytes = int64s(0, 100, 200), int64s(7, 8, 9), int64s(10, 20, 30)
    posted = native.post_runs(address_of(function), 11, 1000, 2000, local, remote, nbytes, 22, 33, pending)
    return posted, calls


def test_runs_are_posted_in_order(native: Native) -> None:
    pending = np.zeros(3, np.uint64)
    posted, calls = post_with(native, [501, 0, 503], pending)
    assert posted == (3, 2)
    assert pending[:2].tolist() == [501, 503]
    assert calls == [
        (11, 1000, 10, 2007, 22, 33),
        (11, 1100, 20, 2008, 22, 33),
        (11, 1200, 30, 2009, 22, 33),
    ]


def test_posting_ends_at_the_first_error(native: Native) -> None:
    pending = np.zeros(3, np.uint64)
    posted, calls = post_with(native, [501, FAILED, 503], pending)
    assert posted == (1, 1)
    assert pending[:2].tolist() == [501, FAILED]
    assert len(calls) == 2


def test_posting_needs_room_for_every_request(native: Native) -> None:
    with pytest.raises(InputError, match="uint64 array of 3"):
        post_with(native, [0, 0, 0], np.zeros(2, np.uint64))


def test_reaping_frees_what_has_ended(native: Native) -> None:
    status = {501: 1, 502: 0, 503: -25, 504: 1, 505: -3}
    freed = list[int]()
    check, free = Check(lambda request: status[request]), Free(lambda request: freed.append(request))
    pending = np.array([501, 502, 503, 504, 505, 999], np.uint64)
    assert native.reap(address_of(check), address_of(free), pending, 5) == (2, -25)
    assert pending[:2].tolist() == [501, 504]
    assert freed == [502, 503, 505]
    assert native.reap(address_of(check), address_of(free), pending, 0) == (0, 0)


# -- with and without it -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the library is looked for, in place of the package's folder."""
    place = tmp_path / "libruns.so"
    monkeypatch.setattr(pdtx.native, "BUILT", place)
    monkeypatch.delenv("PDTX_NATIVE", raising=False)
    return place


def test_library_is_found_unless_it_is_not_wanted(
    installed: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_bytes(built.read_bytes())
    assert library() is not None
    assert library() is library()
    monkeypatch.setenv("PDTX_NATIVE", "0")
    assert library() is None


def test_nothing_built_is_no_error(installed: Path) -> None:
    assert library() is None


def test_file_that_does_not_load_is_left_alone(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed.write_bytes(b"no library")
    assert library() is None
    assert "going on without" in caplog.text


def test_library_of_another_version_is_left_alone(
    installed: Path, built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed.write_bytes(built.read_bytes())
    monkeypatch.setattr(pdtx.native, "VERSION", 99)
    assert library() is None
    assert "version 3, not 99" in caplog.text


def test_another_library_is_no_library() -> None:
    with pytest.raises(OSError, match="no library of pdtx"):
        Native(Path("libc.so.6"))


# -- building it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compiler", "reason"), [("/nonexistent/cc", "No such file"), ("false", "exit code 1")])
def test_build_goes_on_without_a_compiler(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", compiler)
    target = tmp_path / "libruns.so"
    target.write_bytes(b"of an older source")
    assert not build(target)
    assert not list(tmp_path.iterdir()), "an old library would be called in ways that it does not know"
    assert reason in capfd.readouterr().err


def test_build_script_runs_alone(built: Path, tmp_path: Path) -> None:
    for file in (SOURCE, SOURCE.with_name("build.py")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, "-I", tmp_path / "build.py"], check=True, timeout=60)
    Native(tmp_path / "libruns.so")


def hook_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the build step tells hatchling; hatchling itself is not needed for that."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(HATCH_BUILD))["NativeHook"]()
    hook.root = str(root)
    build_data: dict[str, object] = {"artifacts": []}
    hook.initialize("standard", build_data)
    return build_data


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    (tmp_path / "pdtx" / "native").mkdir(parents=True)
    for file in (SOURCE, SOURCE.with_name("build.py")):
        (tmp_path / "pdtx" / "native" / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_wheel_with_the_library_is_for_its_platform(
    built: Path, source_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hook_data(source_tree, monkeypatch)
    assert (source_tree / "pdtx/native/libruns.so").exists()
    assert data["artifacts"] == ["/pdtx/native/libruns.so"]
    assert data["pure_python"] is False
    assert str(data["tag"]).startswith("py3-none-linux")


def test_wheel_without_a_compiler_is_for_any_platform(source_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert hook_data(source_tree, monkeypatch) == {"artifacts": []}
