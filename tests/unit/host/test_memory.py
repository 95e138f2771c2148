"""OOM evidence: real kernel lines, and the files of both cgroup versions."""

import pytest

from perdure.host.memory import MemoryGroup, OomKill, find_memory_group, parse_counters, parse_kills, parse_kmsg_record

# https://github.com/docker/for-linux/issues/1001 (kernel 4.x: the reason is on the line before)
OLD_CGROUP = """\
May 08 23:01:53 node-a kernel: [  152.700479] Memory cgroup out of memory: Kill process 3142 (python3) score 68 or sacrifice child
May 08 23:01:53 node-a kernel: [  152.701942] Killed process 3254 (python3) total-vm:11968kB, anon-rss:4288kB, file-rss:3972kB, shmem-rss:0kB
May 08 23:01:53 node-a kernel: [  152.702700] oom_reaper: reaped process 3254 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""  # noqa: E501
# https://github.com/equinor/ert/issues/7797 (kernel 5.x)
WHOLE_MACHINE = """\
2024-04-22T14:55:41,679685+02:00 oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice/user-1001.slice/user@1001.service,task=perl,pid=1340763,uid=1001
2024-04-22T14:55:41,679700+02:00 Out of memory: Killed process 1340763 (perl) total-vm:87033376kB, anon-rss:60356340kB, file-rss:0kB, shmem-rss:0kB, UID:1001 pgtables:169956kB oom_score_adj:0
2024-04-22T14:55:46,947445+02:00 oom_reaper: reaped process 1340763 (perl), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""  # noqa: E501
# captured from /dev/kmsg of Linux 6.18: a Python in a cgroup v1 with a limit of 64 MiB
RECORD = (
    b"3,422,1667214355,-;Memory cgroup out of memory: Killed process 14849 (python) total-vm:78304kB, "
    b"anon-rss:68224kB, file-rss:5780kB, shmem-rss:0kB, UID:0 pgtables:192kB oom_score_adj:0\n"
)
REPORT = [  # the lines before it, shortened, which name the process too but are no kill
    b"4,345,1667211193,-;CPU: 1 UID: 0 PID: 14849 Comm: python Not tainted 6.18 #1 PREEMPT(none) \n",
    b"6,420,1667214328,-;[  14849]     0 14849    19576    18501    17056     1445  0   196608  0 python\n",
    b"4,421,1667214332,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python,pid=14849\n",
]


def test_parse_kills_of_an_old_kernel_takes_the_reason_from_the_line_before() -> None:
    (kill,) = parse_kills(OLD_CGROUP.splitlines())
    assert (kill.pid, kill.by, kill.rss) == (3254, "cgroup", 8260 * 1024)
    assert kill.line.startswith("Killed process 3254 (python3) total-vm")


def test_parse_kills_of_the_whole_machine() -> None:
    (kill,) = parse_kills(WHOLE_MACHINE.splitlines())
    assert (kill.pid, kill.by, kill.rss) == (1340763, "kernel", 60356340 * 1024)


def test_parse_kills_of_a_kmsg_record() -> None:
    message = parse_kmsg_record(RECORD)
    (kill,) = parse_kills([*map(parse_kmsg_record, REPORT), message])
    assert kill == OomKill(14849, "cgroup", 74004 * 1024, message)


def test_parse_kmsg_record_leaves_out_the_dictionary() -> None:
    # form: Documentation/ABI/testing/dev-kmsg
    assert parse_kmsg_record(b"6,339,5140900,-;NET: Registered protocol family\n SUBSYSTEM=net\n") == (
        "NET: Registered protocol family"
    )


def test_parse_kills_of_other_lines_finds_nothing() -> None:
    assert parse_kills(["oom_reaper: reaped process 1 (x)", "segfault at 0", ""]) == []


MOUNTS_V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
MOUNTS_V2 = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
MOUNTS_POD = "41 31 0:38 /kubepods/pod1 /sys/fs/cgroup ro,relatime - cgroup2 cgroup rw\n"


@pytest.mark.parametrize(
    ("cgroups", "mounts", "path", "version"),
    [
        ("4:memory:/slurm/job_42\n0::/\n", MOUNTS_V1, "/sys/fs/cgroup/memory/slurm/job_42", 1),
        ("0::/system.slice/job.scope\n", MOUNTS_V2, "/sys/fs/cgroup/system.slice/job.scope", 2),
        ("0::/kubepods/pod1/c1\n", MOUNTS_POD, "/sys/fs/cgroup/c1", 2),
        ("0::/\n", MOUNTS_V2, "/sys/fs/cgroup", 2),
    ],
)
def test_find_memory_group_in_either_version(cgroups: str, mounts: str, path: str, version: int) -> None:
    group = find_memory_group(cgroups, mounts)
    assert group is not None
    assert (group.path, group.version) == (path, version)


def test_find_memory_group_without_a_mount_finds_none() -> None:
    assert find_memory_group("4:memory:/x\n", MOUNTS_V2) is None
    assert find_memory_group("", MOUNTS_V1) is None
    assert find_memory_group("4:memory:/\n", MOUNTS_V1) == MemoryGroup(
        "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory", 1
    )


def test_parse_counters_of_both_versions() -> None:
    assert parse_counters("low 0\nmax 17\noom 2\noom_kill 1\n")["oom_kill"] == 1
    assert parse_counters("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")["oom_kill"] == 3
