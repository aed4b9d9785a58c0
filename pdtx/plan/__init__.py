"""Plans: from two layouts, two block tables and a token range to the byte runs that a transfer copies."""

from pdtx.plan.audit import audit_runs
from pdtx.plan.build import Endpoint, TransferPlan, build_plan
from pdtx.plan.runs import Runs, RunSet, Slices

__all__ = ["Endpoint", "RunSet", "Runs", "Slices", "TransferPlan", "audit_runs", "build_plan"]
