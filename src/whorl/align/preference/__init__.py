"""Preference optimization (DPO, KTO, IPO, SimPO, ORPO) and reward models."""
