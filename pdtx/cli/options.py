"""Options that several commands share; names are those of the serving engines where they have one."""

from pathlib import Path
from typing import Annotated

import typer

_CACHE, _MODEL, _TRANSFER, _SECURITY, _TIERS = "KV cache", "Model", "Transfer", "Security", "Tiers"
_WATCH = "Logs and metrics"

Model = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint folder or hub id; default: the bundled demo model, SmolLM2-135M-Instruct.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Element type of weights and K/V: float32, bfloat16 or float16.", rich_help_panel=_MODEL)
]
Device = Annotated[
    str, typer.Option(help="Torch device of model and cache: cpu, cuda, cuda:1.", rich_help_panel=_MODEL)
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads for the model.", min=1, rich_help_panel=_MODEL, show_default=False)
]
Layout = Annotated[
    str,
    typer.Option(
        help="A preset: flash_attn_nhd, flash_attn_hnd, flashinfer_nhd, flashinfer_hnd, vllm_lbhnc and others; with "
        "commas one for each kind of layer, as in flashinfer_hnd,mla_blhnc,mamba_ds.",
        rich_help_panel=_CACHE,
    ),
]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.", min=1, rich_help_panel=_CACHE)]
NumBlocks = Annotated[
    int,
    typer.Option(
        help="Blocks in the pool of each group of layers; block 0 is never used. States of recurrent layers need one "
        "block a sequence, and get 65 of them at most.",
        min=2,
        rich_help_panel=_CACHE,
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "--tp",
        help="Ranks that the KV heads are divided over, each with memory of its own (all in this process).",
        min=1,
        rich_help_panel=_CACHE,
    ),
]
Mover = Annotated[
    str,
    typer.Option(
        help="What moves the payload, the same on both sides: tcp, shm, ucx, nixl, or another that is installed.",
        rich_help_panel=_TRANSFER,
    ),
]
MoverOption = Annotated[
    list[str] | None,
    typer.Option(
        help="KEY=VALUE for the mover's own option, as in socket_buffer_bytes=4194304; may be repeated.",
        rich_help_panel=_TRANSFER,
        show_default=False,
    ),
]
Require = Annotated[
    str | None,
    typer.Option(
        help="Fail before any payload unless rdma, tcp or shm carries it, whatever the mover.",
        rich_help_panel=_TRANSFER,
        show_default=False,
    ),
]
TransferMode = Annotated[
    str,
    typer.Option(
        "--mode",
        help="direct: every run as it is. staged: packed into large pieces first. auto: the cheaper one, piece by "
        "piece, by measured costs (PDTX_COSTS, or ~/.cache/pdtx/costs.json).",
        rich_help_panel=_TRANSFER,
    ),
]
OffloadingSize = Annotated[
    float,
    typer.Option(
        "--kv-offloading-size",
        help="GiB of host memory that keeps blocks for later requests with the same beginning; 0: none.",
        min=0.0,
        rich_help_panel=_TIERS,
    ),
]
OffloadingDiskSize = Annotated[
    float,
    typer.Option(
        "--kv-offloading-disk-size",
        help="GiB on disk behind that, in --kv-offloading-dir; 0: none.",
        min=0.0,
        rich_help_panel=_TIERS,
    ),
]
OffloadingDir = Annotated[
    Path | None,
    typer.Option(
        "--kv-offloading-dir",
        help="Folder of the disk tier; what an earlier process of the same model kept there is found again.",
        rich_help_panel=_TIERS,
        show_default=False,
    ),
]
OffloadingBlockSize = Annotated[
    int | None,
    typer.Option(
        "--kv-offloading-block-size",
        help="Tokens in a tier's block, a multiple of --block-size; default: --block-size. The same for all who share.",
        min=1,
        rich_help_panel=_TIERS,
        show_default=False,
    ),
]
OffloadingPolicy = Annotated[
    str,
    typer.Option("--kv-offloading-policy", help="What makes room: lru, arc, fifo or s3fifo.", rich_help_panel=_TIERS),
]
OffloadingWrite = Annotated[
    str,
    typer.Option(
        "--kv-offloading-write",
        help="through: blocks go to disk at once. back: when memory has no room for them any more.",
        rich_help_panel=_TIERS,
    ),
]
ServeTier = Annotated[
    str | None,
    typer.Option(
        "--serve-tier",
        help="HOST:PORT at which other nodes may read this node's host memory tier; port 0 takes any.",
        rich_help_panel=_TIERS,
        show_default=False,
    ),
]
PeerTier = Annotated[
    str | None,
    typer.Option(
        "--peer-tier",
        help="HOST:PORT of a node's --serve-tier, from which blocks are loaded that this node does not have.",
        rich_help_panel=_TIERS,
        show_default=False,
    ),
]
ConfigOrPreset = Annotated[str, typer.Argument(help="config.json, a folder with one, or a preset such as llama-3-8b.")]
KVCacheDtype = Annotated[str, typer.Option(help="auto (the model's), fp8, fp8_ds_mla, nvfp4, ...")]
Ranks = Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Ranks that share the heads.", min=1)]
Key = Annotated[
    Path | None,
    typer.Option(
        help="This node's secret key (NAME.key_secret from 'pdtx keygen'); required off loopback.",
        rich_help_panel=_SECURITY,
        show_default=False,
    ),
]
PeerKey = Annotated[
    list[Path] | None,
    typer.Option(
        help="A peer's public key (NAME.key); may be repeated.", rich_help_panel=_SECURITY, show_default=False
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Talk in the clear off loopback, with a warning.", rich_help_panel=_SECURITY)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log all on stderr: --log-level debug.", rich_help_panel=_WATCH)
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        help="What to log on stderr: debug, info, warning or error; default: warning.",
        rich_help_panel=_WATCH,
        show_default=False,
    ),
]
LogFormat = Annotated[str, typer.Option(help="text, or json: an object a line on stderr.", rich_help_panel=_WATCH)]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve Prometheus metrics at http://HOST:PORT/metrics; 0 takes any port.",
        min=0,
        max=65535,
        rich_help_panel=_WATCH,
        show_default=False,
    ),
]
MetricsHost = Annotated[
    str, typer.Option(help="Address that metrics are served at; they are not encrypted.", rich_help_panel=_WATCH)
]
Capture = Annotated[
    Path | None,
    typer.Option(
        help="Record arrivals, lengths, shared prefixes, block tables and layer times into this new file.",
        rich_help_panel=_WATCH,
        show_default=False,
    ),
]
CaptureTokens = Annotated[
    bool,
    typer.Option("--capture-tokens", help="Record token ids as well, which are the prompts.", rich_help_panel=_WATCH),
]
DecodeRate = Annotated[
    float,
    typer.Option(
        help="Tokens a second that a request is made to take once its cache is there; 0: it ends at once.", min=0.0
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(help="Only so many of the model's layers.", min=1, rich_help_panel=_MODEL, show_default=False),
]
