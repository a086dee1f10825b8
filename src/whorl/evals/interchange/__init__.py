"""Our models under the evaluators of other projects."""
