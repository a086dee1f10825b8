"""Preference optimisation (DPO, KTO, IPO, SimPO, ORPO) and reward models."""
