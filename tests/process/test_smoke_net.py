from tests.process.machines import *
from tests.process.jobs import script
def test_smoke(tmp_path):
    with machines(tmp_path, "ada", "bob", "cyd") as net:
        words = ["--nnodes","2","--nproc-per-node","1","--rdzv-endpoint",f"{net['ada'].address}:{PORT}"]
        t=time.monotonic()
        a = net.start("ada","run","--rdzv-id","job",*words,script("train.py"),"--out",str(tmp_path/"out"))
        b = net.start("bob","run",*words,script("train.py"),"--out",str(tmp_path/"out"))
        job=a.job()
        try:
            job.wait_stepping(1)
        finally:
            print(time.monotonic()-t)
            print(a.output, b.output)
