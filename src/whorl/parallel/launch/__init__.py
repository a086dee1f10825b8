"""Launchers: the same ranks on this machine, under Slurm, on Kubernetes or in Ray.

    job.py          what is launched, and the exit codes of a rank
    elastic.py      the agent of one node, torchrun's: starts the ranks, and starts them again after one was lost
    schedulers.py   scripts for Slurm and Kubernetes, which start that agent on each node
    ray_train.py    the ranks as workers of Ray Train

A launcher knows nothing of recipes. It starts one command per rank with torch's variables (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), and each attempt has a name of its own (`ATTEMPT`), which all its ranks share.
"""
