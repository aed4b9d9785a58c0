"""Plans: from two layouts, two block tables and a token range to the byte runs that a transfer copies."""

from pdtx.plan.audit import audit_run_set, audit_runs
from pdtx.plan.build import TransferPlan, build_plan
from pdtx.plan.endpoint import NULL_BLOCK, Endpoint
from pdtx.plan.modes import Choice, Costs, Mode, StagedPlan, choose_mode, stage
from pdtx.plan.needed import STATE, needed_positions, state_block, tokens_per_vector
from pdtx.plan.request import BufferPlan, CacheSide, RequestPlan, plan_request
from pdtx.plan.runs import Runs, RunSet, Slices

__all__ = [
    "NULL_BLOCK",
    "STATE",
    "BufferPlan",
    "CacheSide",
    "Choice",
    "Costs",
    "Endpoint",
    "Mode",
    "RequestPlan",
    "RunSet",
    "Runs",
    "Slices",
    "StagedPlan",
    "TransferPlan",
    "audit_run_set",
    "audit_runs",
    "build_plan",
    "choose_mode",
    "needed_positions",
    "plan_request",
    "stage",
    "state_block",
    "tokens_per_vector",
]
