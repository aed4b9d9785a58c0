"""What a node is started with: frozen dataclasses, checked as they are made. pdtx.node.options describes the fields.

Every class raises ConfigError for a field that cannot be used: of another type, out of its bounds, or at odds with
another one. What depends on this machine (a device, keys in files, a free port) is checked when a node is started.
"""

from dataclasses import dataclass
from typing import Literal

from pdtx.address import WILDCARDS, parse_address
from pdtx.errors import ConfigError, InputError
from pdtx.layout import AXIS_NAMES, parse_layouts
from pdtx.node import options as opt
from pdtx.node.check import check_fields

# Written down here, so that a config needs none of the modules that do the work; tests hold them against those.
DTYPES = ("float32", "bfloat16", "float16")
REQUIRABLE: tuple[Literal["rdma", "tcp", "shm"], ...] = ("rdma", "tcp", "shm")
MODES = ("direct", "staged", "auto")
POLICIES = ("lru", "arc", "fifo", "s3fifo")
WRITES = ("through", "back")
PREFILL_RATE = 20000.0
"""Tokens a second of a synthetic prefill node, where nothing else is given."""
METRICS_HOST = "127.0.0.1"


def check_addresses(config: object, *fields: str) -> None:
    """Raise ConfigError for a field that is given and no HOST:PORT."""
    for field in fields:
        value = getattr(config, field)
        if value is None:
            continue
        try:
            parse_address(value)
        except InputError as error:
            raise ConfigError(field, str(error)) from None


def two_axes(text: str) -> tuple[str, str]:
    """Read 'AXIS,AXIS'. Raises ConfigError."""
    first, _, second = text.partition(",")
    if first not in AXIS_NAMES or second not in AXIS_NAMES or first == second:
        raise ConfigError(
            "inject_fault", f"--inject-fault takes two of {', '.join(AXIS_NAMES)} with a comma, not {text!r}"
        )
    return first, second


@dataclass(frozen=True)
class ModelConfig:
    """What computes: a checkpoint, or only its shapes.

    model: a folder or hub id; None for the bundled demo model. dtype: of weights and K/V. device: of model and cache.
    threads: of the CPU, for the whole process; None leaves torch's setting.
    synthetic: a preset or config whose shapes the caches get instead, without weights. layers: only so many of those.
    """

    model: opt.Model = None
    dtype: opt.Dtype = "bfloat16"
    device: opt.Device = "cpu"
    threads: opt.Threads = None
    synthetic: opt.Synthetic = None
    layers: opt.Layers = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.synthetic is None and self.layers is not None:
            raise ConfigError("layers", "--layers is for --synthetic; a model's weights are run as they are")
        if self.synthetic is not None:
            self._check_synthetic()

    def _check_synthetic(self) -> None:
        """Refuse what only a model with weights has."""
        for field, default in (("model", None), ("dtype", "bfloat16"), ("device", "cpu"), ("threads", None)):
            value = getattr(self, field)
            if value != default:
                raise ConfigError(
                    field, f"--{field} {value} is for a model with weights; --synthetic has none, and lies on the CPU"
                )


@dataclass(frozen=True)
class CacheConfig:
    """The paged cache.

    layout: names of presets with commas, one for each kind of layer. block_size: tokens. num_blocks: of each group of
    layers, the null block among them. tensor_parallel_size: ranks that the KV heads and states are divided over.
    """

    layout: opt.Layout = "flash_attn_nhd"
    block_size: opt.BlockSize = 16
    num_blocks: opt.NumBlocks = 512
    tensor_parallel_size: opt.TensorParallel = 1

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            parse_layouts(self.layout)
        except InputError as error:
            raise ConfigError("layout", str(error)) from None


@dataclass(frozen=True)
class TransportConfig:
    """What carries the payload. mover: its name, the same on both sides. mover_option: its own, as KEY=VALUE."""

    mover: opt.Mover = "tcp"
    mover_option: opt.MoverOption = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mover == "inproc":
            raise ConfigError(
                "mover", "the mover inproc works within one process, and nodes are two; on one host use shm"
            )


