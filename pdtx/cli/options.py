"""Options that several commands share, as typer wants them.

Those that a node has too are declared in pdtx.node.options, once; here they only get typer's form.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli.logs import configure_logging
from pdtx.cli.signature import as_typer
from pdtx.node import options as node
from pdtx.node.options import Option

Model = Annotated[node.Model, as_typer(node.Model)]
Dtype = Annotated[node.Dtype, as_typer(node.Dtype)]
Device = Annotated[node.Device, as_typer(node.Device)]
Threads = Annotated[node.Threads, as_typer(node.Threads)]
Layers = Annotated[node.Layers, as_typer(node.Layers)]
DecodeRate = Annotated[node.DecodeRate, as_typer(node.DecodeRate)]
PrefillRate = Annotated[node.PrefillRate, as_typer(node.PrefillRate)]
Layout = Annotated[node.Layout, as_typer(node.Layout)]
BlockSize = Annotated[node.BlockSize, as_typer(node.BlockSize)]
NumBlocks = Annotated[node.NumBlocks, as_typer(node.NumBlocks)]
TensorParallel = Annotated[node.TensorParallel, as_typer(node.TensorParallel)]
Mover = Annotated[node.Mover, as_typer(node.Mover)]
MoverOption = Annotated[node.MoverOption, as_typer(node.MoverOption)]
Require = Annotated[node.Require, as_typer(node.Require)]
TransferMode = Annotated[node.TransferMode, as_typer(node.TransferMode)]
OffloadingSize = Annotated[node.OffloadingSize, as_typer(node.OffloadingSize)]
OffloadingDiskSize = Annotated[node.OffloadingDiskSize, as_typer(node.OffloadingDiskSize)]
OffloadingDir = Annotated[node.OffloadingDir, as_typer(node.OffloadingDir)]
OffloadingBlockSize = Annotated[node.OffloadingBlockSize, as_typer(node.OffloadingBlockSize)]
OffloadingPolicy = Annotated[node.OffloadingPolicy, as_typer(node.OffloadingPolicy)]
OffloadingWrite = Annotated[node.OffloadingWrite, as_typer(node.OffloadingWrite)]
PeerTier = Annotated[node.PeerTier, as_typer(node.PeerTier)]
Key = Annotated[node.Key, as_typer(node.Key)]
PeerKey = Annotated[node.PeerKey, as_typer(node.PeerKey)]
Insecure = Annotated[node.Insecure, as_typer(node.Insecure)]
CaptureTokens = Annotated[node.CaptureTokens, as_typer(node.CaptureTokens)]
MaxTokens = Annotated[node.MaxTokens, as_typer(node.MaxTokens)]
IgnoreEos = Annotated[node.IgnoreEos, as_typer(node.IgnoreEos)]
Chat = Annotated[node.Chat, as_typer(node.Chat)]
ChunkSize = Annotated[node.ChunkSize, as_typer(node.ChunkSize)]

ConfigOrPreset = Annotated[str, typer.Argument(help="config.json, a folder with one, or a preset such as llama-3-8b.")]
KVCacheDtype = Annotated[str, typer.Option(help="auto (the model's), fp8, fp8_ds_mla, nvfp4, ...")]
Ranks = Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Ranks that share the heads.", min=1)]

_Json = Annotated[bool, Option("Print the result as JSON on stdout.", flags=("--json",))]
_Verbose = Annotated[bool, Option("Log all on stderr: --log-level debug.", node.WATCH, flags=("--verbose", "-v"))]
_LogLevel = Annotated[
    str | None,
    Option("What to log on stderr: debug, info, warning or error; default: warning.", node.WATCH, show_default=False),
]
_LogFormat = Annotated[str, Option("text, or json: an object a line on stderr.", node.WATCH)]

Json = Annotated[_Json, as_typer(_Json)]
Verbose = Annotated[_Verbose, as_typer(_Verbose)]
LogLevel = Annotated[_LogLevel, as_typer(_LogLevel)]
LogFormat = Annotated[_LogFormat, as_typer(_LogFormat)]


@dataclass(frozen=True)
class LogOptions:
    """What a program logs on stderr, and whether its result is JSON on stdout."""

    json: _Json = False
    log_level: _LogLevel = None
    log_format: _LogFormat = "text"
    verbose: _Verbose = False

    def configure(self) -> None:
        """Send logs where they are wanted. Raises InputError for a level or format that there is not."""
        configure_logging(self.verbose, self.log_level, self.log_format)


@dataclass(frozen=True)
class PromptOptions:
    """The prompts of a run, and where its result is written."""

    prompt: Annotated[list[str] | None, Option("A prompt; may be repeated.", show_default=False)] = None
    prompts: Annotated[
        Path | None,
        Option("Prompts, a line each: plain, or JSON with prompt or token_ids (and features).", show_default=False),
    ] = None
    output: Annotated[Path | None, Option("Also write the result to this file.", show_default=False)] = None
