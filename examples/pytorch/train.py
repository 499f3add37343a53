#!/usr/bin/env python3
"""Data-parallel training of a small network with PyTorch DDP on CPUs (gloo), with save and resume.

Reads what PyTorch reads: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (LOCAL_RANK is not needed on CPUs). Any launcher that
sets them will do: srun under Muster or Slurm, torchrun, or nothing at all for one process.

The data are the handwritten digits of ../train/data (see the README there). Rank 0 saves; a checkpoint's final name appears
only when its contents are on disk, and a torn one is passed over at resume.
"""
import argparse
import csv
import glob
import gzip
import os
import pathlib
import re
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HELD_OUT = 297  # the last images measure accuracy
DATA = pathlib.Path(__file__).resolve().parent.parent / "train" / "data" / "digits.csv.gz"


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dir", default="checkpoints", help="directory of the checkpoints")
    p.add_argument("--data", default=DATA, help="file with the digits")
    p.add_argument("--steps", type=int, default=400, help="steps in all, those before a resume included")
    p.add_argument("--batch", type=int, default=240, help="images of a step, over all processes")
    p.add_argument("--save-every", type=int, default=50)
    p.add_argument("--log-every", type=int, default=10)
    p.add_argument("--pace", type=float, default=0.0, help="shortest time of a step in seconds")
    p.add_argument("--fail-at", type=int, default=0, help="end with an error after this step, to see a resume")
    return p.parse_args()


def load(path):
    """Returns images (n, 64) from 0 to 1 and labels (n)."""
    with gzip.open(path, "rt") as file:
        rows = torch.tensor([[float(v) for v in row] for row in csv.reader(file)])
    return rows[:, :64] / 16, rows[:, 64].long()


def save(directory, step, model, optimizer):
    """Makes a checkpoint appear as a whole and for good, or not at all."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"step-{step:08d}.pt")
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "wb") as file:
        torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    parent = os.open(directory, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def newest(directory):
    """Returns the newest checkpoint that can be read, or None."""
    paths = [p for p in glob.glob(os.path.join(directory, "step-*.pt")) if re.search(r"step-\d+\.pt$", p)]
    for path in sorted(paths, reverse=True):
        try:
            return torch.load(path, map_location="cpu")
        except (RuntimeError, EOFError, OSError) as error:  # truncated, or not there any more
            print(f"passed over {path}: {error}", flush=True)
    return None


def main():
    args = arguments()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        sys.exit(f"--batch {args.batch} cannot be shared evenly by {world} processes")
    say = print if rank == 0 else lambda *a, **k: None
    images, labels = load(args.data)
    train = len(images) - HELD_OUT

    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    # Rank 0 decides what to resume from and tells the others, so that all resume from the same.
    found = [newest(args.dir) if rank == 0 else None]
    dist.broadcast_object_list(found)
    begin = 0
    if found[0] is not None:
        network.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
        begin = found[0]["step"]
        say(f"resumed at step {begin}", flush=True)
    model = DistributedDataParallel(network)
    say(f"{world} processes, PyTorch {torch.__version__}", flush=True)

    share = args.batch // world
    per_epoch = train // args.batch
    for step in range(begin + 1, args.steps + 1):
        began = time.monotonic()
        epoch, within = divmod(step - 1, per_epoch)
        order = torch.randperm(train, generator=torch.Generator().manual_seed(epoch))
        own = order[within * args.batch + rank * share:][:share]
        loss = torch.nn.functional.cross_entropy(model(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients here
        optimizer.step()
        if step % args.log_every == 0 or step in (1, args.steps):
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            say(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if rank == 0 and (step % args.save_every == 0 or step == args.steps):
            save(args.dir, step, model, optimizer)
        if step == args.fail_at:
            dist.barrier()
            sys.exit(f"rank {rank}: failing on purpose at step {step}")
        time.sleep(max(0.0, args.pace - (time.monotonic() - began)))

    if rank == 0:
        with torch.no_grad():
            right = (network(images[train:]).argmax(1) == labels[train:]).float().mean().item()
        say(f"accuracy {right:.4f} on {HELD_OUT} images it never saw", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
