"""Launchers: the same ranks on this machine, under Slurm, on Kubernetes or in Ray.

    spec.py         what is launched, and which exit codes of a rank start all ranks again
    rank.py         main program of a rank, which joins the world of `distributed.py`
    elastic.py      the agent of one node, torchrun's: starts the ranks, and starts them again after one was lost
    schedulers.py   scripts for Slurm and Kubernetes, which start that agent on each node
    ray_train.py    the ranks as workers of Ray Train

A launcher is independent of recipes. It starts one command per rank with torch's variables (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT). The ranks of one attempt share its name (`ATTEMPT`).
"""
