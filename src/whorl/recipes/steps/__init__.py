"""The steps that wire the rooms together, a file for each stretch of the way; found by
`registry.step_kinds`.
"""
