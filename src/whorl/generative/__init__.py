"""Generative models: one network and one trainer under different objectives, measured against known distributions.

methods/        one file per family: settings, networks, random fields of a batch, losses, sampling
task.py         training, a task of rows
data.py         pictures, and samples of the densities of densities.py
measures.py     samples against held-out data: distances.py, modes, likelihood
saved_model.py  a model in a folder; pictures.py: samples as a picture
trained.py      findings of a trained model; views.py: samples by step, interpolations, guidance
samplers.py     from noise to data; likelihood.py: densities by the probability-flow ODE
"""
