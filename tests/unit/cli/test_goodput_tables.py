import msgspec

from perdure.cli.goodput import render_goodput
from perdure.goodput import GoodputReport, Phase, account, tabulate
from tests.unit.goodput.a_log import LogBuilder, a_run


def a_job() -> LogBuilder:
    log = a_run().after(10.0).exited(2, signal=9, step=60).diagnosed("worker.signal", "rank 2 was killed", 1)
    log.restart().running(0.1, last_step=60).stepped(51, after=0.1).caught_up(61, after=1.5).after(5.0)
    return log.finished().finish().after(0.1).ended()


def test_goodput_table_adds_up_and_says_what_effective_means() -> None:
    assert render_goodput(account(a_job().records), json=False).splitlines() == [
        "73.2% effective training time   job run-7f3a2c: 20 s wall time, 3 nodes",
        "phase         node-seconds    share                        what it is",
        "training             30.00   51.5 %  ██████████▎           steps that were new",
        "redone steps          3.00    5.2 %  █                     steps done before, and not saved",
        "recovery              0.40    0.7 %  ▏                     fault known, to the next first step",
        "start-up              7.40   12.7 %  ██▌                   joining, to the first step",
        "shutdown              0.20    0.3 %  ▏                     stop or last worker's end, to job's end",
        "idle spare           17.20   29.6 %  █████▉                present, not in the generation",
        "total                58.20  100.0 %                        all nodes, from joining to going",
        "",
        "restarts by cause  count  back  detection, median  recovery, median  redone, median",
        "worker.signal          1     1             0.00 s            0.20 s          1.50 s",
        "",
        "Effective training time = training / (all node-seconds - idle spare); redone steps are not training.",
    ]


def test_goodput_json_has_every_phase_the_restarts_and_the_nodes() -> None:
    ledger = account(a_job().records)
    text = render_goodput(ledger, json=True)
    assert msgspec.json.decode(text, type=GoodputReport) == tabulate(ledger)
    body = msgspec.json.decode(text)
    assert [row["phase"] for row in body["rows"]] == [phase.value for phase in Phase]
    assert body["restarts"][0]["cause"] == "worker.signal"
    assert set(body["by_node"]) == {"node-0", "node-1", "node-2"}


def test_goodput_colour_is_only_where_it_is_asked_for() -> None:
    ledger = account(a_job().records)
    assert "\x1b[" not in render_goodput(ledger, json=False)
    assert "\x1b[" in render_goodput(ledger, json=False, colour=True)


def test_goodput_of_nothing_is_a_table_of_nothing() -> None:
    assert render_goodput(account(()), json=False).startswith("0.0% effective training time")
