"""Build step: compile pdtx's optional C library into the package, where there is a compiler."""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Run by hatchling for [tool.hatch.build.targets.wheel.hooks.custom], also for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; if that worked, let the wheel carry the library and be one for this platform only."""
        module = runpy.run_path(str(Path(self.root, "pdtx", "native", "build.py")))
        built: Path = module["BUILT"]
        if not module["build"]():
            return
        build_data["artifacts"].append(f"/{built.relative_to(self.root).as_posix()}")
        # Any Python 3 can load it: what it needs of the machine is the platform alone.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
