"""Suites: several tasks under one name, with the files of their data."""

from whorl.evals.suites.catalog import catalog, catalog_file
from whorl.evals.suites.suite import SUITES, SuiteInputs, TaskSources, load_suite, load_tasks

__all__ = ["SUITES", "SuiteInputs", "TaskSources", "catalog", "catalog_file", "load_suite", "load_tasks"]
