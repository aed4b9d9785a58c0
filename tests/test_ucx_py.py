"""ucx-py is not to be had from the registry: a stand-in with its names, and pdtx's own UCX behind them."""

import sys
from enum import Enum
from types import ModuleType

import pytest

from pdtx.transports.base import Region
from pdtx.transports.ucx.raw_runtime import RawContext, RawWorker
from tests.test_ucx_link import one_transfer
from tests.ucx_peer import pattern, ucx_fabric, usable_runtime


class Feature(Enum):
    """As ucx-py's: which parts of UCX a context is for."""

    RMA = 2
    WAKEUP = 16


@pytest.fixture
def ucx_py(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install the stand-in; return what is closed, in order."""
    ucp, closed = usable_runtime("raw").ucp, list[str]()

    class UCXContext:
        def __init__(self, config_dict: dict[str, str], feature_flags: tuple[Feature, ...]) -> None:
            assert config_dict == {}
            assert feature_flags == (Feature.RMA, Feature.WAKEUP)
            self.raw = RawContext(ucp)
            self.handle = self.raw.handle

        def close(self) -> None:
            closed.append("context")
            self.raw.close()

    class UCXWorker:
        def __init__(self, context: UCXContext) -> None:
            self._raw = RawWorker(ucp, context.raw)
            self.handle = self._raw.handle

        def get_address(self) -> memoryview:
            return memoryview(self._raw.address)

        def close(self) -> None:
            closed.append("worker")
            self._raw.close()

    package, api = ModuleType("ucp"), ModuleType("ucp._libs.ucx_api")
    vars(package)["__version__"] = "0.45.0"
    vars(api).update(UCXContext=UCXContext, UCXWorker=UCXWorker, Feature=Feature)
    monkeypatch.setitem(sys.modules, "ucp", package)
    monkeypatch.setitem(sys.modules, "ucp._libs.ucx_api", api)
    return closed


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_transfer_on_ucx_pys_objects(tls: str, ucx_py: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    region, target = Region(pattern(4096, 1)), Region(pattern(4096, 2))
    with ucx_fabric(runtime="ucx-py") as fabric, ucx_fabric(runtime="ucx-py") as other:
        assert str(fabric).endswith("ucx-py 0.45.0)")
        one_transfer(fabric, other, region, target)
        assert ucx_py == ["worker", "worker"]
    assert ucx_py == ["worker", "worker", "context", "context"]
