"""In what pieces connectors move a KV cache: descriptors, units of transfer, offload. Pure arithmetic."""

from pdtx.granularity.connectors import CONNECTORS, VLLM_VERSIONS, Connector
from pdtx.granularity.descriptors import DescriptorRow, descriptor_rows
from pdtx.granularity.formulas import symbols
from pdtx.granularity.offload import OffloadPool, OffloadRow, OffloadSettings, offload_pools, offload_rows
from pdtx.granularity.pieces import HeadSplit
from pdtx.granularity.request import Request, RequestKind, request_kinds
from pdtx.granularity.runs import BlockRuns, block_runs
from pdtx.granularity.transfer import TransferRow, transfer_rows

__all__ = [
    "CONNECTORS",
    "VLLM_VERSIONS",
    "BlockRuns",
    "Connector",
    "DescriptorRow",
    "HeadSplit",
    "OffloadPool",
    "OffloadRow",
    "OffloadSettings",
    "Request",
    "RequestKind",
    "TransferRow",
    "block_runs",
    "descriptor_rows",
    "offload_pools",
    "offload_rows",
    "request_kinds",
    "symbols",
    "transfer_rows",
]
