"""The options of nodes, each declared once: its type, help text, bounds and place on the help page.

A field of a config (see pdtx.node.config) is annotated with one of these, and so is a parameter of a command that has
the option too (see pdtx.cli.options). Names are those of the serving engines where they have one: the field
`block_size` is the flag `--block-size`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

MODEL, CACHE, TRANSFER, TIERS = "Model", "KV cache", "Transfer", "Tiers"
SECURITY, BENCH, WATCH = "Security", "Measurements", "Logs and metrics"
PANELS = (None, MODEL, CACHE, TRANSFER, TIERS, SECURITY, BENCH, WATCH)
"""The panels of a node's help page, in their order; None is the first one, without a name of its own."""


@dataclass(frozen=True)
class Option:
    """How a field is given on a command line.

    panel: one of PANELS. flags: where they are not `--name` (and `--no-name` for a bool). min, max: bounds of a number,
    both allowed. show_default: whether the help page names the default.
    """

    help: str
    panel: str | None = None
    flags: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    show_default: bool = True


Model = Annotated[
    str | None,
    Option(
        "Checkpoint folder or hub id; default: the bundled demo model, SmolLM2-135M-Instruct.",
        MODEL,
        show_default=False,
    ),
]
Dtype = Annotated[str, Option("Element type of weights and K/V: float32, bfloat16 or float16.", MODEL)]
Device = Annotated[str, Option("Torch device of model and cache: cpu, cuda, cuda:1.", MODEL)]
Threads = Annotated[int | None, Option("CPU threads for the model.", MODEL, min=1, show_default=False)]
Synthetic = Annotated[
    str | None,
    Option("Decode for 'pdtx replay': caches of this preset's or config's shapes, and no weights.", show_default=False),
]
Layers = Annotated[int | None, Option("Only so many of the model's layers.", MODEL, min=1, show_default=False)]
DecodeRate = Annotated[
    float,
    Option("Tokens a second that a request is made to take once its cache is there; 0: it ends at once.", min=0.0),
]
PrefillRate = Annotated[float, Option("Tokens a second that prefill is made to take (of a capture: as it was).")]

Layout = Annotated[
    str,
    Option(
        "A preset: flash_attn_nhd, flash_attn_hnd, flashinfer_nhd, flashinfer_hnd, vllm_lbhnc and others; with "
        "commas one for each kind of layer, as in flashinfer_hnd,mla_blhnc,mamba_ds.",
        CACHE,
    ),
]
BlockSize = Annotated[int, Option("Tokens in a block.", CACHE, min=1)]
NumBlocks = Annotated[
    int,
    Option(
        "Blocks in the pool of each group of layers; block 0 is never used. States of recurrent layers need one "
        "block a sequence, and get 65 of them at most.",
        CACHE,
        min=2,
    ),
]
TensorParallel = Annotated[
    int,
    Option(
        "Ranks that the KV heads and states are divided over, each with memory of its own (all in this process).",
        CACHE,
        flags=("--tensor-parallel-size", "--tp"),
        min=1,
    ),
]

Mover = Annotated[
    str,
    Option(
        "What moves the payload, the same on both sides: tcp, shm, ucx, nixl, or another that is installed.", TRANSFER
    ),
]
MoverOption = Annotated[
    list[str] | None,
    Option(
        "KEY=VALUE for the mover's own option, as in socket_buffer_bytes=4194304; may be repeated.",
        TRANSFER,
        show_default=False,
    ),
]
Require = Annotated[
    str | None,
    Option(
        "Fail before any payload unless rdma, tcp or shm carries it, whatever the mover.", TRANSFER, show_default=False
    ),
]
TransferMode = Annotated[
    str,
    Option(
        "direct: every run as it is. staged: packed into large pieces first. auto: the cheaper one, piece by "
        "piece, by measured costs (PDTX_COSTS, or ~/.cache/pdtx/costs.json).",
        TRANSFER,
        flags=("--mode",),
    ),
]

