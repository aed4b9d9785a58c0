"""Keep transformers and the hub from writing to the terminal, which belongs to the command line."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show only transformers' errors and no progress bars inside the block; what was set before comes back after it."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    _show_bars(False)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        _show_bars(bars)


def _show_bars(show: bool) -> None:
    """Switch the bars of transformers and the hub."""
    from transformers.utils import logging

    with warnings.catch_warnings():
        # The hub warns where HF_HUB_DISABLE_PROGRESS_BARS already says what to show; the variable wins, and may.
        warnings.simplefilter("ignore")
        if show:
            logging.enable_progress_bar()
        else:
            logging.disable_progress_bar()
