"""/proc, as text."""

import os

from perdure.host.proc import parse_io, parse_stat

# A process may call itself anything (prctl PR_SET_NAME): fields are counted from the last parenthesis.
STAT = (
    b"4242 (py) R (x) T 17 4242 4242 0 -1 4194304 1500 0 7 0 250 50 0 0 20 0 3 0 987654 230000000 2500 "
    b"18446744073709551615 1 1 0 0 0 0 0 16781312 2 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)


def test_parse_stat_of_a_name_with_parentheses() -> None:
    stat = parse_stat(STAT)
    ticks = os.sysconf("SC_CLK_TCK")
    assert (stat.state, stat.parent, stat.started_ticks) == ("T", 17, 987654)
    assert (stat.minor_faults, stat.major_faults, stat.cpu) == (1500, 7, 300 / ticks)
    assert stat.rss == 2500 * os.sysconf("SC_PAGESIZE")


def test_parse_io_adds_storage_reads_and_writes() -> None:
    text = b"rchar: 9\nwchar: 9\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
    assert parse_io(text) == 12288
    assert parse_io(b"") is None
