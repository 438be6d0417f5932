"""A bug of ours that ends a request: the log has all of it, the client a number to ask by."""

import logging
import secrets

from wire.errors import BatonError

log = logging.getLogger(__name__)


def report(error: BaseException, **values: object) -> BatonError:
    """Logs an error that nobody foresaw, with values that tell where; what may be said of it to a client."""
    number = secrets.token_hex(8)
    log.error("incident", exc_info=error, extra={"incident": number, **values})
    return BatonError(f"internal error, incident {number}", incident=number)
