"""Costs by arithmetic: number formats, devices, models and their operators. Import from the modules."""
