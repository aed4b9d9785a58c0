"""`pdtx-decode`: receive K/V from prefill nodes and generate from them."""

from contextlib import ExitStack
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from pdtx.address import WILDCARDS, parse_address
from pdtx.cli import options as opt
from pdtx.cli.agent import Bench, MaxBytes, serve_agent
from pdtx.cli.common import (
    configure_logging,
    emit,
    load_runner,
    load_synthetic,
    note,
    open_cache,
    open_security,
    run_app,
    single_command,
)
from pdtx.cli.metrics import open_metrics
from pdtx.cli.movers import open_mover, read_costs, shares_memory
from pdtx.cli.termination import Termination
from pdtx.cli.tiers import TierOptions, open_tiers
from pdtx.errors import InputError
from pdtx.layout import AXIS_NAMES, KVCacheLayout, parse_layouts

if TYPE_CHECKING:
    from decode_node.loop import DecodeLoop
    from decode_node.watching import Watch
    from pdtx.cache import KVCaches
    from pdtx.engine import KVConsumer
    from pdtx.replay.synthetic import SyntheticModel
    from pdtx.runner import ModelRunner


def decode(
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to serve prefill nodes at; port 0 takes any.")
    ] = "127.0.0.1:5600",
    data_port: Annotated[int, typer.Option(help="Port for payloads; 0 takes any.", min=0, max=65535)] = 0,
    advertise: Annotated[
        str | None,
        typer.Option(help="Host that prefill nodes reach this one at, if not the one listened on.", show_default=False),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare every element with the prefill node's cache.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(help="Stop after this many requests.", min=1, show_default=False)
    ] = None,
    model: opt.Model = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    layout: opt.Layout = "flashinfer_hnd",
    block_size: opt.BlockSize = 32,
    num_blocks: opt.NumBlocks = 512,
    tensor_parallel_size: opt.TensorParallel = 1,
    mover: opt.Mover = "tcp",
    mover_option: opt.MoverOption = None,
    kv_offloading_size: opt.OffloadingSize = 0.0,
    kv_offloading_disk_size: opt.OffloadingDiskSize = 0.0,
    kv_offloading_dir: opt.OffloadingDir = None,
    kv_offloading_block_size: opt.OffloadingBlockSize = None,
    kv_offloading_policy: opt.OffloadingPolicy = "lru",
    kv_offloading_write: opt.OffloadingWrite = "through",
    serve_tier: opt.ServeTier = None,
    peer_tier: opt.PeerTier = None,
    key: opt.Key = None,
    peer_key: opt.PeerKey = None,
    insecure: opt.Insecure = False,
    inject_fault: Annotated[
        str | None,
        typer.Option(help="Plan wrongly on purpose: swap two axes, as in 'token,head'.", show_default=False),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            help="Decode for 'pdtx replay': caches of this preset's or config's shapes, and no weights.",
            show_default=False,
        ),
    ] = None,
    layers: opt.Layers = None,
    decode_rate: opt.DecodeRate = 0.0,
    bench: Bench = False,
    max_bytes: MaxBytes = None,
    metrics_port: opt.MetricsPort = None,
    metrics_host: opt.MetricsHost = "127.0.0.1",
    log_level: opt.LogLevel = None,
    log_format: opt.LogFormat = "text",
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Serve prefill nodes: receive K/V into this node's own layout, verify them if asked to, and generate."""
    configure_logging(verbose, log_level, log_format)
    if bench:
        serve_agent(
            "decode",
            listen,
            advertise=advertise,
            key=key,
            peer_key=peer_key,
            insecure=insecure,
            device=device,
            max_bytes=max_bytes,
            json=json,
        )
        return
    parse_layouts(layout)
    if synthetic is None and layers is not None:
        raise InputError("--layers is for --synthetic; a model's weights are run as they are")
    fault = _two_axes(inject_fault) if inject_fault is not None else None
    offloading = TierOptions(
        kv_offloading_size,
        kv_offloading_disk_size,
        kv_offloading_dir,
        kv_offloading_block_size,
        kv_offloading_policy,
        kv_offloading_write,
        serve_tier,
        peer_tier,
    )
    from pdtx.sidechannel import require_protection

    security = open_security(key, peer_key, insecure=insecure)
    host, _ = parse_address(listen)
    require_protection(host, security)
    if advertise is None and host in WILDCARDS:
        raise InputError(f"{listen} is every address of this host; give --advertise HOST, or --listen at one address")
    stop = Termination()

    from decode_node.watching import Watch
    from pdtx.engine import KVConsumer

    with ExitStack() as stack:
        # Before the model is loaded: a mover that cannot be had fails at once.
        moving = open_mover(mover, mover_option, advertise=advertise)
        stack.callback(moving.close)
        metrics = open_metrics(metrics_port, metrics_host, stack, role="decode", mover=mover)
        runner: ModelRunner | SyntheticModel
        runner = load_runner(model, dtype, device, threads) if synthetic is None else load_synthetic(synthetic, layers)
        cache, description = open_cache(
            runner,
            layout=layout,
            block_size=block_size,
            num_blocks=num_blocks,
            tp_size=tensor_parallel_size,
            shared=shares_memory(mover),
        )
        plan_layout = _wrong_layout(cache, fault) if fault is not None else None
        tiers = open_tiers(
            offloading,
            cache,
            runner,
            stack,
            block_size=block_size,
            security=security,
            mover=mover,
            mover_options=mover_option,
            costs=read_costs(),
        )
        prefix = tiers.prefix if tiers is not None else None
        consumer = KVConsumer(cache, description, moving, verify=verify, plan_layout=plan_layout, prefix=prefix)
        stack.callback(consumer.close)
        address = consumer.listen(listen, data_port=data_port, security=security)
        note(f"{consumer.engine_id} listening on {address}")
        if json:
            registration = consumer.registration
            event = {
                "event": "listening",
                "address": address,
                "mover": mover,
                "registered_bytes": registration.nbytes,
                "registration_s": registration.seconds,
                "tier_address": tiers.served_at if tiers is not None else None,
            }
            emit(dumps(event))
        watch = Watch(consumer, tiers, metrics)
        _loop(runner, consumer, stop, requests, watch, decode_rate).run()
        usages = tiers.report() if tiers is not None else []
        if json and tiers is not None:
            emit(dumps({"event": "tiers", "tiers": usages}))
        note(f"{consumer.engine_id} served {consumer.num_ended} requests, {consumer.num_failed} of them failed")