@dataclass(frozen=True)
class SendConfig(TransportConfig):
    """What carries the payload, and how it is sent.

    require: the kind that must carry it: rdma, tcp or shm. mode: direct, staged or auto.
    """

    require: opt.Require = None
    mode: opt.TransferMode = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.require is not None and self.require not in REQUIRABLE:
            raise ConfigError("require", f"--require takes {', '.join(REQUIRABLE)}, not {self.require!r}")
        if self.mode not in MODES:
            raise ConfigError("mode", f"mode {self.mode!r} is not one of {', '.join(MODES)}")


@dataclass(frozen=True)
class TierConfig:
    """Where blocks are kept for later requests that begin alike.

    kv_offloading_size: GiB of host memory. kv_offloading_disk_size: GiB on disk, in kv_offloading_dir.
    kv_offloading_block_size: tokens; None for the cache's. kv_offloading_policy: what makes room.
    kv_offloading_write: through or back. serve_tier: HOST:PORT to serve other nodes at. peer_tier: of another node.
    """

    kv_offloading_size: opt.OffloadingSize = 0.0
    kv_offloading_disk_size: opt.OffloadingDiskSize = 0.0
    kv_offloading_dir: opt.OffloadingDir = None
    kv_offloading_block_size: opt.OffloadingBlockSize = None
    kv_offloading_policy: opt.OffloadingPolicy = "lru"
    kv_offloading_write: opt.OffloadingWrite = "through"
    serve_tier: opt.ServeTier = None
    peer_tier: opt.PeerTier = None

    def __post_init__(self) -> None:
        check_fields(self)
        for field, known in (("kv_offloading_policy", POLICIES), ("kv_offloading_write", WRITES)):
            value = getattr(self, field)
            if value not in known:
                raise ConfigError(field, f"--{field.replace('_', '-')} takes {', '.join(known)}, not {value!r}")
        if (self.kv_offloading_disk_size > 0) != (self.kv_offloading_dir is not None):
            raise ConfigError("kv_offloading_dir", "--kv-offloading-disk-size and --kv-offloading-dir go together")
        self._check_used()
        if self.serve_tier is not None and not self.kv_offloading_size:
            raise ConfigError(
                "serve_tier", "--serve-tier serves the tier in host memory; give --kv-offloading-size too"
            )
        check_addresses(self, "serve_tier", "peer_tier")

    def _check_used(self) -> None:
        """Refuse what would say how a tier works that is not there."""
        memory, disk = bool(self.kv_offloading_size), bool(self.kv_offloading_disk_size)
        for field, default, used, needed in (
            ("kv_offloading_block_size", None, self.any, "a tier; give --kv-offloading-size or --peer-tier"),
            ("kv_offloading_policy", "lru", memory or disk, "a tier of this node; give --kv-offloading-size"),
            ("kv_offloading_write", "through", memory and disk, "memory before a disk; give the sizes of both"),
        ):
            value = getattr(self, field)
            if value != default and not used:
                raise ConfigError(field, f"--{field.replace('_', '-')} {value} is for {needed}")

    @property
    def any(self) -> bool:
        """Whether the node has a tier at all."""
        return bool(self.kv_offloading_size or self.kv_offloading_disk_size or self.peer_tier)


@dataclass(frozen=True)
class SecurityConfig:
    """How the side channel is protected. key: file of this node's secret key. peer_key: files of peers' public keys.

    insecure: whether it may go without keys off loopback.
    """

    key: opt.Key = None
    peer_key: opt.PeerKey = None
    insecure: opt.Insecure = False

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.key is None) != (not self.peer_key):
            raise ConfigError("key", "--key and --peer-key go together; make keys with 'pdtx keygen NAME'")


