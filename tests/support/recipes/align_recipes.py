"""Recipe texts with a tiny byte model and small data sets, for tests of the alignment steps.

Dotted keys of a TOML file come before its tables, so add further `[steps.NAME]` at the end.
"""

INIT_MODEL = """
name = "stages"
steps.init_model = { d_model = 32, n_layers = 2, n_heads = 2, mlp_hidden = 32 }
"""
ARITHMETIC = """
steps.sums = { uses = "tasks", source = "arithmetic", max_train = 40, max_test = 6, levels = { 1 = 1.0 }, columns = false }
"""
# A model that writes sums, as the parent of steps that distil it or draft for it.
TRAINED = """
[steps.trained]
uses = "sft"
parents = ["init_model", "sums"]
data.seq_len = 64
data.batch_size = 4
data.epochs = 6
lr_scale = 1.0
model.dtype = "float32"
"""
PREFERENCES = """
steps.likes = { uses = "preferences", source = "files", path = "likes.jsonl", test_fraction = 0.25 }
"""
CORPUS = """
steps.ingest = { sources = ["code"] }
steps.curate.parents = ["ingest"]
steps.curate.query = "SELECT row, '' AS reason FROM attributes"
steps.curate.near_duplicate_similarity = 1.0
steps.curate.near_duplicates = "keep"
steps.curate.validation_bytes = 2000
steps.curate.test_bytes = 2000
steps.curate.max_held_out_fraction = 0.3
"""
