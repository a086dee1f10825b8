"""Generative models: one network and one trainer under different objectives, measured against known distributions.

methods/        one file per family: settings, networks, random fields of a batch, losses, sampling
task.py         training, a task of rows
data.py         pictures, and samples of the densities of densities.py
samplers.py     from noise to data; likelihood.py: densities by the probability-flow ODE
"""
