"""One question to another memory server, and its answer. Blocking, for threads."""

from perdure.errors import AccessDeniedError, WireError
from perdure.vocab.generation import Address
from perdure.vocab.units import Seconds
from perdure.wire.bulk import Line
from perdure.wire.transfer import LINE_LIMIT, Answer, Get, GetParity, Put, shown


class NotNowError(WireError):
    """The other side is there, and cannot give or take this now. With the next commit it may."""


def ask(line: Line, address: Address, request: Get | GetParity | Put, patience: Seconds | None = None) -> Answer:
    """The answer, on a new connection. Raises WireError, also where it is a refusal, with the other side's words."""
    line.connect(address)
    line.say(request)
    return heard(line, patience)


def heard(line: Line, patience: Seconds | None = None) -> Answer:
    """The next answer. Raises WireError."""
    answer = line.hear(Answer, LINE_LIMIT, patience)
    if answer.denied:
        raise AccessDeniedError(shown(answer.error))
    if answer.error:
        raise NotNowError(shown(answer.error))
    return answer


def last_words(line: Line) -> WireError | None:
    """Why the other side hung up, if it has said so."""
    try:
        answer = line.hear(Answer, LINE_LIMIT, patience=0.0)
    except WireError:
        return None
    return NotNowError(shown(answer.error)) if answer.error else None
