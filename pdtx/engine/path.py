"""What carries the payload, said once, and compared with what must carry it."""

import logging

from pdtx.errors import WrongTransport
from pdtx.transports import Path
from pdtx.transports.base import PathKind

logger = logging.getLogger(__name__)


def check_path(path: Path, peer: str, require: PathKind | None) -> None:
    """Log a new connection's path, with a warning where it is emulated. Raises WrongTransport for another kind."""
    if require is not None and path.kind != require:
        raise WrongTransport(require, path.kind, path.possible, str(path))
    logger.info("the payload to %s goes over %s", peer, path)
    if path.emulated:
        logger.warning(
            "one-sided operations to %s are emulated in software (%s): figures say nothing of the hardware", peer, path
        )
