"""Language-model pretraining: the task, its precision, decay branches."""
