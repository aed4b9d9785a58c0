"""Configs of nodes: what is refused, and that they and the command lines are the same."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdtx.cli.agent import AgentOptions
from pdtx.cli.options import LogOptions
from pdtx.cli.signature import Given, config_command
from pdtx.errors import ConfigError, InputError
from pdtx.node import (
    CacheConfig,
    CaptureConfig,
    DecodeConfig,
    MetricsConfig,
    ModelConfig,
    PrefillConfig,
    SecurityConfig,
    SendConfig,
    TierConfig,
    TransportConfig,
    config,
)
from pdtx.plan import Mode
from pdtx.runner import DTYPES
from pdtx.tiers.policies import POLICIES

COMMON = {
    "--model": None,
    "--dtype": "bfloat16",
    "--device": "cpu",
    "--threads": None,
    "--num-blocks": 512,
    "--tensor-parallel-size": 1,
    "--tp": 1,
    "--mover": "tcp",
    "--mover-option": None,
    "--kv-offloading-size": 0.0,
    "--kv-offloading-disk-size": 0.0,
    "--kv-offloading-dir": None,
    "--kv-offloading-block-size": None,
    "--kv-offloading-policy": "lru",
    "--kv-offloading-write": "through",
    "--serve-tier": None,
    "--peer-tier": None,
    "--key": None,
    "--peer-key": None,
    "--insecure": False,
    "--bench": False,
    "--max-bytes": None,
    "--metrics-port": None,
    "--metrics-host": "127.0.0.1",
    "--log-level": None,
    "--log-format": "text",
    "--json": False,
    "--verbose": False,
    "-v": False,
}
FLAGS: dict[str, dict[str, Any]] = {
    "prefill": COMMON
    | {
        "--connect": None,
        "--prompt": None,
        "--prompts": None,
        "--max-tokens": 32,
        "--ignore-eos": False,
        "--chat": False,
        "--chunk-size": 256,
        "--max-num-seqs": 4,
        "--deadline": 300.0,
        "--connect-timeout": 10.0,
        "--layout": "flash_attn_nhd",
        "--block-size": 16,
        "--require": None,
        "--mode": "auto",
        "--output": None,
        "--listen": "127.0.0.1:5601",
        "--advertise": None,
        "--capture": None,
        "--capture-tokens": False,
    },
    "decode": COMMON
    | {
        "--listen": "127.0.0.1:5600",
        "--data-port": 0,
        "--advertise": None,
        "--verify": False,
        "--requests": None,
        "--layout": "flashinfer_hnd",
        "--block-size": 32,
        "--inject-fault": None,
        "--synthetic": None,
        "--layers": None,
        "--decode-rate": 0.0,
    },
}
"""Every flag of either node with its default, written down by hand."""


@pytest.mark.parametrize("node", FLAGS)
def test_flags_and_defaults_are_those_that_were_promised(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    module = __import__(f"{node}_node.__main__", fromlist=["main"])
    apps = list[typer.Typer]()
    monkeypatch.setattr(module, "run_app", lambda app, _name: apps.append(app))
    module.main()
    parameters: list[Any] = list(typer.main.get_command(apps[0]).params)
    found = {flag: one.default for one in parameters for flag in one.opts if one.name != "help"}
    assert found == FLAGS[node]


def _given(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Given:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    taken = list[Given]()
    app = config_command(taken.append, DecodeConfig, AgentOptions, LogOptions, env_prefix="PDTX_DECODE")
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return taken[0]


def test_a_flag_and_a_variable_reach_the_field_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["--key", "a.key_secret", "--peer-key", "b.key", "--peer-key", "c.key"]
    given = _given(monkeypatch, *keys, "--verify", "--mover-option", "a=1", "--tp", "2", PDTX_DECODE_BLOCK_SIZE="48")
    found = given.make(DecodeConfig)
    assert found == DecodeConfig(
        verify=True,
        cache=CacheConfig(layout="flashinfer_hnd", block_size=48, tensor_parallel_size=2),
        transport=TransportConfig(mover_option=["a=1"]),
        security=SecurityConfig(key=Path("a.key_secret"), peer_key=[Path("b.key"), Path("c.key")]),
    )


def test_what_is_not_given_is_the_configs_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    given = _given(monkeypatch)
    assert given.make(DecodeConfig) == DecodeConfig()
    assert given.make(AgentOptions).listen == "127.0.0.1:5600"
    assert (given.has("listen"), given.has("key")) == (True, False)


def test_an_option_without_a_default_may_have_no_value() -> None:
    taken = list[Given]()
    app = config_command(taken.append, PrefillConfig, env_prefix="PDTX_PREFILL", without=("synthetic", "layers"))
    assert CliRunner().invoke(app, [], catch_exceptions=False).exit_code == 0
    assert not taken[0].has("connect")
    assert CliRunner().invoke(app, ["--connect", "h:1"], catch_exceptions=False).exit_code == 0
    assert taken[1].make(PrefillConfig) == PrefillConfig("h:1")
    assert CliRunner().invoke(app, ["--synthetic", "llama-3-8b"]).exit_code == 2


@pytest.mark.parametrize("node", ["prefill", "decode"])
def test_bounds_are_those_of_the_command_line(node: str) -> None:
    command = [sys.executable, "-m", f"{node}_node", "--block-size", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'--block-size'" in done.stderr


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (lambda: ModelConfig(dtype="float8"), "dtype", "dtype 'float8' is not one of float32, bfloat16, float16"),
        (lambda: ModelConfig(threads=0), "threads", "ModelConfig.threads is 0; give 1 or more"),
        (lambda: ModelConfig(layers=2), "layers", "--layers is for --synthetic"),
        (lambda: ModelConfig(synthetic="llama-3-8b", model="m"), "model", "--model m is for a model with weights"),
        (lambda: ModelConfig(synthetic="llama-3-8b", device="cuda"), "device", "--synthetic has none"),
        (lambda: CacheConfig(block_size=0), "block_size", "CacheConfig.block_size is 0; give 1 or more"),
        (lambda: CacheConfig(num_blocks=1), "num_blocks", "CacheConfig.num_blocks is 1; give 2 or more"),
        (lambda: CacheConfig(block_size=True), "block_size", "takes a whole number, not True"),
        (lambda: CacheConfig(block_size=16.0), "block_size", "takes a whole number, not 16.0"),  # type: ignore[arg-type]
        (lambda: CacheConfig(block_size="16"), "block_size", "a whole number, not '16'"),  # type: ignore[arg-type]
        (lambda: CacheConfig(layout="nhd"), "layout", "unknown layout 'nhd'"),
        (lambda: TransportConfig(mover="inproc"), "mover", "inproc works within one process"),
        (lambda: TransportConfig(mover_option="a=1"), "mover_option", "a list, each a string or None"),  # type: ignore[arg-type]
        (lambda: SendConfig(require="pigeon"), "require", "--require takes rdma, tcp, shm, not 'pigeon'"),
        (lambda: SendConfig(mode="fast"), "mode", "mode 'fast' is not one of direct, staged, auto"),
        (lambda: TierConfig(kv_offloading_size=-1.0), "kv_offloading_size", "is -1.0; give 0 or more"),
        (lambda: TierConfig(kv_offloading_size=float("nan")), "kv_offloading_size", "give a finite number"),
        (lambda: TierConfig(kv_offloading_size=10**400), "kv_offloading_size", "give a finite number"),
        (lambda: CacheConfig(num_blocks=10**400), "num_blocks", "give a finite number"),
        (lambda: TierConfig(kv_offloading_policy="mru"), "kv_offloading_policy", "takes lru, arc, fifo, s3fifo, not"),
        (lambda: TierConfig(kv_offloading_write="no"), "kv_offloading_write", "takes through, back, not 'no'"),
        (lambda: TierConfig(kv_offloading_dir=Path("d")), "kv_offloading_dir", "go together"),
        (lambda: TierConfig(kv_offloading_block_size=32), "kv_offloading_block_size", "32 is for a tier; give "),
        (
            lambda: TierConfig(peer_tier="h:1", kv_offloading_policy="arc"),
            "kv_offloading_policy",
            "--kv-offloading-policy arc is for a tier of this node",
        ),
        (
            lambda: TierConfig(kv_offloading_size=1.0, kv_offloading_write="back"),
            "kv_offloading_write",
            "--kv-offloading-write back is for memory before a disk",
        ),
        (lambda: TierConfig(serve_tier="h:1"), "serve_tier", "give --kv-offloading-size too"),
        (lambda: TierConfig(peer_tier="h"), "peer_tier", "not an address: 'h'"),
        (lambda: SecurityConfig(key=Path("k")), "key", "--key and --peer-key go together"),
        (lambda: SecurityConfig(key="k"), "key", "takes a pathlib.Path or None, not 'k'"),  # type: ignore[arg-type]
        (lambda: SecurityConfig(insecure=1), "insecure", "takes True or False, not 1"),  # type: ignore[arg-type]
        (lambda: MetricsConfig(metrics_port=65536), "metrics_port", "is 65536; give 65535 or less"),
        (lambda: MetricsConfig(metrics_host="h"), "metrics_host", "give --metrics-port too"),
        (lambda: CaptureConfig(capture="f"), "capture", "takes a pathlib.Path or None"),  # type: ignore[arg-type]
        (lambda: PrefillConfig("here"), "connect", "not an address: 'here'"),
        (lambda: PrefillConfig("h:1", deadline=0.0), "deadline", "is 0.0; give 0.1 or more"),
        (lambda: PrefillConfig("h:1", cache=16), "cache", "PrefillConfig.cache takes a CacheConfig, not 16"),  # type: ignore[arg-type]
        (lambda: PrefillConfig("h:1", transport=TransportConfig()), "transport", "takes a SendConfig"),  # type: ignore[arg-type]
        (lambda: PrefillConfig("h:1", prefill_rate=5.0), "prefill_rate", "--prefill-rate is for --synthetic"),
        (
            lambda: PrefillConfig("h:1", chat=True, model=ModelConfig(synthetic="llama-3-8b")),
            "chat",
            "no chat template",
        ),
        (lambda: DecodeConfig(listen="h"), "listen", "not an address: 'h'"),
        (lambda: DecodeConfig(data_port=-1), "data_port", "is -1; give 0 or more"),
        (lambda: DecodeConfig(requests=0), "requests", "is 0; give 1 or more"),
        (lambda: DecodeConfig(decode_rate=5.0), "decode_rate", "--decode-rate is for --synthetic"),
        (lambda: DecodeConfig(advertise=""), "advertise", "--advertise is empty"),
        (lambda: DecodeConfig(inject_fault="token"), "inject_fault", "--inject-fault takes two of "),
        (
            lambda: DecodeConfig(listen="0.0.0.0:0", security=SecurityConfig(insecure=True)),
            "advertise",
            "give --advertise HOST",
        ),
    ],
)
def test_a_wrong_field_is_named_in_one_line(make: Any, field: str, words: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_configs_cannot_be_changed_and_can_be_made_anew() -> None:
    found = DecodeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.verify = True  # type: ignore[misc]
    assert dataclasses.replace(found, verify=True).verify
    with pytest.raises(ConfigError):
        dataclasses.replace(found, data_port=70000)


def test_names_are_those_of_the_modules_that_do_the_work() -> None:
    assert config.DTYPES == DTYPES
    assert set(config.MODES) == {mode.value for mode in Mode}
    assert config.POLICIES == POLICIES
    assert dataclasses.fields(PrefillConfig)[0].default is dataclasses.MISSING


def test_importing_nodes_is_light() -> None:
    program = "import sys, pdtx.node; print(*{'torch', 'typer', 'rich', 'zmq', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
