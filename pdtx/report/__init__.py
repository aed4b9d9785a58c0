"""Results: one row a request, as JSON and as a table."""

from pdtx.report.machine import machine_facts
from pdtx.report.rows import RequestRow, ResultDocument, console_for, read_result, render_rows, write_json

__all__ = ["RequestRow", "ResultDocument", "console_for", "machine_facts", "read_result", "render_rows", "write_json"]
