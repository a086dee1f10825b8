"""Probes: side effects of fine-tuning. Each probe is a function that returns numbers; `run.py` measures all of them.

forgetting.py   bits per byte on held-out text, before and after a stage
exposure.py     loss on own samples against loss on data, by position
knowledge.py    made-up answers during SFT on known or unknown facts; refusal and over-refusal
"""
