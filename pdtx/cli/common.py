"""What every command does alike: errors in one line, logs on stderr, opening a model and its cache."""

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from pdtx.cli.logs import configure_logging, say
from pdtx.cli.processes import follow_parent
from pdtx.errors import InputError, PdtxError

__all__ = [
    "configure_logging",
    "emit",
    "load_runner",
    "load_synthetic",
    "note",
    "open_cache",
    "open_security",
    "run_app",
    "single_command",
]

if TYPE_CHECKING:
    from pdtx.cache import KVCaches
    from pdtx.protocol import CacheDescription
    from pdtx.replay.synthetic import SyntheticModel
    from pdtx.runner import ModelRunner
    from pdtx.sidechannel import Security


def note(text: str) -> None:
    """Say something about progress, on stderr."""
    say(text)


def emit(text: str) -> None:
    """Put data on stdout."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line; a PdtxError becomes one line on stderr and its exit code, Ctrl-C 130 and SIGTERM 143."""
    # As an exception, so that what was opened is closed, child processes above all.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    follow_parent()
    try:
        app(prog_name=name)
    except PdtxError as error:
        say(f"{name}: error: {error}", logging.ERROR)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        note(f"{name}: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


def single_command(function: Callable[..., Any], env_prefix: str) -> typer.Typer:
    """Return an app of one command whose options can also be given as PREFIX_OPTION in the environment."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"auto_envvar_prefix": env_prefix})(function)
    return app


def load_runner(model: str | None, dtype: str, device: str, threads: int | None) -> "ModelRunner":
    """Find and load a model, saying so on stderr. Raises ModelError or InputError."""
    from pdtx.cache import open_device
    from pdtx.runner import ModelRunner, resolve_model

    open_device(device)
    path = resolve_model(model, note)
    note(f"loading {path.name} ({dtype}, {device})")
    return ModelRunner.load(path, dtype, device, threads)


def load_synthetic(source: str, layers: int | None) -> "SyntheticModel":
    """Find the shapes of a model that has no weights here, saying so on stderr. Raises ModelError or InputError."""
    from pdtx.replay.synthetic import SyntheticModel

    model = SyntheticModel(source, layers=layers)
    if model.left_out:
        note(f"left out, for they do not count tokens: {', '.join(model.left_out)}")
    return model


class CacheMaker(Protocol):
    """A model, or what stands for one, as far as its caches are concerned; see ModelRunner."""

    name: str
    fingerprint: str

    def make_cache(
        self, *, layout: str, block_size: int, num_blocks: int, tp_size: int = 1, shared: bool = False
    ) -> "KVCaches":
        """Allocate the model's caches."""


def open_cache(
    runner: CacheMaker, *, layout: str, block_size: int, num_blocks: int, tp_size: int = 1, shared: bool = False
) -> tuple["KVCaches", "CacheDescription"]:
    """Make the paged caches of a model and the description that a peer gets of them.

    shared: in memory that other processes of this host can be let map.
    """
    from pdtx.engine import describe_cache

    cache = runner.make_cache(
        layout=layout, block_size=block_size, num_blocks=num_blocks, tp_size=tp_size, shared=shared
    )
    return cache, describe_cache(cache, model=runner.name, fingerprint=runner.fingerprint)


def open_security(key: Path | None, peer_keys: list[Path] | None, *, insecure: bool) -> "Security":
    """Read the keys that were given. Raises InputError for a key that cannot be read, or half a pair."""
    from pdtx.sidechannel import Security, load_public, load_secret

    if (key is None) != (not peer_keys):
        raise InputError("--key and --peer-key go together; make keys with 'pdtx keygen NAME'")
    own = load_secret(key) if key is not None else None
    return Security(own=own, peer_public=[load_public(path) for path in peer_keys or []], insecure=insecure)
