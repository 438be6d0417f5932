"""A bug of ours that ends a request: the log has all of it, the client a number to ask by."""

import logging
import secrets

from wire.errors import BatonError

log = logging.getLogger(__name__)


def report(error: BaseException, **values: object) -> BatonError:
    """Logs an unforeseen error, with values that tell where; returns the error that a client may see."""
    number = secrets.token_hex(8)
    log.error("incident", exc_info=error, extra={"incident": number, **values})
    return BatonError(f"internal error, incident {number}", incident=number)
