"""`CONFIG SET notify-keyspace-events` at a proxy: OK if the upstream's setting already includes what is asked. Pure.

Frameworks such as Spring Session send it at their start, and end by an error.
"""

from __future__ import annotations

from typing import NamedTuple

import hiredis

from resp_server.protocol.errors import GenericError, client_text
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply, as_bytes, is_error
from resp_server.settings.event_classes import CLASSES, ClassesError, classes_of, config_letters

EVENTS = b"notify-keyspace-events"
EVENTS_REQUEST: Request = (b"CONFIG", b"GET", EVENTS)


class AskedEvents(NamedTuple):
    """The letters of events that a request asks for, and the name of its command."""

    command: str
    letters: str

    def check(self, current: str | None) -> None:
        """Raise GenericError if the upstream's setting does not include them. current: None: it cannot be read."""
        if current is None:
            raise not_passed_on(self.command)
        known = "".join(each for each in current if each == "A" or each in CLASSES)  # a newer Redis has others
        has, wanted = classes_of(known), classes_of(self.letters)
        if wanted & ~has or (has and not wanted):
            needed = config_letters(known + self.letters) if wanted else ""
            raise GenericError(
                f"the upstream's notify-keyspace-events is '{current}', and CONFIG SET is not passed on: run "
                f"CONFIG SET notify-keyspace-events '{needed}' at the upstream's own address"
            )


def not_passed_on(name: str) -> GenericError:
    """Return the error of a command that the upstream does not get from clients."""
    return GenericError(f"command '{name}' is not passed on to the upstream: send it to the upstream's own address")


def asked_events(name: str, request: Request) -> AskedEvents | None:
    """Return the events that a CONFIG SET asks for, if it sets nothing else; GenericError for an unknown letter."""
    if len(request) != 4 or request[2].lower() != EVENTS:
        return None
    letters = request[3].decode("latin-1")
    try:
        classes_of(letters)
    except ClassesError as error:
        raise GenericError(
            f"CONFIG SET failed (possibly related to argument '{client_text(request[2])}') - {error}"
        ) from None
    return AskedEvents(name, letters)


def events_in(reply: RawReply) -> str | None:
    """Return the letters in the reply to EVENTS_REQUEST; None if it is an error or malformed."""
    if is_error(reply):
        return None
    reader = hiredis.Reader()
    try:
        reader.feed(as_bytes(reply))
        found = reader.gets()
    except (TypeError, hiredis.HiredisError):
        return None
    match list(*found.items()) if isinstance(found, dict) and len(found) == 1 else found:
        case [_, bytes(letters)]:
            return letters.decode("latin-1")
    return None
