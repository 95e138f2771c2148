"""64 agents with one plain-Python worker each, on this machine: how long until all run, and what control costs at rest.

Last line of output: one JSON object.
"""

import argparse
import json
import time

import processes
from launchers import OURS, Running


def control_of(job: Running) -> int:
    """Pid of the job's control process, found by its command line."""
    found = [pid for pid in job.pids if "control" in processes.command_line(pid)]
    if len(found) != 1:
        lines = [processes.command_line(pid) for pid in job.pids]
        raise SystemExit(f"expected one control process, found {len(found)} among {lines}")
    return found[0]


def measure(job: Running, agents: int, within: float, seconds: float) -> dict[str, float]:
    began = time.time()
    shape = ["--local-nodes", str(agents), "--nnodes", str(agents), "--nproc-per-node", "1"]
    job.start([*OURS, "--no-fork-server", *shape])
    ranks = job.ranks(agents, within)
    if ranks is None:
        raise SystemExit(f"not all of {agents} workers ran after {within:.0f} s:\n{job.output()}")
    running = max(report.time for report in ranks.values()) - began
    time.sleep(2)  # the last join's events are still being written
    control = control_of(job)
    agent_pids = sorted({report.parent for report in ranks.values()})
    share = processes.cpu_share([control, *agent_pids], seconds)
    return {
        "agents": agents,
        "all_running_s": running,
        "control_cpu_percent": share[control],
        "control_rss_bytes": processes.resident_bytes(control),
        "agent_cpu_percent_mean": sum(share[pid] for pid in agent_pids) / len(agent_pids),
        "agent_rss_bytes_mean": sum(processes.resident_bytes(pid) for pid in agent_pids) / len(agent_pids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--within", type=float, default=120.0, help="seconds until the start counts as failed")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the rest is watched")
    args = parser.parse_args()
    job = Running("idle.py")
    try:
        result = measure(job, args.agents, args.within, args.seconds)
    finally:
        left = job.end(politely=True)
    print(f"{args.agents} agents, one plain-Python worker each")
    print(f"start until all run   {result['all_running_s']:6.2f} s           (budget 15 s)")
    print(f"control at rest       {result['control_cpu_percent']:6.2f} % of a core (budget 5 %)")
    print(f"control memory        {result['control_rss_bytes'] / 2**20:6.1f} MiB         (budget 150 MB)")
    print(f"an agent at rest      {result['agent_cpu_percent_mean']:6.2f} % of a core (mean)")
    print(f"an agent's memory     {result['agent_rss_bytes_mean'] / 2**20:6.1f} MiB         (mean)")
    if left:
        print(f"left after SIGTERM: {left}")
    print(json.dumps({**result, "left_after_sigterm": len(left)}))


if __name__ == "__main__":
    main()
