"""How long a job stands still after a fault: ours and torchrun, in one run, in turns.

Time runs from the fault (a signal that we send) to the end of the last rank's first all-reduce of the next generation.
A launcher that has not brought all ranks back by the limit has not recovered; it is ended, and the next try gets a
fresh one. Last line of output: one JSON object.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import processes
from contestants import AS_SHIPPED, OURSELVES, START_WITHIN, WITHOUT_SHARING, Contestant, Setting, remove_library
from launchers import Report, Running
from readlog import wait_for_spare

Strike = Callable[[Running, dict[int, Report], random.Random], None]
ROUND = 5  # kills on one instance before the next launcher has its turn


def kill_rank(_job: Running, ranks: dict[int, Report], dice: random.Random) -> None:
    processes.kill([dice.choice(list(ranks.values())).pid])


def freeze_rank(_job: Running, ranks: dict[int, Report], dice: random.Random) -> None:
    processes.kill([dice.choice(list(ranks.values())).pid], signal.SIGSTOP)


def kill_any_node(_job: Running, ranks: dict[int, Report], dice: random.Random) -> None:
    processes.kill(processes.descendants(dice.choice(sorted({r.parent for r in ranks.values()}))))


def kill_second_node(job: Running, ranks: dict[int, Report], dice: random.Random) -> None:
    """A node that does not host torchrun's rendezvous: with its host, torchrun loses the job."""
    processes.kill(processes.descendants(dice.choice(sorted({r.parent for r in ranks.values()} - {job.first}))))


@dataclass(frozen=True)
class Case:
    name: str
    setting: Setting
    strike: Strike
    limit: float
    """Seconds until a try counts as not recovered."""
    peers: tuple[Contestant, ...]
    tries: int
    peer_tries: int
    peer_strike: Strike | None = None


@dataclass
class Result:
    """What one contestant did in one case."""

    seconds: list[float] = field(default_factory=list)
    tried: int = 0

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


class Player:
    """One contestant in one case, with its running instance."""

    def __init__(self, case: Case, contestant: Contestant, dice: random.Random) -> None:
        self._case, self._contestant, self._dice = case, contestant, dice
        self._job: Running | None = None
        self._ranks: dict[int, Report] = {}
        self.result = Result()
        self.tries = case.tries if contestant.ours else case.peer_tries

    def play(self, tries: int) -> None:
        """Up to `tries` faults on one instance; a new instance after a try that did not recover."""
        for _ in range(min(tries, self.tries - self.result.tried)):
            self._one_try()
        self.end()

    def end(self) -> None:
        if self._job is not None:
            for left in self._job.end(politely=self._contestant.ours):
                say(f"    left after SIGTERM: {left}")
        self._job = None

    def _start(self) -> Running:
        job = self._contestant.start(self._case.setting)
        self._job = job
        ranks = job.ranks(self._case.setting.ranks, START_WITHIN)
        if ranks is None:
            raise SystemExit(f"{self._contestant.name} did not start:\n{job.output()}")
        self._ranks = ranks
        if self._case.setting.nodes > 1:
            wait_for_spare(job, self._case.setting.nodes + 1, self._contestant.ours)
        return job

    def _one_try(self) -> None:
        job = self._job or self._start()
        time.sleep(self._dice.uniform(0.3, 0.8))  # a fault comes at any moment of the loop
        struck = time.time()
        strike = self._case.strike if self._contestant.ours else self._case.peer_strike or self._case.strike
        strike(job, self._ranks, self._dice)
        ranks = job.ranks(self._case.setting.ranks, self._case.limit, since=struck)
        self.result.tried += 1
        if ranks is None:
            say(f"    {self._contestant.name}: not recovered in {self._case.limit:.0f} s")
            if self._contestant.ours:
                say(job.output())
            self.end()
            return
        self._ranks = ranks
        self.result.seconds.append(max(report.time for report in ranks.values()) - struck)
        say(f"    {self._contestant.name}: {self.result.seconds[-1]:.3f} s")
        if self._case.setting.nodes > 1:
            self.end()  # its spare is used up


