"""Probes: what a stage after pretraining does beside what it is for. Each is a function that returns plain figures.

forgetting.py   bits per byte on held-out text, before and after
exposure.py     loss on own samples against loss on data, position by position
knowledge.py    made-up answers over the course of SFT on facts that the model knows, or does not; refusal and over-refusal
"""