@dataclass(frozen=True)
class MetricsConfig:
    """Prometheus metrics. metrics_port: to serve them at; 0 takes any, None serves none."""

    metrics_port: opt.MetricsPort = None
    metrics_host: opt.MetricsHost = METRICS_HOST

    def __post_init__(self) -> None:
        check_fields(self)
        if self.metrics_port is None and self.metrics_host != METRICS_HOST:
            raise ConfigError("metrics_host", "--metrics-host is for metrics; give --metrics-port too")


@dataclass(frozen=True)
class CaptureConfig:
    """Recording of requests. capture: a new file; None leaves it to PDTX_CAPTURE. capture_tokens: ids as well."""

    capture: opt.Capture = None
    capture_tokens: opt.CaptureTokens = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class PrefillConfig:
    """A prefill node.

    connect: HOST:PORT of the decode node. max_tokens: to generate for each prompt. ignore_eos: whether all of them are.
    chat: whether prompts are put into the model's chat template. chunk_size: tokens computed at a time.
    max_num_seqs: prompts under way at once. deadline: seconds for a request. connect_timeout: seconds to connect.
    prefill_rate: tokens a second that a synthetic model takes; a real one takes as long as it takes.
    """

    connect: opt.Connect
    max_tokens: opt.MaxTokens = 32
    ignore_eos: opt.IgnoreEos = False
    chat: opt.Chat = False
    chunk_size: opt.ChunkSize = 256
    max_num_seqs: opt.MaxNumSeqs = 4
    deadline: opt.Deadline = 300.0
    connect_timeout: opt.ConnectTimeout = 10.0
    model: ModelConfig = ModelConfig()
    prefill_rate: opt.PrefillRate = PREFILL_RATE
    cache: CacheConfig = CacheConfig()
    transport: SendConfig = SendConfig()
    tiers: TierConfig = TierConfig()
    security: SecurityConfig = SecurityConfig()
    capture: CaptureConfig = CaptureConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        check_addresses(self, "connect")
        if not self.prefill_rate > 0:
            raise ConfigError("prefill_rate", f"PrefillConfig.prefill_rate is {self.prefill_rate!r}; give more than 0")
        if self.prefill_rate != PREFILL_RATE and self.model.synthetic is None:
            raise ConfigError("prefill_rate", "--prefill-rate is for --synthetic; a model takes the time that it needs")
        if self.model.synthetic is not None and self.chat:
            raise ConfigError("chat", "--chat is for a model; --synthetic has no chat template")


@dataclass(frozen=True)
class DecodeConfig:
    """A decode node.

    listen: HOST:PORT for prefill nodes, port 0 takes any. data_port: for payloads, on the same host; 0 takes any.
    advertise: the host that they reach it at, where it is not the one of listen. verify: whether every element is
    compared with its source. requests: after how many to stop. inject_fault: two axes with a comma, to swap in plans.
    decode_rate: tokens a second of a request with a synthetic model; 0 ends it at once.
    """

    listen: opt.Listen = "127.0.0.1:5600"
    data_port: opt.DataPort = 0
    advertise: opt.Advertise = None
    verify: opt.Verify = False
    requests: opt.Requests = None
    inject_fault: opt.InjectFault = None
    model: ModelConfig = ModelConfig()
    decode_rate: opt.DecodeRate = 0.0
    cache: CacheConfig = CacheConfig(layout="flashinfer_hnd", block_size=32)
    transport: TransportConfig = TransportConfig()
    tiers: TierConfig = TierConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        check_addresses(self, "listen")
        if self.advertise is not None and not self.advertise:
            raise ConfigError("advertise", "--advertise is empty; give a host, or leave it out")
        host, _ = parse_address(self.listen)
        protected = self.security.insecure or self.security.key is not None
        # Without protection that is what the node says first, at its start.
        if protected and self.advertise is None and host in WILDCARDS:
            raise ConfigError(
                "advertise",
                f"{self.listen} is every address of this host; give --advertise HOST, or --listen at one address",
            )
        if self.decode_rate and self.model.synthetic is None:
            raise ConfigError("decode_rate", "--decode-rate is for --synthetic; a model takes the time that it needs")
        if self.inject_fault is not None:
            two_axes(self.inject_fault)