def play(case: Case, dice: random.Random) -> dict[Contestant, Result]:
    """All contestants in turns of a few faults each, so that all meet the machine in the same mood."""
    say(f"{case.name}, {case.setting.ranks} ranks")
    players = {contestant: Player(case, contestant, dice) for contestant in (OURSELVES, *case.peers)}
    try:
        while any(player.result.tried < player.tries for player in players.values()):
            for player in players.values():
                player.play(ROUND)
    finally:
        for player in players.values():
            player.end()
    return {contestant: player.result for contestant, player in players.items()}


def rows_of(case: Case, results: dict[Contestant, Result]) -> Iterable[dict[str, object]]:
    ours = results[OURSELVES]
    for peer in case.peers or (None,):
        theirs = results[peer] if peer else Result()
        row: dict[str, object] = {"case": case.name, "ranks": case.setting.ranks, "ours_s": ours.median}
        row |= {"peer": peer.name if peer else "n/a", "peer_s": theirs.median, "ratio": None}
        row |= {"recovered": len(ours.seconds), "tried": ours.tried}
        row |= {"peer_recovered": len(theirs.seconds), "peer_tried": theirs.tried}
        row |= {"ours_all_s": ours.seconds, "peer_all_s": theirs.seconds}
        if ours.median and theirs.median:
            row["ratio"] = theirs.median / ours.median
            row["ratio_least"] = min(theirs.seconds) / max(ours.seconds)
            row["ratio_most"] = max(theirs.seconds) / min(ours.seconds)
        yield row


def show(rows: list[dict[str, object]]) -> None:
    """The table for a reader. A peer's times are those of its recoveries alone, which flatters it."""
    heads = ("case", "ranks", "ours: median (range)", "back", "peer", "peer: median (range)", "back", "ratio (range)")
    lines = [heads]
    for row in rows:
        ratio = "n/a"
        if row["ratio"]:
            ratio = f"{row['ratio']:.1f} ({row['ratio_least']:.1f}-{row['ratio_most']:.1f})"
        ours, theirs = _spread(row["ours_all_s"]), _spread(row["peer_all_s"])
        back, peer_back = f"{row['recovered']}/{row['tried']}", f"{row['peer_recovered']}/{row['peer_tried']}"
        lines.append((str(row["case"]), str(row["ranks"]), ours, back, str(row["peer"]), theirs, peer_back, ratio))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _spread(seconds: object) -> str:
    if not isinstance(seconds, list) or not seconds:
        return "n/a"
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def cases(kills: int, quick: bool) -> list[Case]:
    both = (AS_SHIPPED, WITHOUT_SHARING)
    killed = [Case("SIGKILL", Setting(ranks), kill_rank, 30, both, kills, kills) for ranks in (2, 4)]
    slow_tries = 2 if quick else kills
    slow = Case("SIGKILL, slow import", Setting(4, slow_library=True), kill_rank, 40, both, slow_tries, slow_tries)
    # The peer sees a frozen rank by its collectives' time limit, then waits 30 s for the frozen one to end: 53 s each.
    frozen = Case("SIGSTOP", Setting(4, timeout=20), freeze_rank, 90, () if quick else (AS_SHIPPED,), kills, 2)
    node = Setting(4, nodes=2)
    peers = () if quick else (AS_SHIPPED,)
    lost = Case("node lost, one spare", node, kill_any_node, 60, peers, kills, 2, kill_second_node)
    return [*killed, slow, frozen, lost]


_QUIET = False


def say(text: str) -> None:
    if not _QUIET:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--kills", type=int, help="faults for each launcher and case (10; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="leave out what takes the peers minutes")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--ranks", type=int, help="only cases with this many ranks")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    global _QUIET
    _QUIET = args.json
    dice = random.Random(args.seed)
    rows: list[dict[str, object]] = []
    try:
        for case in cases(args.kills or (3 if args.quick else 10), args.quick):
            if (args.case and args.case not in case.name) or (args.ranks and args.ranks != case.setting.ranks):
                continue
            rows.extend(rows_of(case, play(case, dice)))
    finally:
        remove_library()
    if not args.json:
        show(rows)
    print(json.dumps({"rows": rows}))
    if any(row["recovered"] != row["tried"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
