"""Signals as a terminal gives them: under nohup, or behind `&` in a script, children of a test would ignore them."""

import signal


def pytest_configure() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
