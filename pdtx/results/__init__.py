"""Results: what a measurement run wrote down, and what can be said of it."""

from pdtx.results.figures import Rate, Spread
from pdtx.results.files import read_result_file, write_result_file, write_whole
from pdtx.results.summary import CaseSummary, summarize

__all__ = ["CaseSummary", "Rate", "Spread", "read_result_file", "summarize", "write_result_file", "write_whole"]
