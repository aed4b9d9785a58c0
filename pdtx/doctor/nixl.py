"""NIXL: whether its package is here, of which CUDA, and its plugins."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pdtx.doctor.finding import Finding
from pdtx.doctor.machine import Machine

_SUBJECT = "NIXL"
_PACKAGES = ("nixl-cu13", "nixl-cu12")
_PREFIX = "libplugin_"
_EFA = "libefa.so.1"
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64")


@dataclass(frozen=True)
class NixlPackage:
    """What is installed. version: None if nothing is. builds: packages with the libraries. plugins: folders of them."""

    version: str | None
    builds: tuple[str, ...] = ()
    plugins: tuple[Path, ...] = ()


def find_nixl() -> NixlPackage:
    """Look at installed packages, without loading any."""
    try:
        version = metadata.version("nixl") if find_spec("nixl") is not None else None
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    builds = [(name, spec) for name in _PACKAGES if (spec := find_spec(name.replace("-", "_"))) is not None]
    # Editable or repaired wheels keep the plugins under names of their own beside the package.
    folders = (
        folder
        for name, spec in builds
        for folder in sorted(Path(spec.origin or "").parent.parent.glob(f".{name.replace('-', '_')}*/plugins"))
    )
    return NixlPackage(version, tuple(name for name, _ in builds), tuple(folders))


def check_nixl(machine: Machine, package: NixlPackage) -> Iterator[Finding]:
    """Judge what was found; whether it runs is for the mover's own trial."""
    if package.version is None:
        fix = "pip install 'pdtx[nixl]'"
        yield Finding(subject=_SUBJECT, name="package", value="not installed", fix=fix, stops=("nixl",))
        return
    value = f"NIXL {package.version}, built as {', '.join(package.builds) or 'unknown'}"
    yield Finding(subject=_SUBJECT, name="package", value=value)
    yield from _two_copies(machine)
    chosen = machine.environ.get("NIXL_PLUGIN_DIR")
    folders = (Path(chosen),) if chosen else package.plugins
    names = sorted({path.name[len(_PREFIX) : -len(".so")] for one in folders for path in one.glob(f"{_PREFIX}*.so")})
    if "UCX" in names:
        yield Finding(subject=_SUBJECT, name="plugins", value=", ".join(names))
    elif names or chosen:
        value = ", ".join(names) or f"none in {chosen}"
        fix = (
            "the mover nixl takes the plugin UCX: set NIXL_PLUGIN_DIR to the folder with libplugin_UCX.so, or unset it"
        )
        yield Finding(subject=_SUBJECT, name="plugins", value=value, level="warning", fix=fix, stops=("nixl",))
    else:
        yield Finding(subject=_SUBJECT, name="plugins", value="where they are is not known")


def _two_copies(machine: Machine) -> Iterator[Finding]:
    """Of libnl and libibverbs: NIXL's wheel has them, and UCX's module for EFA, where it loads, brings the system's."""
    folders = [folder for folder in _LIBRARY_FOLDERS if _EFA in machine.names(folder)]
    modules = machine.environ.get("UCX_MODULES", "")
    if not folders or (modules.startswith("^") and "efa" in modules[1:].split(",")):
        return
    fix = "set UCX_MODULES=^efa, unless the network is EFA; results are not affected"
    value = f"{folders[0]}/{_EFA}: beside it processes with NIXL may die by SIGSEGV at their end (seen on Debian 12)"
    yield Finding(subject=_SUBJECT, name="EFA", value=value, level="warning", fix=fix)
