"""A recipe for a small mixture of experts; `CODE` stands for the folder of the sources."""

MOE_RECIPE = """\
name = "small"
steps.ingest = { sources = ["CODE"], include = ["*.py", "**/*.py"] }
steps.curate = { parents = ["ingest"], validation_bytes = 40000, test_bytes = 40000 }
steps.tokenizer.parents = ["ingest", "curate", "plan"]
steps.tokens.parents = ["ingest", "curate", "tokenizer"]
steps.pretrain.parents = ["plan", "tokens", "tokenizer"]
steps.report.parents = ["ingest", "curate", "plan", "tokenizer", "tokens", "pretrain", "evaluate"]
[steps.plan]
parents = ["ingest", "curate"]
steps = 60
vocab_size = 400
data.seq_len = 128
replicas = 2
compile = false
[steps.plan.model]
d_model = 64
n_layers = 2
mlp_hidden = 64
experts = { n_experts = 4, top_k = 2, hidden = 64 }
mixers.attention = { n_heads = 2, n_kv_heads = 1, head_dim = 32 }
[steps.evaluate]
parents = ["ingest", "curate", "tokenizer", "tokens", "pretrain"]
baselines = false
items = 4
samples = 1
sample_tokens = 10
"""
