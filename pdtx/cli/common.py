"""What every command does alike: errors in one line, logs on stderr, opening a model and its cache."""

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pdtx.cli.processes import follow_parent
from pdtx.errors import InputError, PdtxError

if TYPE_CHECKING:
    from pdtx.cache import KVCaches
    from pdtx.protocol import CacheDescription
    from pdtx.runner import ModelRunner
    from pdtx.sidechannel import Security


def note(text: str) -> None:
    """Say something about progress, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
        note(f"{name}: error: {error}")
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


def configure_logging(verbose: bool) -> None:
    """Send pdtx's logs to stderr."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("pdtx").setLevel(logging.DEBUG if verbose else logging.WARNING)


def load_runner(model: str | None, dtype: str, device: str, threads: int | None) -> "ModelRunner":
    """Find and load a model, saying so on stderr. Raises ModelError or InputError."""
    from pdtx.cache import open_device
    from pdtx.runner import ModelRunner, resolve_model

    open_device(device)
    path = resolve_model(model, note)
    note(f"loading {path.name} ({dtype}, {device})")
    return ModelRunner.load(path, dtype, device, threads)


def open_cache(
    runner: "ModelRunner", *, layout: str, block_size: int, num_blocks: int, tp_size: int = 1, shared: bool = False
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
