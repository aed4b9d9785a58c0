"""The flags of `pdtx bench`. Those that are swept take lists with commas; a config file may have any of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

_SHAPE, _BLOCKS, _MOVING, _AGENTS = "What moves", "Where it lies", "How it moves", "Between whom"
_MEASURING, _OUTPUT, _SECURITY = "Measuring", "Output", "Security"


def _option(text: str, panel: str, *names: str, default: bool = True, **others: Any) -> Any:  # noqa: ANN401 - typer's
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default, show_envvar=False, **others)


# -- swept ------------------------------------------------------------------------------------------------------------

Model = Annotated[str, _option("A preset such as llama-3-8b, a config.json, or a folder with one.", _SHAPE)]
Layers = Annotated[str, _option("Only so many layers of the model, or 'all'.", _SHAPE)]
Tokens = Annotated[
    str | None,
    _option("Tokens of a request: 512,2048. Default: 128,512,2048.", _SHAPE, default=False, metavar="LIST"),
]
Bytes = Annotated[
    str | None,
    _option("Bytes of a request instead, as whole blocks come nearest to: 64MiB,256MiB.", _SHAPE, default=False),
]
Batch = Annotated[str, _option("Requests of a link that move at once.", _SHAPE)]
CacheDtype = Annotated[str, _option("auto (the model's), fp8, nvfp4, ...", _SHAPE)]
BlockSize = Annotated[str, _option("Tokens in a block, PREFILL:DECODE or one for both: 16,16:32.", _BLOCKS)]
Layout = Annotated[
    str,
    _option("PREFILL:DECODE or one for both; kinds of layers joined by +, as in flashinfer_hnd+mla_blhnc.", _BLOCKS),
]
Tp = Annotated[
    str,
    _option("Tensor-parallel sizes, PREFILL:DECODE or one for both: 1:2.", _BLOCKS, "--tp", "--tensor-parallel-size"),
]
MeanRun = Annotated[
    str, _option("Mean length of pieces with consecutive block ids; 1: random order; all: in one piece.", _BLOCKS)
]
BlockTables = Annotated[
    Path | None,
    _option(
        "Recorded block tables (of pdtx capture) instead of made ones; they say sizes too.", _BLOCKS, default=False
    ),
]
Seed = Annotated[int, _option("Of the made block tables and of the contents.", _BLOCKS, min=0)]
Mover = Annotated[str, _option("tcp, shm, ucx, nixl, or another that is installed.", _MOVING)]
MoverOption = Annotated[
    list[str] | None, _option("KEY=VALUE for the mover's own option; may be repeated.", _MOVING, default=False)
]
Op = Annotated[str, _option("push: the prefill side writes. pull: the decode side reads.", _MOVING)]
Mode = Annotated[
    str, _option("direct: every run as it is. staged: packed on the way. auto: by measured costs.", _MOVING)
]
Merge = Annotated[str, _option("on,off: join runs that touch on both sides.", _MOVING)]
Streams = Annotated[
    str | None, _option("Connections a link has, of movers with several; default: the mover's.", _MOVING, default=False)
]
Depth = Annotated[str, _option("Transfers of a link under way at once, or 'all'.", _MOVING)]
LayersPerTransfer = Annotated[str, _option("Layers that one transfer carries, or 'all'.", _MOVING)]
LayerCompute = Annotated[
    str, _option("Time that computing a layer is made to take before it is moved: 0,500us.", _MOVING)
]
Pattern = Annotated[str, _option("Who sends to whom: pairs, fan-in, fan-out, tp.", _AGENTS)]
Isolated = Annotated[
    bool, _option("Links one after another, not all at once: what each has without the others.", _AGENTS, "--isolated")
]

# -- once for a run ---------------------------------------------------------------------------------------------------

Local = Annotated[
    bool, _option("Start the agents here, as child processes; so it is if nobody says otherwise.", _AGENTS, "--local")
]
PrefillAgents = Annotated[int, _option("How many, with --local and --rendezvous.", _AGENTS, min=1, max=1024)]
DecodeAgents = Annotated[int, _option("How many, with --local and --rendezvous.", _AGENTS, min=1, max=1024)]
PrefillAt = Annotated[
    str | None,
    _option("HOST:PORT,... of running 'pdtx-prefill --bench'.", _AGENTS, "--prefill", default=False),
]
DecodeAt = Annotated[
    str | None,
    _option("HOST:PORT,... of running 'pdtx-decode --bench'.", _AGENTS, "--decode", default=False),
]
Rendezvous = Annotated[
    bool,
    _option(
        "This process is one of many that torchrun, srun or a LeaderWorkerSet has started alike; ranks become "
        "prefill agents, then decode agents, and rank 0 measures.",
        _AGENTS,
        "--rendezvous",
    ),
]
MaxBytes = Annotated[
    str | None,
    _option(
        "That the caches of an agent may take, with --local; default: a share of free memory.", _AGENTS, default=False
    ),
]
Device = Annotated[str, _option("Torch device of the agents' caches, with --local and --rendezvous.", _AGENTS)]
Advertise = Annotated[
    str | None,
    _option("Host at which others reach this process, with --rendezvous.", _AGENTS, default=False),
]
ConnectTimeout = Annotated[float, _option("Seconds to wait for the agents.", _AGENTS, min=0.1)]
Key = Annotated[Path | None, _option("The driver's secret key; required off loopback.", _SECURITY, default=False)]
PeerKey = Annotated[list[Path] | None, _option("An agent's public key; may be repeated.", _SECURITY, default=False)]
Insecure = Annotated[bool, _option("Talk in the clear off loopback, with a warning.", _SECURITY, "--insecure")]

Iterations = Annotated[int, _option("Of each case, that count.", _MEASURING, min=1, max=1_000_000)]
Warmup = Annotated[int, _option("Iterations before those, that do not count.", _MEASURING, min=0, max=1_000_000)]
Verify = Annotated[
    bool,
    _option(
        "Compare every element of every iteration with its source; costs no time of the samples.",
        _MEASURING,
        "--verify/--no-verify",
    ),
]
Reference = Annotated[
    str, _option("What rates are compared with: auto, none, or of memcpy,socket,ucx_perftest.", _MEASURING)
]
Deadline = Annotated[float, _option("Seconds for everything; what is measured by then is kept.", _MEASURING, min=1.0)]

Output = Annotated[
    Path | None, _option("The result file; default: results/bench-DATE.json.", _OUTPUT, "--output", "-o", default=False)
]
Force = Annotated[bool, _option("Overwrite the result file.", _OUTPUT, "--force")]
Label = Annotated[
    list[str] | None, _option("KEY=VALUE to remember the run by; may be repeated.", _OUTPUT, default=False)
]
Gbits = Annotated[bool, _option("Rates in Gb/s (10^9 bits) in the table, not GB/s (10^9 bytes).", _OUTPUT, "--gbits")]
AsJson = Annotated[bool, _option("Print the result as JSON on stdout, and no table.", _OUTPUT, "--json")]
