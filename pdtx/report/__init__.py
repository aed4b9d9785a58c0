"""Results: one row a request, as JSON and as a table."""

from pdtx.report.machine import machine_facts
from pdtx.report.rows import RequestRow, console_for, read_rows, render_rows, write_json

__all__ = ["RequestRow", "console_for", "machine_facts", "read_rows", "render_rows", "write_json"]
