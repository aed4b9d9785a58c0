"""Plans: from two layouts, two block tables and a token range to the byte runs that a transfer copies."""

from pdtx.callable_package import make_callable
from pdtx.plan.audit import audit_run_set, audit_runs
from pdtx.plan.build import build_plan
from pdtx.plan.cache import PlanCache
from pdtx.plan.costs import CostTable, MeasuredCosts, costs_path, load_costs, save_costs
from pdtx.plan.endpoint import NULL_BLOCK, Endpoint
from pdtx.plan.grids import RunSet
from pdtx.plan.modes import Choice, Costs, Mode, choose_mode
from pdtx.plan.needed import STATE, needed_positions, state_block, tokens_per_vector
from pdtx.plan.request import BufferPlan, CacheSide, RequestPlan, plan_request
from pdtx.plan.runs import Runs, Slices
from pdtx.plan.transfer import TransferPlan

__all__ = [
    "NULL_BLOCK",
    "STATE",
    "BufferPlan",
    "CacheSide",
    "Choice",
    "CostTable",
    "Costs",
    "Endpoint",
    "MeasuredCosts",
    "Mode",
    "PlanCache",
    "RequestPlan",
    "RunSet",
    "Runs",
    "Slices",
    "TransferPlan",
    "audit_run_set",
    "audit_runs",
    "build_plan",
    "choose_mode",
    "costs_path",
    "load_costs",
    "needed_positions",
    "plan_request",
    "save_costs",
    "state_block",
    "tokens_per_vector",
]

make_callable(__name__, "pdtx.api.planning:plan")  # pdtx.plan(...), see docs/python.md