def _loop(
    runner: "ModelRunner | SyntheticModel",
    consumer: "KVConsumer",
    stop: Termination,
    limit: int | None,
    watch: "Watch",
    decode_rate: float,
) -> "DecodeLoop":
    """Return what decodes: a model, or what stands for one."""
    from pdtx.runner import ModelRunner

    if isinstance(runner, ModelRunner):
        from decode_node.loop import ModelLoop

        return ModelLoop(runner, consumer, stop, limit, watch.finished)
    from decode_node.synthetic import SyntheticLoop

    return SyntheticLoop(consumer, stop, limit, watch.finished, decode_rate)


def _wrong_layout(cache: "KVCaches", fault: tuple[str, str]) -> "KVCacheLayout":
    """Return the first buffer's layout with two axes swapped. Raises InputError where it does not hold keys and values.

    fault: the axes.
    """
    layout = cache.buffers[0].layout
    if not isinstance(layout, KVCacheLayout):
        raise InputError(f"--inject-fault swaps axes of keys and values; this model's first buffer is {layout.name}")
    return layout.with_swapped(*fault)


def _two_axes(text: str) -> tuple[str, str]:
    """Read 'AXIS,AXIS'. Raises InputError."""
    first, _, second = text.partition(",")
    if first not in AXIS_NAMES or second not in AXIS_NAMES or first == second:
        raise InputError(f"--inject-fault takes two of {', '.join(AXIS_NAMES)} with a comma, not {text!r}")
    return first, second


def main() -> None:
    """Entry point of `pdtx-decode`."""
    run_app(single_command(decode, "PDTX_DECODE"), "pdtx-decode")


if __name__ == "__main__":
    main()
