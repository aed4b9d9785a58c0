"""`pdtx bench`: measurement runs between prefill and decode agents. `pdtx bench tier`: see bench_tier."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdtx.cli import bench_options as opt
from pdtx.cli.bench_flags import ENV_PREFIX, load_config, read_flags
from pdtx.cli.bench_tier import tier
from pdtx.cli.common import emit
from pdtx.errors import InputError


class _Group(TyperGroup):
    """Tells who gives a model as `pdtx bench tier` takes it how this command does."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - of typer's own click
        """Find a subcommand. Raises InputError for a model in its place."""
        from pdtx.models import preset_names

        word = args[0]
        if word not in self.commands and (word in preset_names() or Path(word).exists()):
            raise InputError(f"pdtx bench has no command {word!r}; did you mean --model {word}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Group, context_settings={"auto_envvar_prefix": ENV_PREFIX})
app.command()(tier)


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    config: Annotated[
        str | None,
        typer.Option(
            help="YAML file whose keys are these flags, or a scenario: quick, sizes, layouts, fragmentation, overlap.",
            is_eager=True,
            callback=load_config,
            show_default=False,
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print what counts, as YAML that --config takes, and end.")
    ] = False,
    model: opt.Model = "llama-3-8b",
    layers: opt.Layers = "8",
    tokens: opt.Tokens = None,
    bytes: opt.Bytes = None,  # noqa: A002 - the flag's name
    batch: opt.Batch = "1",
    kv_cache_dtype: opt.CacheDtype = "auto",
    block_size: opt.BlockSize = "16",
    layout: opt.Layout = "flash_attn_nhd:flashinfer_nhd",
    tp: opt.Tp = "1",
    mean_run: opt.MeanRun = "1",
    block_tables: opt.BlockTables = None,
    seed: opt.Seed = 0,
    mover: opt.Mover = "tcp",
    mover_option: opt.MoverOption = None,
    op: opt.Op = "push",
    mode: opt.Mode = "auto",
    merge: opt.Merge = "on",
    streams: opt.Streams = None,
    depth: opt.Depth = "all",
    layers_per_transfer: opt.LayersPerTransfer = "1",
    layer_compute: opt.LayerCompute = "0",
    local: opt.Local = False,
    prefill_agents: opt.PrefillAgents = 1,
    decode_agents: opt.DecodeAgents = 1,
    prefill: opt.PrefillAt = None,
    decode: opt.DecodeAt = None,
    rendezvous: opt.Rendezvous = False,
    pattern: opt.Pattern = "pairs",
    isolated: opt.Isolated = False,
    device: opt.Device = "cpu",
    max_bytes: opt.MaxBytes = None,
    advertise: opt.Advertise = None,
    connect_timeout: opt.ConnectTimeout = 60.0,
    key: opt.Key = None,
    peer_key: opt.PeerKey = None,
    insecure: opt.Insecure = False,
    iterations: opt.Iterations = 20,
    warmup: opt.Warmup = 3,
    verify: opt.Verify = True,
    reference: opt.Reference = "auto",
    deadline: opt.Deadline = 3600.0,
    output: opt.Output = None,
    force: opt.Force = False,
    label: opt.Label = None,
    gbits: opt.Gbits = False,
    json: opt.AsJson = False,
) -> None:
    """Measure how KV caches move between prefill and decode agents; every element is compared with its source.

    Flags that say what moves, where it lies and how it moves take lists with commas: every combination is a case. Any
    flag can also be given as PDTX_BENCH_FLAG in the environment or in a --config file. Exit code 1 if a case failed,
    had wrong elements or was cut off. 'pdtx bench tier' measures tiers.
    """
    if ctx.invoked_subcommand is not None:
        given = [
            name for name in ctx.params if (where := ctx.get_parameter_source(name)) and where.name == "COMMANDLINE"
        ]
        if given:
            raise InputError(
                f"--{given[0].replace('_', '-')} stands before {ctx.invoked_subcommand!r} and is not for it"
            )
        return
    flags = read_flags(ctx)
    if print_config:
        from pdtx.bench.config import dump_config

        emit(dump_config(flags.as_config()).rstrip())
        return
    from pdtx.cli.bench_run import run_bench

    run_bench(flags, as_json=json)
