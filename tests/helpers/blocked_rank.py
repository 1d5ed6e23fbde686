"""A script for torchrun: rank 2 fails, and kills itself after a restart; other ranks block in C code."""

import ctypes
import os
import signal
import sys
import time

import torch.distributed as dist

from fairseq_tutel.parallel import rendezvous, world
from fairseq_tutel.parallel.signals import SignalWatch

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo", init_method=rendezvous.METHOD, rank=rank, world_size=4)
with SignalWatch(["SIGTERM"], 60) as watch, world.ending_together("a test"):
    watch.begin_work()
    dist.barrier()
    if rank == 2:
        time.sleep(1)
        if attempt > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit("error: a broken sample.")
    while True:
        ctypes.CDLL(None).usleep(900_000)
