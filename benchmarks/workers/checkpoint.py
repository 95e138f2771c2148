"""One rank of one trial: it saves by one method, each time beside a bare memcpy, and writes what it measured as JSON.

It knows no method: `checkpoint_ours` and `checkpoint_peers` do. All times are this rank's; who started it takes the
slowest rank's.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_methods import Method, Place, State, method_named

COMPLETE_WITHIN = 180.0  # seconds: DCP's process needs about 4 for 1 GiB, on a busy machine 15
POLL = 0.001
BASE_STEPS = 12  # steps before and after each save that say what a step costs when nothing else runs
TAIL = 0.3  # seconds of steps after a method says it is complete: what it still does then is drag, too
QUIET = 0.5  # seconds of steps for the method that saves nothing
MARK = 1024.0  # added right after `save` returns: what is read back with it was captured too late
MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class Memcpy:
    """The physical limit: one memmove per thread, between a private and a shared buffer that are faulted in."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._private = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_POPULATE)
        fd = os.memfd_create("perdure-bench-memcpy")
        os.ftruncate(fd, nbytes)
        self._shared = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | MAP_POPULATE)
        os.close(fd)
        self._threads = ThreadPoolExecutor(threads)
        share = -(-nbytes // threads)
        self._cuts = [(start, min(share, nbytes - start)) for start in range(0, nbytes, share)]
        for buffer in (self._private, self._shared):
            ctypes.memset(_address(buffer), 1, nbytes)
        for _ in range(3):
            self.out()
            self.back()

    def out(self) -> float:
        """Seconds from private into shared memory."""
        return self._copy(_address(self._shared), _address(self._private))

    def back(self) -> float:
        """Seconds from shared into private memory."""
        return self._copy(_address(self._private), _address(self._shared))

    def _copy(self, target: int, source: int) -> float:
        began = time.perf_counter()
        parts = [self._threads.submit(ctypes.memmove, target + at, source + at, size) for at, size in self._cuts]
        for part in parts:
            part.result()
        return time.perf_counter() - began


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Steps:
    """A training loop without training: fixed work for all cores and the memory bus, and one word from rank to rank."""

    def __init__(self) -> None:
        self._left, self._right, self._product = (torch.ones(1024, 1024) for _ in range(3))
        self._stream = torch.ones(8 << 20)  # 32 MiB: as large as the last-level cache here, so memory is part of a step
        self._vote = torch.zeros(1)

    def step(self, done: bool) -> tuple[float, bool]:
        """Seconds of one step, and whether all ranks were `done` at its end."""
        began = time.perf_counter()
        torch.mm(self._left, self._right, out=self._product)
        self._stream.mul_(1.0)
        self._vote.fill_(float(done))
        dist.all_reduce(self._vote, op=dist.ReduceOp.MIN)
        return time.perf_counter() - began, bool(self._vote.item())

    def some(self, count: int) -> list[float]:
        return [self.step(False)[0] for _ in range(count)]

    def while_saving(self, is_complete: Callable[[], bool], since: float) -> tuple[list[float], float]:
        """Durations of the steps until the save is complete everywhere and TAIL is over; when it was complete here."""
        taken: list[float] = []
        completed: float | None = None
        while True:
            if completed is None and is_complete():
                completed = time.perf_counter()
            now = time.perf_counter()
            if completed is None and now - since > COMPLETE_WITHIN:
                raise TimeoutError(f"not complete after {COMPLETE_WITHIN:.0f} s of steps")
            seconds, all_done = self.step(completed is not None and now - completed > TAIL)
            taken.append(seconds)
            if all_done and completed is not None:
                return taken, completed - since


class Trial:
    """What is done with one method, in order; `result` grows meanwhile."""

    def __init__(self, method: Method, state: State, memcpy: Memcpy) -> None:
        self._method, self._state, self._memcpy = method, state, memcpy
        self._steps = Steps()
        self._step = 0
        self.result: dict[str, object] = {}
        self._lists: dict[str, list[float]] = {
            name: []
            for name in ("memcpy_s", "warm_s", "total_s", "busy_s", "drag_s", "step_s", "memcpy_back_s", "restore_s")
        }

    def run(self, saves: int, restores: int) -> dict[str, object]:
        self._steps.some(2 * BASE_STEPS)
        if self._method.saves:
            self.result["first_s"], total = self._save_and_wait()
            self.result["first_total_s"] = total
            self._method.forget(self._step - 1)
        for number in range(saves):
            self._one_pair(while_training=number % 2 == 1 and self._method.in_background)
        if self._method.saves:
            self._restore(restores)
        began = time.perf_counter()
        self._method.close()
        self.result["close_s"] = time.perf_counter() - began
        return {**self.result, **self._lists}

    def _save(self) -> tuple[float, float]:
        """Seconds that the training thread was kept, and when the save began."""
        self._step += 1
        self._state.set(self._step)
        dist.barrier()
        began = time.perf_counter()
        self._method.save(self._step)
        return time.perf_counter() - began, began

    def _save_and_wait(self) -> tuple[float, float]:
        stall, began = self._save()
        return stall, self._wait(began)

    def _wait(self, began: float) -> float:
        """Seconds from `began` until the method says that the save is complete, with nothing else to do."""
        while not self._method.is_complete():
            if time.perf_counter() - began > COMPLETE_WITHIN:
                raise TimeoutError(f"not complete after {COMPLETE_WITHIN:.0f} s")
            time.sleep(POLL)
        total = time.perf_counter() - began
        dist.barrier()
        return total

    def _one_pair(self, while_training: bool) -> None:
        before = self._steps.some(BASE_STEPS) if while_training else []
        dist.barrier()
        self._lists["memcpy_s"].append(self._memcpy.out())
        stall, began = self._save()
        if self._method.saves:
            self._lists["warm_s"].append(stall)
        if not while_training:
            self._lists["total_s"].append(self._wait(began))
        else:
            taken, busy = self._steps.while_saving(self._method.is_complete, began)
            usual = statistics.fmean(before + self._steps.some(BASE_STEPS))
            self._lists["step_s"].append(usual)
            self._lists["busy_s"].append(busy)
            self._lists["drag_s"].append(sum(taken) - usual * len(taken))
        self._method.forget(self._step - 1)

    def _restore(self, restores: int) -> None:
        """The last save is read back, several times; its values were changed the moment `save` returned."""
        _, began = self._save()
        self._state.set(self._step, MARK)
        self._wait(began)
        correct = True
        for _ in range(restores):
            self._state.wipe()
            dist.barrier()
            self._lists["memcpy_back_s"].append(self._memcpy.back())
            dist.barrier()
            began = time.perf_counter()
            self._method.restore(self._step)
            self._lists["restore_s"].append(time.perf_counter() - began)
            correct = correct and self._state.is_of(self._step)
        self.result["correct"] = correct


def measure(args: argparse.Namespace) -> dict[str, object]:
    place = Place.from_environment(Path(args.folder))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // place.world))
    dist.init_process_group("gloo")
    kind = method_named(args.method)
    state = State(place.rank, args.mib << 20)
    method = kind(place, state)
    dist.barrier()
    began = time.perf_counter()
    method.open()  # before there are more threads than torch's: dlrover forks here
    opened = time.perf_counter() - began
    trial = Trial(method, state, Memcpy(state.nbytes, args.threads))
    result = trial.run(args.saves, args.restores)
    return {**result, "open_s": opened, "nbytes": state.nbytes, "version": method.version()}


def told(error: Exception) -> str:
    """The error in one line; of one that says nothing, the line of code that raised it."""
    text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
    return f"{type(error).__name__}: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True)
    parser.add_argument("--mib", type=int, required=True, help="of this rank's state")
    parser.add_argument("--threads", type=int, required=True, help="of the bare memcpy")
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--restores", type=int, required=True)
    parser.add_argument("--folder", required=True, help="where checkpoints go; removed by who started this")
    parser.add_argument("--result", required=True, help="file for the JSON; the rank is appended")
    args = parser.parse_args()
    result: dict[str, object]
    try:
        result = measure(args)
    except ImportError as error:
        traceback.print_exc()
        result = {"error": f"not installed ({error})"}
    except Exception as error:  # noqa: BLE001 - a peer's failure is a row
        traceback.print_exc()
        result = {"error": told(error)}
    target = Path(f"{args.result}.{os.environ['RANK']}")
    target.with_suffix(".part").write_text(json.dumps(result))
    target.with_suffix(".part").replace(target)
    os._exit(0)  # a peer's threads and exit hooks (lm-resiliency writes its memory to disk) are no part of the trial


if __name__ == "__main__":
    main()