OffloadingSize = Annotated[
    float,
    Option("GiB of host memory that keeps blocks for later requests with the same beginning; 0: none.", TIERS, min=0.0),
]
OffloadingDiskSize = Annotated[
    float, Option("GiB on disk behind that, in --kv-offloading-dir; 0: none.", TIERS, min=0.0)
]
OffloadingDir = Annotated[
    Path | None,
    Option(
        "Folder of the disk tier; what an earlier process of the same model kept there is found again.",
        TIERS,
        show_default=False,
    ),
]
OffloadingBlockSize = Annotated[
    int | None,
    Option(
        "Tokens in a tier's block, a multiple of --block-size; default: --block-size. The same for all who share.",
        TIERS,
        min=1,
        show_default=False,
    ),
]
OffloadingPolicy = Annotated[str, Option("What makes room: lru, arc, fifo or s3fifo.", TIERS)]
OffloadingWrite = Annotated[
    str, Option("through: blocks go to disk at once. back: when memory has no room for them any more.", TIERS)
]
ServeTier = Annotated[
    str | None,
    Option(
        "HOST:PORT at which other nodes may read this node's host memory tier; port 0 takes any.",
        TIERS,
        show_default=False,
    ),
]
PeerTier = Annotated[
    str | None,
    Option(
        "HOST:PORT of a node's --serve-tier, from which blocks are loaded that this node does not have.",
        TIERS,
        show_default=False,
    ),
]

Key = Annotated[
    Path | None,
    Option(
        "This node's secret key (NAME.key_secret from 'pdtx keygen'); required off loopback.",
        SECURITY,
        show_default=False,
    ),
]
PeerKey = Annotated[
    list[Path] | None, Option("A peer's public key (NAME.key); may be repeated.", SECURITY, show_default=False)
]
Insecure = Annotated[bool, Option("Talk in the clear off loopback, with a warning.", SECURITY, flags=("--insecure",))]

Connect = Annotated[str, Option("HOST:PORT of the decode node.", show_default=False)]
ConnectTimeout = Annotated[float, Option("Seconds to wait for the decode node.", min=0.1)]
MaxTokens = Annotated[int, Option("Tokens to generate for each prompt.", min=1)]
IgnoreEos = Annotated[bool, Option("Generate --max-tokens whatever comes.", flags=("--ignore-eos",))]
Chat = Annotated[bool, Option("Put prompts into the model's chat template.", flags=("--chat",))]
ChunkSize = Annotated[int, Option("Most prompt tokens computed at a time.", min=1)]
MaxNumSeqs = Annotated[int, Option("Most prompts under way at once.", min=1)]
Deadline = Annotated[
    float, Option("Seconds within which a request must end; a decode node gives it 600 at most.", min=0.1)
]

Listen = Annotated[str, Option("HOST:PORT to serve prefill nodes at; port 0 takes any.")]
DataPort = Annotated[int, Option("Port for payloads; 0 takes any.", min=0, max=65535)]
Advertise = Annotated[
    str | None, Option("Host that prefill nodes reach this one at, if not the one listened on.", show_default=False)
]
Verify = Annotated[
    bool, Option("Compare every element with the prefill node's cache.", flags=("--verify/--no-verify",))
]
Requests = Annotated[int | None, Option("Stop after this many requests.", min=1, show_default=False)]
InjectFault = Annotated[
    str | None, Option("Plan wrongly on purpose: swap two axes, as in 'token,head'.", show_default=False)
]

Capture = Annotated[
    Path | None,
    Option(
        "Record arrivals, lengths, shared prefixes, block tables and layer times into this new file.",
        WATCH,
        show_default=False,
    ),
]
CaptureTokens = Annotated[
    bool, Option("Record token ids as well, which are the prompts.", WATCH, flags=("--capture-tokens",))
]
MetricsPort = Annotated[
    int | None,
    Option(
        "Serve Prometheus metrics at http://HOST:PORT/metrics; 0 takes any port.",
        WATCH,
        min=0,
        max=65535,
        show_default=False,
    ),
]
MetricsHost = Annotated[str, Option("Address that metrics are served at; they are not encrypted.", WATCH)]
