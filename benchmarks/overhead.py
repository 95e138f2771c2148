"""What Perdure costs while nothing happens: a step's hook in microseconds, agent and control at rest in % of a core.

The hook is measured directly, in this process, on a real heartbeat page: a loop with it against the same loop without
it. Last line of output: one JSON object.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import perdure
import processes
from launchers import OURS, Running
from many_agents import control_of
from perdure.trainer import heartbeat
from perdure.trainer.progress import StepCounter
from perdure.wire.page import HeartbeatPage

STEPS = 2_000  # half a millisecond of the fastest loop: most rounds end before another process gets the core
OPTIMIZER_STEPS = 100
ROUNDS = 300


def per_step(loop: Callable[[int], None], steps: int) -> float:
    """Microseconds of one turn of `loop`."""
    began = time.perf_counter_ns()
    loop(steps)
    return (time.perf_counter_ns() - began) / steps / 1000


def compare(plain: Callable[[int], None], hooked: Callable[[int], None], steps: int) -> dict[str, float]:
    """Extra microseconds of a turn of `hooked`: median and quartiles over rounds that alternate between the two."""
    plain(steps)
    hooked(steps)
    extra = [per_step(hooked, steps) - per_step(plain, steps) for _ in range(ROUNDS)]
    lower, middle, upper = statistics.quantiles(extra, n=4)
    return {"median_us": middle, "lower_quartile_us": lower, "upper_quartile_us": upper}


def bare_loop(steps: int) -> None:
    for _ in range(steps):
        pass


def told_loop(steps: int) -> None:
    for _ in perdure.current_run().steps(stop=steps):
        pass


def direct_loop(steps: int) -> None:
    done = heartbeat.current.step_done
    for step in range(steps):
        done(step)


def measure_optimizer_hook() -> dict[str, dict[str, float]]:
    """The hook by itself, and as extra time of one `optimizer.step()` of the smallest optimizer there is.

    The second includes how torch calls a hook; its step takes 16 us itself, so on a busy machine it is mostly noise.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    counter = StepCounter()

    def plain(steps: int) -> None:
        for _ in range(steps):
            optimizer.step()

    def hooked(steps: int) -> None:
        handle = register_optimizer_step_post_hook(counter)  # as trainer.progress does it, once for all optimizers
        plain(steps)
        handle.remove()

    def alone(steps: int) -> None:
        for _ in range(steps):
            counter(optimizer, (), {})

    within = compare(plain, hooked, OPTIMIZER_STEPS)
    if heartbeat.current.step != (ROUNDS + 1) * OPTIMIZER_STEPS:
        raise SystemExit("the optimizer's hook did not count its steps: nothing was measured")
    return {"optimizer hook": compare(bare_loop, alone, STEPS), "in optimizer.step": within}


def measure_hooks() -> dict[str, dict[str, float]]:
    page = HeartbeatPage(1)
    heartbeat.attach(os.dup(page.fd), 0, 1)
    results = measure_optimizer_hook()  # first: run.steps switches the optimizer's hook off
    results["run.steps"] = compare(bare_loop, told_loop, STEPS)
    results["step_done alone"] = compare(bare_loop, direct_loop, STEPS)
    told_loop(3)
    if page.read(0).step != 2:
        raise SystemExit("the page does not hold what was told: nothing was measured")
    heartbeat.current.detach()
    page.close()
    return results


def measure_rest(seconds: float, workers: int) -> dict[str, float]:
    """CPU of agent and control while `workers` workers wait."""
    job = Running("idle.py")
    try:
        job.start([*OURS, "--nproc-per-node", str(workers)])
        ranks = job.ranks(workers, 90)
        if ranks is None:
            raise SystemExit(f"the workers did not start:\n{job.output()}")
        time.sleep(2)  # what follows the start is no rest yet
        agent, control = next(iter(ranks.values())).parent, control_of(job)
        share = processes.cpu_share([agent, control], seconds)
        return {
            "agent_cpu_percent": share[agent],
            "control_cpu_percent": share[control],
            "agent_rss_bytes": processes.resident_bytes(agent),
            "control_rss_bytes": processes.resident_bytes(control),
        }
    finally:
        job.end(politely=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the rest is watched")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hooks-only", action="store_true", help="start no job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hooks = measure_hooks()
    print(f"extra microseconds of a step over {ROUNDS} rounds (median and quartiles; budget 5)")
    for name, result in hooks.items():
        spread = f"({result['lower_quartile_us']:.2f} to {result['upper_quartile_us']:.2f})"
        print(f"  {name:17} {result['median_us']:6.2f}  {spread}")
    output: dict[str, object] = {"hooks": hooks}
    if not args.hooks_only:
        rest = measure_rest(args.seconds, args.workers)
        output["rest"] = rest
        print(f"at rest, {args.workers} workers, over {args.seconds:.0f} s")
        for name, budget in (("agent", 2), ("control", 5)):
            share, memory = rest[f"{name}_cpu_percent"], rest[f"{name}_rss_bytes"] / 2**20
            print(f"  {name:8} {share:5.2f} % of a core (budget {budget}), {memory:.1f} MiB")
    print(json.dumps(output))


if __name__ == "__main__":
    main()
